"""What `explain` says of real quantizations, each line of it."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer

from quantmark import measure_sqnr
from quantmark.annotators.measure import observe_ranges
from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.configs import cadence, ethos_u85
from quantmark.observers.errors import InputError
from quantmark.reports import Explanation, explain
from quantmark.reports.words import counted
from support.flow import export, minmax_config, quantize
from support.packed import packed


def explained(model: nn.Module, inputs: Any, quantizer: BackendQuantizer) -> Explanation:
    quantize(model, inputs, quantizer)
    return explain(quantizer)


@pytest.mark.parametrize("ranges_first", [False, True])
def test_every_op_is_told_with_its_reason(ranges_first: bool) -> None:
    model, inputs = packed()
    config = minmax_config()
    table = observe_ranges(export(model, inputs), [inputs], estimator="minmax") if ranges_first else None
    found = explained(model, inputs, BackendQuantizer(config, table))
    told = {op.node: (op.op, op.module, op.status.value) for op in found.ops}
    assert told == {
        "slice_1": ("slice", "", "moved"),
        "linear": ("linear", "narrow", "fused"),
        "relu": ("relu", "act", "block"),
        "slice_2": ("slice", "", "moved"),
        "linear_1": ("linear", "wide", "block"),
        "mul": ("mul", "", "quantized"),
        "cat": ("cat", "", "joined"),
        "cumsum": ("cumsum", "", "float"),
    }
    assert found.op("cumsum").why == ("custom runs no quantized cumsum",)
    assert found.op("linear").why == ("in the block of relu",)
    assert found.op("cat").why == ("relu is requantized",)
    (relu, _) = found.op("cat").inputs
    assert (relu.value, relu.requantized) == ("relu", True)
    assert [(d.kind, d.outcome.value) for d in found.decisions] == [("branches", "independent"), ("join", "requantize")]
    assert found.observed[0] == found.observed[1] > 0
    counts = found.counts()
    assert (counts["blocks"], counts["activations fused"], counts["edges requantized"]) == (2, 1, 1)


def test_both_roads_say_the_same() -> None:
    model, inputs = packed()
    table = observe_ranges(export(model, inputs), [inputs], estimator="minmax")
    ours = explained(model, inputs, BackendQuantizer(minmax_config()))
    settled = explained(model, inputs, BackendQuantizer(minmax_config(), table))
    assert json.loads(ours.to_json()) == json.loads(settled.to_json())


def test_blocks_say_their_contract_and_whether_it_holds() -> None:
    found = explained(*packed(), BackendQuantizer(minmax_config()))
    fused, alone = found.blocks
    assert (fused.title, fused.module, fused.contract, fused.holds) == ("linear + relu", "narrow", "[0, inf]", True)
    assert (alone.title, alone.contract, alone.holds) == ("linear", "", True)
    numbers = found.groups[fused.group].numbers
    assert numbers is not None
    assert (numbers.zero_point, numbers.quant_min) == (-128, -128)


@pytest.mark.parametrize("first", [False, True])
def test_an_activation_that_shares_with_a_join_is_not_called_fused(*, first: bool) -> None:
    class Meets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.relu(self.a(x)), self.b(x)], 1)

    torch.manual_seed(0)
    model, inputs = Meets().eval(), (torch.randn(8, 4),)
    table = observe_ranges(export(model, inputs), [inputs], estimator="minmax") if first else None
    found = explained(model, inputs, BackendQuantizer(ethos_u85(estimator="minmax"), table))
    block = found.blocks[0]
    assert (block.title, block.contract) == ("linear + relu", "")
    assert block.unfused == "its activation is an op of its own, to share with the join behind it"
    assert found.op("relu").why == (block.unfused,)
    assert found.counts()["activations fused"] == 0


def test_groups_hold_qparams_ranges_and_channels() -> None:
    found = explained(*packed(), BackendQuantizer(minmax_config()))
    weights = [group for group in found.groups.values() if group.kind == "weight"]
    assert [(w.numbers.channels, w.numbers.zero_point) for w in weights if w.numbers] == [(4, 0), (4, 0)]
    together = found.groups[found.op("cat").output]
    assert set(together.cells) >= {"cat", "mul"}
    assert together.range is not None
    assert together.range[1] > 3.0


def test_before_calibration_it_says_what_is_not_observed() -> None:
    model, inputs = packed()
    quantizer = BackendQuantizer(minmax_config())
    prepare_pt2e(export(model, inputs), quantizer)
    found = explain(quantizer)
    assert found.observed[0] < found.observed[1]  # the scalar of mul is known already
    assert found.op("relu").status.value == "block"
    assert found.blocks[0].holds is None
    assert "not observed" in str(found)


def test_a_rule_is_named_where_it_leaves_an_op_float() -> None:
    quantizer = BackendQuantizer(minmax_config()).set_module_name("wide", None).set_module_name("nowhere", None)
    with pytest.warns(match="nowhere"):
        found = explained(*packed(), quantizer)
    assert found.op("linear_1").why == ("the rule for module name 'wide' leaves it float",)
    assert any("nowhere" in message for message in found.messages)


def test_the_hoist_that_was_feared_is_told() -> None:
    model, inputs = packed()
    found = explained(model, inputs, BackendQuantizer(cadence()))
    float_reads = [why for op in found.ops for why in op.why if "in float" in why]
    assert float_reads, str(found)
    assert "ALWAYS" in float_reads[0] or "hoist" in float_reads[0]


def test_text_json_and_tables() -> None:
    found = explained(*packed(), BackendQuantizer(minmax_config()))
    text = str(found)
    assert "relu is requantized" in text
    assert "independent" in text
    content = json.loads(found.to_json())
    assert content["schema"] == 1
    assert [op["node"] for op in content["ops"]] == [op.node for op in found.ops]
    assert content["decisions"][0]["outcome"] == "independent"
    stream = io.StringIO()
    Console(file=stream, width=160, force_terminal=True).print(found)
    assert "\x1b[" in stream.getvalue()
    assert "cumsum" in stream.getvalue()


def test_a_quantizer_that_annotated_nothing_is_an_error() -> None:
    with pytest.raises(InputError, match="annotated no graph yet"):
        explain(BackendQuantizer(minmax_config()))


def test_a_graph_tells_what_its_quantizer_does() -> None:
    model, inputs = packed()
    quantizer = BackendQuantizer(minmax_config())
    prepared = prepare_pt2e(export(model, inputs), quantizer)
    assert explain(prepared).to_json() == explain(quantizer).to_json()
    twin = copy.deepcopy(prepared)
    prepared(*inputs)
    calibrated = explain(quantizer)
    assert explain(prepared).to_json() == calibrated.to_json()
    assert calibrated.observed[0] == calibrated.observed[1]
    assert explain(twin).observed[0] < calibrated.observed[0], "the copy has seen nothing"
    twin(*inputs)
    twin = convert_pt2e(twin)
    assert explain(twin).to_json() == explain(convert_pt2e(prepared)).to_json() == calibrated.to_json()
    assert explain(copy.deepcopy(twin)).to_json() == calibrated.to_json()


def test_the_record_that_a_graph_keeps_is_in_no_ones_way(tmp_path: Path) -> None:
    model, inputs = packed()
    converted = quantize(model, inputs, minmax_config()).converted
    wanted = converted(*inputs)
    program = torch.export.export(converted, inputs)
    torch.export.save(program, tmp_path / "out.pt2")
    loaded = torch.export.load(tmp_path / "out.pt2").module()
    assert torch.equal(loaded(*inputs), wanted)
    assert pickle.loads(pickle.dumps(converted.meta)).keys() == converted.meta.keys()
    assert isinstance(loaded, GraphModule)
    with pytest.raises(InputError, match="holds no record of a BackendQuantizer"):
        explain(loaded)


def test_the_last_quantizer_that_quantized_anything_is_told_of() -> None:
    model, inputs = packed()
    both = ComposableQuantizer([BackendQuantizer(minmax_config()), BackendQuantizer(None)])
    prepared = prepare_pt2e(export(model, inputs), both)
    assert explain(prepared).counts()["blocks"] == 2


def test_a_loss_that_is_the_joins_own_does_not_sound_alarming() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(torch.cat([self.small(x), 7.0 * self.large(x)], 1))
            return y

    torch.manual_seed(0)
    found = explained(Joined().eval(), (torch.randn(16, 4),), BackendQuantizer(minmax_config()))
    (join,) = found.decisions
    assert not join.finding
    assert re.fullmatch(
        r"one qparams serve all; linear is \d\d\.\d dB coarser than alone, as the output is that it becomes a part of",
        join.reason,
    )
    assert re.search(r"shared +\d\d\.\d\d dB, as its output is", str(found))


def test_counts_are_spoken_in_the_singular() -> None:
    assert [counted(n, "blocks") for n in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
    assert [counted(1, what) for what in ("groups of several tensors", "batches", "edges requantized")] == [
        "1 group of several tensors",
        "1 batch",
        "1 edge requantized",
    ]


def test_measured_numbers_stand_in_text_and_tables() -> None:
    model, inputs = packed()
    converted = quantize(model, inputs, minmax_config()).converted
    measured = measure_sqnr(model, converted, [inputs], progress=False)
    text = str(explain(converted, measured))
    assert "SQNR dB" in text.splitlines()[1]
    (relu,) = (line for line in text.splitlines() if " relu " in line and " block " in line)
    assert f"{measured.of('relu'):.1f}" in relu
    assert text.splitlines()[-1] == f"SQNR of the outputs in dB: cumsum {measured.worst_db:.1f}"
    stream = io.StringIO()
    Console(file=stream, width=160).print(explain(converted, measured))
    Console(file=stream, width=160).print(measured)
    assert stream.getvalue().count("SQNR dB") == 2
    assert "SQNR" not in str(explain(converted))
