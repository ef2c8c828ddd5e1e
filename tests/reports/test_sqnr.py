"""Measured SQNR, held against numbers that were computed by hand."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from quantmark import BackendQuantizer, InputError, configs, measure_sqnr, quantize, sqnr_db
from quantmark.configs.base import BlockRules
from quantmark.reports import Measurement, explain
from quantmark.reports.measured import decibels
from support.flow import export, minmax_config
from support.flow import quantize as flow
from support.models import whole_model
from support.packed import packed

CONFIG = minmax_config()


def measured(model: nn.Module, batches: Any, config: Any = CONFIG, test: Any = None) -> tuple[Any, Measurement]:
    done = quantize(model, batches, config, progress=False)
    return done, measure_sqnr(model, done, test if test is not None else batches, progress=False)


def fake(x: Tensor, scale: float, zero_point: int) -> Tensor:
    return ((x / scale).round() + zero_point).clamp(-128, 127).sub(zero_point) * scale


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + x)


def test_against_numbers_by_hand() -> None:
    x = torch.tensor([[-1.0, 0.1, 0.33, 2.0]])
    done, found = measured(Scaled(), [x])
    (reading,) = found.readings("x")
    assert reading.numbers is not None
    assert reading.numbers.zero_point is not None
    ours = fake(x, reading.numbers.scale, reading.numbers.zero_point)
    assert reading.sqnr_db == reading.rounding_db == pytest.approx(sqnr_db(x, ours), rel=1e-5)
    (relu,) = found.readings("relu")
    assert relu.numbers is not None
    assert relu.numbers.zero_point is not None
    rounded = fake(torch.relu(x + x), relu.numbers.scale, relu.numbers.zero_point)
    assert relu.rounding_db == pytest.approx(sqnr_db(torch.relu(x + x), rounded), rel=1e-5)
    both = fake(torch.relu(ours + ours), relu.numbers.scale, relu.numbers.zero_point)
    assert relu.sqnr_db == pytest.approx(sqnr_db(torch.relu(x + x), both), rel=1e-5)
    assert found.outputs[0].sqnr_db == pytest.approx(sqnr_db(Scaled()(x), done.model(x)), rel=1e-6)
    assert (found.outputs[0].node, found.batches, found.unmatched) == ("relu", 1, ())


def test_batches_are_taken_together() -> None:
    loud, quiet = torch.tensor([[3.0, -2.2, 0.7]]), torch.tensor([[0.003, -0.0022, 0.0007]])
    done, found = measured(Scaled(), [loud], test=[loud, quiet])
    wanted = torch.cat([Scaled()(x) for x in (loud, quiet)])
    ours = torch.cat([done.model(x) for x in (loud, quiet)])
    assert found.worst_db == pytest.approx(sqnr_db(wanted, ours), rel=1e-6)
    assert found.batches == 2


def test_a_branch_is_measured_as_each_reader_gets_it() -> None:
    model, (x,) = packed()
    done, found = measured(model, [x])
    (relu,) = found.readings("relu")  # requantized at the cat's edge, read nowhere else
    told = explain(done.model)
    assert relu.numbers == told.groups[told.op("cat").output].numbers
    narrow = found.readings("slice_1")[0].numbers
    assert narrow is not None
    assert narrow.zero_point is not None
    ours = fake(x[:, :4], narrow.scale, narrow.zero_point)
    assert found.of("slice_1") == pytest.approx(sqnr_db(x[:, :4], ours), rel=1e-4)
    linear = found.readings("linear")
    assert [each.numbers for each in linear] == [None], "inside a block"
    assert linear[0].rounding_db == math.inf
    assert linear[0].module == "narrow"


class TwoBranches(nn.Module):
    """A computed tensor with a narrow and a wide half, which int8 has to share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(x * 2.0)
        both: Tensor = self.a(y[:, :4]) + self.b(y[:, 4:])
        return both


@pytest.mark.parametrize(("ratio", "near"), [(2.0, 6.02), (4.0, 12.04)])
def test_measured_losses_agree_with_predicted_ones(ratio: float, near: float) -> None:
    torch.manual_seed(0)
    x = torch.rand(256, 8)
    x[:, 4:] *= ratio
    quantizer = BackendQuantizer(CONFIG).link("slice_1", "slice_2")
    done, found = measured(TwoBranches().eval(), [x], quantizer)
    decisions = explain(done.model).decisions
    (index,) = (at for at, each in enumerate(decisions) if each.kind == "branches")
    predicted = dict(decisions[index].losses_db)
    assert max(predicted.values()) == pytest.approx(near, abs=0.1)
    for cell, loss in predicted.items():
        assert found.losses_db[index][cell] == pytest.approx(loss, abs=0.3), cell


def test_an_operand_that_is_requantized_for_a_join_is_measured_there() -> None:
    model, (x,) = packed()
    done, found = measured(model, [x])
    decisions = explain(done.model).decisions
    (index,) = (at for at, each in enumerate(decisions) if each.kind == "join")
    assert dict(decisions[index].losses_db)["relu"] > 15
    assert found.losses_db[index]["relu"] == pytest.approx(dict(decisions[index].losses_db)["relu"], abs=2)


def test_batch_norms_are_folded_on_both_sides() -> None:
    model, calibration, test = whole_model("resnet")
    done, found = measured(model, calibration[:1], configs.xnnpack(estimator="minmax"), test[:1])
    assert found.unmatched == ()
    assert set(done.record.blocks) <= {tensor.node for tensor in found.tensors}
    assert found.worst_db == pytest.approx(sqnr_db(model(*test[0]), done.model(*test[0])), abs=0.01)


def test_a_block_whose_activation_is_erased_is_measured_all_the_same() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU()).eval(), torch.randn(32, 6)
    erasing = replace(CONFIG, blocks=BlockRules(erase_activations=True))
    done, found = measured(model, [x], erasing)
    assert not any(node.name.startswith("relu") for node in done.model.graph.nodes)
    _, kept = measured(model, [x])
    assert {t.node: t.sqnr_db for t in found.tensors if t.numbers} == pytest.approx(
        {t.node: t.sqnr_db for t in kept.tensors if t.numbers}
    )
    assert found.outputs == kept.outputs
    assert found.outputs[0].node == "relu_1"


def test_a_trained_model_is_measured_block_by_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    x = torch.randn(8, 3, 8, 8)
    done = flow(model.train(), (x,), minmax_config(is_qat=True), qat=True, train=move_exported_model_to_eval)
    found = measure_sqnr(model.eval(), done.converted, [x], progress=False)
    blocks = explain(done.converted).blocks
    assert [block.output for block in blocks] == ["batch_norm", "batch_norm_1"]
    assert all(found.of(block.output) > 25 for block in blocks), "their batch norms are folded away"
    assert found.unmatched == ()


def test_graphs_that_the_backend_rewrites_are_matched() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    x = torch.randn(16, 8)
    _, found = measured(model, [x], configs.arm_tosa(estimator="minmax"))
    assert found.unmatched == ()
    assert len(found.tensors) > 5
    assert found.worst_db > 25


def test_any_quantizers_output_can_be_measured() -> None:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    model, (x,) = packed()
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    prepared = prepare_pt2e(export(model, (x,)), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    found = measure_sqnr(model, converted, [x], progress=False)
    assert found.outputs[0].sqnr_db == pytest.approx(sqnr_db(model(x), converted(x)), rel=1e-5)
    assert found.losses_db == ()


class Counting(nn.Module):
    """Writes into a buffer and into its own values."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.fill_(1.0)
        y: Tensor = self.linear(x).relu_().mul_(0.5)
        return y + self.calls


def test_what_is_written_in_place_is_measured_before_and_nothing_stays_changed() -> None:
    torch.manual_seed(0)
    model, x = Counting().eval(), torch.randn(16, 4)
    done = quantize(model, [x], CONFIG, progress=False)
    state = copy.deepcopy(done.model.state_dict())
    first = measure_sqnr(model, done, [x], progress=False)
    assert first == measure_sqnr(model, done, [x], progress=False)
    assert all(torch.equal(value, state[name]) for name, value in done.model.state_dict().items())
    assert float(model.calls) == 0.0
    assert 25 < first.worst_db < 80


class Remembering(nn.Module):
    """Returns a buffer that it writes into."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(16, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        self.last.copy_(y)
        return y + 1.0, self.last


def test_an_output_that_is_a_buffer_is_measured_as_it_was_returned() -> None:
    torch.manual_seed(0)
    _, found = measured(Remembering().eval(), [torch.randn(16, 4)])
    assert len(found.outputs) == 2
    assert all(output.sqnr_db > 30 for output in found.outputs)


def test_an_output_that_is_not_finite_counts_for_nothing() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y, (y * 0.0 + 1.0) / 0.0

    torch.manual_seed(0)
    _, found = measured(Masked().eval(), [torch.randn(16, 4)], configs.xnnpack(estimator="minmax"))
    assert [math.isnan(output.sqnr_db) for output in found.outputs] == [False, True]
    assert found.worst_db == found.outputs[0].sqnr_db
    assert json.loads(found.to_json())["outputs"][1]["sqnr_db"] == "nan"


def test_an_unquantized_model_is_exact() -> None:
    model, (x,) = packed()
    with pytest.warns(match="nothing will be quantized"):
        done, found = measured(model, [x], BackendQuantizer(CONFIG).set_module_name("", None))
    assert {tensor.sqnr_db for tensor in found.tensors} == {math.inf}
    assert found.worst_db == math.inf
    assert json.loads(found.to_json())["worst_db"] == "inf"
    assert "exact" in str(found)
    assert done.record.blocks == {}


def test_the_explanation_and_its_json_hold_the_numbers() -> None:
    model, (x,) = packed()
    done, found = measured(model, [x])
    content = json.loads(explain(done.model, found).to_json())["measured"]
    assert json.loads(found.to_json()) == {"schema": 1, **content}
    assert content["outputs"] == [{"index": 0, "node": "cumsum", "sqnr_db": found.worst_db}]
    assert {tensor["node"]: tensor["sqnr_db"] for tensor in content["tensors"]}["relu"] == found.of("relu")
    assert json.loads(explain(done.model).to_json())["measured"] is None
    assert math.isnan(found.of("no such node"))
    assert [decibels(value) for value in (31.26, math.inf, math.nan)] == ["31.3", "exact", ""]


@pytest.mark.parametrize("batches", [[], iter(())])
def test_no_batches_is_an_error(batches: Any) -> None:
    model, (x,) = packed()
    done = quantize(model, [x], CONFIG, progress=False)
    with pytest.raises(InputError, match="no batches"):
        measure_sqnr(model, done, batches, progress=False)


def test_another_models_outputs_are_an_error() -> None:
    model, (x,) = packed()
    done = quantize(model, [x], CONFIG, progress=False)

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    with pytest.raises(InputError, match="2 outputs, the quantized one 1"):
        measure_sqnr(Two(), done, [x], progress=False)
