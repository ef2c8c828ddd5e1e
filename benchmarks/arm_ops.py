"""Run executorch's own Arm operator tests with quantmark in TOSAQuantizer's place, beside the tests as they are.

Run with `python benchmarks/arm_ops.py [NAME ...] [--keep KEYWORD] [--why]`: names of files under
`executorch/backends/arm/test/ops` without `test_` (the wheel ships them). Only the pipelines that lower to TOSA's INT
profile and run on the reference model are taken; a test that builds a TOSAQuantizer of its own to look at its observers
quantizes nothing here, and is not counted. What comes out otherwise on one side than on the other is listed; what
executorch expects to fail and passes is a pass. With ours

* one check is left out: that the quantized graph still names the float one's operator, since clamps are spelled by
  their bounds;
* a test that asks for what no config of ours has is skipped: int32 activations, with int8 at the program's border
  (`set_io`), each border tensor quantized twice.

Measured with executorch 1.5.1, torch 2.13.0, torchao 0.18.0 and tosa-tools 2026.5.0; passes of quantmark, in brackets
those of TOSAQuantizer:

    conv1d 33 (33)          conv2d 132 (132)      conv3d 115 (115)    conv_combos 25 (25)  depthwise_conv 52 (52)
    transpose_conv2d 25 (18)                      linear 84 (84)      relu 8 (8)           hardtanh 6 (6)
    clamp 34 (34)           sigmoid 17 (17)       softmax 9 (9)       cat 14 (14)          slice 19 (19)
    select 22 (22)          split 10 (10)         unbind 2 (2)        add 23 (28)          sub 29 (29)
    mul 23 (23)             mean_dim 36 (36)      max_pool 49 (49)    avg_pool2d 48 (48)   adaptive_avg_pool2d 54 (54)

All but five of add pass, which are the ones with int32 activations: 869 of 874 (TOSAQuantizer: 867). The seven of
transpose_conv2d are 4-bit weights per channel and one grouped; executorch expects them to fail. conv2d, conv3d,
depthwise_conv and adaptive_avg_pool2d take 4 to 20 minutes each.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from quantmark import BackendQuantizer, configs
from quantmark.configs import BackendConfig

CONVOLUTIONS = ["conv1d", "conv2d", "conv3d", "conv_combos", "depthwise_conv", "transpose_conv2d", "linear"]
ACTIVATIONS = ["relu", "hardtanh", "clamp", "sigmoid", "softmax"]
SHAPES = ["cat", "slice", "select", "split", "unbind"]  # chunk has no file of its own
ARITHMETIC = ["add", "sub", "mul", "mean_dim", "avg_pool2d", "max_pool", "adaptive_avg_pool2d"]
NAMES = CONVOLUTIONS + ACTIVATIONS + SHAPES + ARITHMETIC
ACTIVATION_DTYPES = {torch.int8: "int8", torch.int16: "int16"}
FOUR_BIT_MAX = 7
PASSED = ("passed", "xpassed")
MESSAGE_LENGTH = 400


def config_for(quantizer: Any, *, is_qat: bool) -> BackendConfig:
    """Return the config that says what the tests' quantizer was told; skip the test where none does."""
    told = quantizer.global_config
    spec, activation, weight = quantizer.tosa_spec, told.input_activation, told.weight
    if activation.dtype not in ACTIVATION_DTYPES:
        pytest.skip(f"no config of ours has {activation.dtype} activations")
    options: dict[str, Any] = {
        "activation": ACTIVATION_DTYPES[activation.dtype],
        "is_qat": is_qat,
        "per_channel": weight is None or weight.qscheme == torch.per_channel_symmetric,
        "weight_bits": 4 if weight is not None and weight.quant_max == FOUR_BIT_MAX else 8,
    }
    if spec.is_U55_subset:
        return configs.ethos_u55(**options)
    return configs.arm_tosa(**options)


def run_ours(stage: Any, artifact: torch.nn.Module, inputs: Any) -> None:
    """Quantize as the tests' own stage does, with our quantizer."""
    quantizer = BackendQuantizer(config_for(stage.quantizer, is_qat=bool(stage.is_qat)))
    prepare = prepare_qat_pt2e if stage.is_qat else prepare_pt2e
    if stage.is_qat:
        artifact.train()
    graph = torch.export.export(artifact, inputs, strict=True).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare(graph, quantizer)
        for batch in stage.calibration_samples or [inputs]:
            prepared(*batch)
        stage.converted_graph = convert_pt2e(prepared, fold_quantize=stage.fold_quantize)


class Outcomes:
    """Collects what became of each test that quantizes something."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.why: dict[str, str] = {}
        self.quantized = False

    def quantizing(self, run: Callable[..., None]) -> Callable[..., None]:
        """Return the tests' stage, noting that it was run."""

        def noted(*args: Any, **kwargs: Any) -> None:
            self.quantized = True
            run(*args, **kwargs)

        return noted

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test's outcome (pytest's hook)."""
        if report.when == "call" and self.quantized:
            name = report.nodeid.rpartition("/")[2]
            text = str(report.longreprtext)
            expected_to_fail = hasattr(report, "wasxfail") or text.startswith("[XPASS")
            passed = report.passed or text.startswith("[XPASS")
            self.of[name] = ("xpassed" if passed else "xfailed") if expected_to_fail else report.outcome
            if not passed:
                self.why[name] = _why(report)
        self.quantized = False


def _why(report: pytest.TestReport) -> str:
    """Return the last exception's message on one line, and where it was raised."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    message = " ".join(str(getattr(crash, "message", "")).split())
    return f"{message[:MESSAGE_LENGTH]} ({str(report.longreprtext).strip().rpartition('/')[2]})"


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep back what pytest and the reference model's native code write to stdout."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            os.close(stdout)


def run(files: list[Path], keep: str, *, ours: bool) -> Outcomes:
    """Run test files with one quantizer."""
    from executorch.backends.arm.test.tester.quantize import ArmQuantize
    from executorch.backends.test.harness.tester import Tester

    check = Tester.check

    def check_all_but_spelling(tester: Any, patterns: list[str]) -> Any:
        return check(tester, [each for each in patterns if not each.startswith("torch.ops.aten.")])

    outcomes = Outcomes()
    options = ["-q", "-k", keep, "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(files[0].parents[1])]
    with pytest.MonkeyPatch.context() as patch, _silent():
        patch.setattr(ArmQuantize, "run", outcomes.quantizing(run_ours if ours else ArmQuantize.run))
        if ours:
            patch.setattr(Tester, "check", check_all_but_spelling)
        pytest.main([*options, *map(str, files)], plugins=[outcomes])
    return outcomes


def main() -> None:
    """Print a row per file: tests passed of those run on either side."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}, or others; these by default")
    parser.add_argument("--keep", default="tosa_INT and not FP", help="pytest's -k")
    parser.add_argument("--why", action="store_true", help="say why each test failed")
    args = parser.parse_args()
    from executorch.backends import arm

    logging.disable(logging.ERROR)
    folder = Path(next(iter(arm.__path__))) / "test" / "ops"
    if not folder.is_dir():
        sys.exit(f"this executorch ships no tests of its Arm backend: {folder} is missing")
    table = Table("tests", "run", "TOSAQuantizer passes", "quantmark passes")
    failed: list[str] = []
    console = Console(width=120)
    total: Counter[str] = Counter()
    for name in args.names or NAMES:
        files = [folder / f"test_{name}.py"]
        theirs, ours = (run(files, args.keep, ours=side) for side in (False, True))
        counts = [sum(outcome in PASSED for outcome in side.of.values()) for side in (theirs, ours)]
        total.update(run=len(ours.of), theirs=counts[0], ours=counts[1])
        table.add_row(name, str(len(ours.of)), *map(str, counts))
        console.print(f"{name}: of {len(ours.of)} TOSAQuantizer passes {counts[0]}, quantmark {counts[1]}")
        for test, outcome in ours.of.items():
            if outcome != theirs.of.get(test):
                failed.append(f"{test}: {theirs.of.get(test)} with TOSAQuantizer, {outcome} with quantmark")
                failed += [f"    {ours.why[test]}"] if args.why and test in ours.why else []
    table.add_row("all", str(total["run"]), str(total["theirs"]), str(total["ours"]))
    console.print(table)
    for line in failed:
        console.print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
