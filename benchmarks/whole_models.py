"""Whole networks beside XNNPACK's own quantizer: SQNR of the converted graph, averaged over seeds.

Run with `python benchmarks/whole_models.py [--seeds N] [--models mobilenet,resnet,...]`. Same weights, same batches,
one run; what loses is printed as what wins.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from quantmark import BackendQuantizer, configs, sqnr_db

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.models import WHOLE, whole_model


def peer() -> Quantizer:
    """Return executorch's quantizer for XNNPACK with per-channel weights."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))


def measure(name: str, seed: int, quantizer: Quantizer) -> float:
    """Return the SQNR in dB of a quantized network against the float one, over all test batches."""
    model, calibration, test = whole_model(name, seed)
    calibration = [*calibration, *(batch for _ in range(3) for batch in WHOLE[name][1]())]
    prepared = prepare_pt2e(torch.export.export(model, calibration[0]).module(), quantizer)
    with torch.no_grad():
        for batch in calibration:
            prepared(*batch)
        graph = convert_pt2e(prepared)
        reference = torch.cat([model(*batch).flatten() for batch in test])
        return sqnr_db(reference, torch.cat([graph(*batch).flatten() for batch in test]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", default=",".join(WHOLE))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    table = Table("network", "quantmark (dB)", "XNNPACKQuantizer (dB)", "difference (dB)", "worst seed (dB)")
    for name in track(options.models.split(","), "quantizing", console=Console(stderr=True)):
        pairs = [
            (measure(name, seed, BackendQuantizer(configs.xnnpack())), measure(name, seed, peer()))
            for seed in range(options.seeds)
        ]
        ours, theirs = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
        worst = min(mine - other for mine, other in pairs)
        table.add_row(name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours - theirs:+.1f}", f"{worst:+.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
