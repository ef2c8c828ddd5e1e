"""Whole networks: beside XNNPACK's own quantizer in one run, and on the runtime.

The full table is printed by `benchmarks/whole_models.py`; here a subset runs by default, the others as `slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from quantmark import BackendQuantizer, configs, sqnr_db
from support.models import WHOLE, Batches, whole_model
from support.xnnpack import OnRuntime, run_both

FAST = ("detector", "shufflenet")
CASES = [pytest.param(name, marks=() if name in FAST else (pytest.mark.slow,)) for name in WHOLE]
NOISE_DB = 1.0
"""Two quantizations that differ in nothing but chance differ by so much on these nets."""


def peer() -> Quantizer:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))


def converted(model: nn.Module, batches: Batches, quantizer: Quantizer) -> GraphModule:
    prepared = prepare_pt2e(torch.export.export(model, batches[0]).module(), quantizer)
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    return convert_pt2e(prepared)


def over_db(model: nn.Module, got: list[tuple[Tensor, ...]], batches: Batches) -> float:
    with torch.no_grad():
        reference = torch.cat([model(*batch).flatten() for batch in batches])
    return sqnr_db(reference, torch.cat([outputs[0].flatten() for outputs in got]))


@pytest.mark.parametrize("name", CASES)
def test_switching_from_xnnpacks_quantizer_costs_nothing(name: str, tmp_path: Path) -> None:
    model, calibration, test = whole_model(name)

    def on_runtime(quantizer: Quantizer) -> OnRuntime:
        return run_both(converted(model, calibration, quantizer), test, tmp_path)

    ours, theirs = on_runtime(BackendQuantizer(configs.xnnpack())), on_runtime(peer())
    assert over_db(model, ours.eager, test) >= over_db(model, theirs.eager, test) - NOISE_DB
    assert ours.lowered.delegates <= theirs.lowered.delegates
    assert len(ours.lowered.outside) <= len(theirs.lowered.outside)
    assert over_db(model, ours.runtime, test) >= over_db(model, ours.eager, test) - 1.0
