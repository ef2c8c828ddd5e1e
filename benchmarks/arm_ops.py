"""Run executorch's own Arm operator tests with quantmark in TOSAQuantizer's place, beside the tests as they are.

Run with `python benchmarks/arm_ops.py [NAME ...] [--keep KEYWORD] [--why]`: names of files under
`executorch/backends/arm/test/ops` without `test_` (the wheel ships them). Only the pipelines that lower to TOSA's INT
profile and run on the reference model are taken. What fails on one side only is listed. One check is left out with
ours: that the quantized graph still names the float one's operator, since clamps are spelled by their bounds.
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
from collections.abc import Iterator
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
EIGHT, FOUR_BIT_MAX = 8, 7


def config_for(quantizer: Any) -> BackendConfig:
    """Return the config that says what the tests' quantizer was told."""
    told = quantizer.global_config
    spec, activation, weight = quantizer.tosa_spec, told.input_activation, told.weight
    options: dict[str, Any] = {
        "activation": "int8" if torch.iinfo(activation.dtype).bits == EIGHT else "int16",
        "per_channel": weight is None or weight.qscheme == torch.per_channel_symmetric,
        "weight_bits": 4 if weight is not None and weight.quant_max == FOUR_BIT_MAX else 8,
    }
    if spec.is_U55_subset:
        return configs.ethos_u55(**options)
    return configs.arm_tosa(**options)


def run_ours(stage: Any, artifact: torch.nn.Module, inputs: Any) -> None:
    """Quantize as the tests' own stage does, with our quantizer."""
    prepare = prepare_qat_pt2e if stage.is_qat else prepare_pt2e
    if stage.is_qat:
        artifact.train()
    graph = torch.export.export(artifact, inputs, strict=True).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare(graph, BackendQuantizer(config_for(stage.quantizer)))
        for batch in stage.calibration_samples or [inputs]:
            prepared(*batch)
        stage.converted_graph = convert_pt2e(prepared, fold_quantize=stage.fold_quantize)


class Outcomes:
    """Collects what became of each test."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.why: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test's outcome (pytest's hook)."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("/")[2]
            self.of.setdefault(name, "xfailed" if hasattr(report, "wasxfail") else report.outcome)
            if report.failed:
                self.why[name] = str(report.longreprtext).strip().rpartition("\n")[2]


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
        if ours:
            patch.setattr(ArmQuantize, "run", run_ours)
            patch.setattr(Tester, "check", check_all_but_spelling)
        pytest.main([*options, *map(str, files)], plugins=[outcomes])
    return outcomes


def main() -> None:
    """Print a row per file: tests passed of those run on either side."""
    parser = argparse.ArgumentParser(description=__doc__)
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
        counts = [sum(outcome == "passed" for outcome in side.of.values()) for side in (theirs, ours)]
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
