"""Compare quantmark with executorch's EthosUQuantizer by what Vela makes of whole models.

Run with `python benchmarks/arm_vela.py [MODEL ...] [--activation int16] [--target ethos-u55-128]`. Same weights, same
calibration, one run: cycles of one inference, SRAM in KiB, RESCALE and CLAMP operators in the TOSA graph, delegates,
ops left on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from quantmark import BackendQuantizer, configs
from quantmark.configs import BackendConfig
from quantmark.configs.arm import ActivationName
from support.flow import quantize
from support.models import WHOLE, whole_model
from support.vela import Compiled, compile_for, ethos_quantizer

TARGETS = ("ethos-u55-128", "ethos-u85-256")


def config_for(target: str, activation: ActivationName) -> BackendConfig:
    """Return our config for a target."""
    make = {"ethos-u55": configs.ethos_u55, "ethos-u65": configs.ethos_u65, "ethos-u85": configs.ethos_u85}
    return make[target.rpartition("-")[0]](activation=activation)


def measure(name: str, target: str, activation: ActivationName) -> tuple[Compiled, Compiled]:
    """Compile a model, one input at a time, as quantized by us and by executorch."""
    model, batches, _ = whole_model(name)
    one = [tuple(tensor[:1] for tensor in batch) for batch in batches]
    ours = BackendQuantizer(config_for(target, activation))
    theirs = ethos_quantizer(target, bits=8 if activation == "int8" else 16)
    flows = [quantize(model, one[0], each, batches=one, guards=False) for each in (ours, theirs)]
    first, second = (compile_for(flow.converted, one[0], target) for flow in flows)
    return first, second


def main() -> None:
    """Print two rows per model and target: ours and executorch's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(WHOLE)}; all by default")
    parser.add_argument("--activation", choices=("int8", "int16"), default="int8")
    parser.add_argument("--target", action="append", help=f"default: {', '.join(TARGETS)}")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    columns = ("cycles", "NPU", "SRAM KiB", "RESCALE", "CLAMP", "parts", "outside")
    table = Table("model", "target", "quantizer", *columns)
    for name in track(args.models or list(WHOLE)):
        for target in args.target or TARGETS:
            for who, found in zip(("quantmark", "EthosU"), measure(name, target, args.activation), strict=True):
                numbers = (found.cycles, found.npu, round(found.sram_kib, 1), found.rescales, found.clamps)
                counts = (*numbers, found.delegates, len(found.outside))
                table.add_row(name, target, who, *(f"{number:,}" for number in counts))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
