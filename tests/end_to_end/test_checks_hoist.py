"""What `check` foretells of Cadence's hoist pass is what the real pass then does."""

from __future__ import annotations

import pytest
import torch

from quantmark import configs
from quantmark.checks import check
from quantmark.observers.ranges import Range
from quantmark.observers.rules import HoistRule
from support.flow import pair_of, quantize, sqnr_db
from support.hoist import UNHOISTED, HoistAlways, Towers, identical, lower, packed, quantizes

# Left to the pass: branches as they come, each with qparams of its own.
IDENTICAL = configs.cadence(hoist=HoistRule.IDENTICAL, estimator="minmax", max_sharing_loss_db=0.0)
ALWAYS = configs.cadence(hoist=HoistRule.ALWAYS)
RANGES = [Range(-1.0, 1.7), Range(-1.0, 1.5), Range(-2.0, 100.0), Range(-1.1, 1.6)]


@pytest.mark.parametrize("cut", ["slice", "select", "split", "unbind", "nested", "views"])
def test_the_pass_harms_what_the_check_names(cut: str) -> None:
    model, x = Towers([(cut, False)], RANGES), packed(RANGES, 64)
    converted = quantize(model.eval(), (x,), IDENTICAL).converted
    before, after = lower(converted, [x]), lower(converted, [x], HoistAlways)
    found = [f for f in check(converted, ALWAYS).findings if f.code == "QM701"]
    assert [f.numbers for f in found] == [f.numbers for f in check(before.edge, ALWAYS).findings if f.code == "QM701"]
    assert bool(found) == (not identical(before.outputs, after.outputs))
    assert bool(found) == (cut not in UNHOISTED)
    if found:
        (hoisted,) = [n for n in after.graph.nodes if quantizes(n) and n.args[0].op == "placeholder"]
        chosen = pair_of(hoisted)
        assert (found[0].numbers["scale"], found[0].numbers["zero_point"]) == (chosen.scale, chosen.zero_point)


def test_the_predicted_loss_is_near_the_measured_one() -> None:
    """For values spread evenly over their range, as the prediction takes them to be; in dB, per branch."""
    x = packed(RANGES, 512)
    converted = quantize(Towers([("slice", False)], RANGES).eval(), (x,), IDENTICAL).converted
    (found,) = [f for f in check(converted, ALWAYS).findings if f.code == "QM701"]
    chosen = (found.numbers["scale"], int(found.numbers["zero_point"]))
    lib = torch.ops.quantized_decomposed

    def through(value: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
        args = (scale, zero_point, -128, 127, torch.int8)
        result: torch.Tensor = lib.dequantize_per_tensor(lib.quantize_per_tensor(value, *args), *args)
        return result

    measured: list[float] = []
    for node in [n for n in converted.graph.nodes if quantizes(n) and "slice" in str(n.args[0])]:
        pair = pair_of(node)
        part = x[:, 4 * len(measured) : 4 * len(measured) + 4]
        own = (pair.scale, pair.zero_point)
        alone, behind = through(part, *own), through(through(part, *chosen), *own)
        measured.append(sqnr_db(part, alone) - sqnr_db(part, behind))
    assert found.numbers["loss_db"] == pytest.approx(max(measured), abs=1.0)
    predicted = [float(text.split()[1]) for text in found.message.partition("loss: ")[2].split(", ")]
    assert predicted == pytest.approx(measured, abs=1.0)
