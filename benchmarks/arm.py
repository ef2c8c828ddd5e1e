"""Compare quantmark with executorch's TOSAQuantizer on Arm's reference model.

Run with `python benchmarks/arm.py [MODEL ...] [--activation int16] [--seeds N]`. Both sides see the same float model,
calibration and test batches, and run through the same partitioner.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from torchao.quantization.pt2e.quantizer import Quantizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from quantmark import BackendQuantizer, configs
from support.flow import quantize, sqnr_db
from support.models import WHOLE, whole_model
from support.tosa import run_on_reference

PROFILES = {"int8": "TOSA-1.0+INT", "int16": "TOSA-1.0+INT+int16"}


def tosa_quantizer(activation: str = "int8") -> Quantizer:
    """Return executorch's own quantizer with its config for int8 or int16 activations."""
    from executorch.backends.arm.quantizer.arm_quantizer import (
        TOSAQuantizer,
        get_symmetric_a16w8_quantization_config,
        get_symmetric_quantization_config,
    )
    from executorch.backends.arm.tosa import TosaSpecification

    config = get_symmetric_quantization_config if activation == "int8" else get_symmetric_a16w8_quantization_config
    return TOSAQuantizer(TosaSpecification.create_from_string(PROFILES[activation])).set_global(config())


def measure(name: str, quantizer: Quantizer, activation: str, seed: int) -> tuple[float, float, int]:
    """Return the SQNR in dB of the converted graph and of the reference model, and the number of delegates."""
    model, calibration, test = whole_model(name, seed)
    flow = quantize(model, calibration[0], quantizer, batches=calibration, guards=False)
    ran = run_on_reference(flow.converted, test, PROFILES[activation])
    exact = [model(*batch) for batch in test]
    eager, reference = (
        statistics.mean(sqnr_db(x, y[0]) for x, y in zip(exact, got, strict=True)) for got in (ran.eager, ran.reference)
    )
    return eager, reference, ran.delegates


def main() -> None:
    """Print one row per model: converted dB, reference dB and delegates of either side, means of the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(WHOLE)}; all by default")
    parser.add_argument("--activation", choices=PROFILES, default="int8")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    table = Table("model", *(f"{side}: {what}" for side in ("ours", "Arm's") for what in ("eager", "TOSA", "parts")))
    for name in track(args.models or list(WHOLE)):
        row = []
        sides: tuple[Callable[[], Quantizer], ...] = (
            lambda: BackendQuantizer(configs.arm_tosa(activation=args.activation)),
            lambda: tosa_quantizer(args.activation),
        )
        for make in sides:
            found = [measure(name, make(), args.activation, seed) for seed in range(args.seeds)]
            eager, reference, parts = zip(*found, strict=True)
            row += [f"{statistics.mean(eager):.1f}", f"{statistics.mean(reference):.1f}", str(max(parts))]
        table.add_row(name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
