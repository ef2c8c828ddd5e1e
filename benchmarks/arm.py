"""Compare quantmark with executorch's TOSAQuantizer on Arm's reference model: `python benchmarks/arm.py [MODEL ...]`.

Both sides see the same float model, calibration and test batches, and run through the same partitioner.
"""

from __future__ import annotations

import argparse
import statistics
import sys
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


def tosa_quantizer() -> Quantizer:
    """Return executorch's own quantizer with its int8 config."""
    from executorch.backends.arm.quantizer.arm_quantizer import TOSAQuantizer, get_symmetric_quantization_config
    from executorch.backends.arm.tosa import TosaSpecification

    quantizer = TOSAQuantizer(TosaSpecification.create_from_string("TOSA-1.0+INT"))
    return quantizer.set_global(get_symmetric_quantization_config())


def measure(name: str, quantizer: Quantizer) -> list[str]:
    """Return the SQNR in dB of the converted graph and of the reference model, and the number of delegates."""
    model, calibration, test = whole_model(name)
    flow = quantize(model, calibration[0], quantizer, batches=calibration, guards=False)
    ran = run_on_reference(flow.converted, test)
    exact = [model(*batch) for batch in test]
    sides = [
        statistics.mean(sqnr_db(x, y[0]) for x, y in zip(exact, got, strict=True)) for got in (ran.eager, ran.reference)
    ]
    return [*(f"{side:.1f}" for side in sides), str(ran.delegates)]


def main() -> None:
    """Print one row per model: converted dB, reference dB and delegates of either side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(WHOLE)}; all by default")
    names = parser.parse_args().models or list(WHOLE)
    table = Table("model", *(f"{side}: {what}" for side in ("ours", "Arm's") for what in ("eager", "TOSA", "parts")))
    for name in track(names):
        ours = measure(name, BackendQuantizer(configs.arm_tosa()))
        table.add_row(name, *ours, *measure(name, tosa_quantizer()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
