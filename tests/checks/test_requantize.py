"""Values that are quantized again: at once, behind movement, at a join."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quantmark import configs
from quantmark.checks import Severity, check
from support.flow import minmax_config, pair_of, quantize
from support.planting import bypass, insert_pair, quantize_after, set_qparams, the

X = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)
GENERIC = minmax_config()
XNNPACK = configs.xnnpack(estimator="minmax")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = nn.functional.max_pool2d(self.b(y).permute(0, 1, 3, 2), 2)
        return self.c(torch.cat([nn.functional.max_pool2d(y, 2) * 2.0, z], 1))


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(y[:, :4]) + self.b(y[:, 4:])


@cache
def _converted(kind: type[nn.Module]) -> GraphModule:
    return quantize(kind().eval(), X, GENERIC).converted


@pytest.fixture
def graph() -> GraphModule:
    return copy.deepcopy(_converted(Net))


def found(graph: GraphModule, config: configs.BackendConfig | None = GENERIC) -> list[tuple[str, str, Severity]]:
    """The findings of this kind: code, node, severity."""
    return [(f.code, f.node, f.severity) for f in check(graph, config).findings if f.code[2] in "45"]


def test_what_the_annotators_wrote_is_in_order(graph: GraphModule) -> None:
    assert [check(graph, config).findings for config in (GENERIC, None)] == [(), ()]
    assert found(graph, XNNPACK) == []


def test_finer_after_coarser(graph: GraphModule) -> None:
    conv = the(graph, "conv2d")
    first = quantize_after(conv)
    scale = pair_of(first).scale
    (dequantize, *_) = first.users
    insert_pair(dequantize, first, scale=scale / 4)
    codes = [(code, node) for code, node, _ in found(graph) if code in {"QM401", "QM402"}]
    assert codes == [("QM401", "conv2d"), ("QM402", "conv2d")]
    finding = next(f for f in check(graph, GENERIC).findings if f.code == "QM401")
    assert finding.numbers["loss_db"] == pytest.approx(12.04, abs=0.01)
    assert finding.numbers["clipped"] == pytest.approx(0.75, abs=0.01)


def test_coarser_after_finer_is_a_rescale(graph: GraphModule) -> None:
    first = quantize_after(the(graph, "conv2d"))
    (dequantize, *_) = first.users
    insert_pair(dequantize, first, scale=pair_of(first).scale * 2)
    assert [f for f in found(graph) if f[0][2] == "4"] == []


def test_a_range_that_shifts_cuts_one_side(graph: GraphModule) -> None:
    first = quantize_after(the(graph, "conv2d"))
    (dequantize, *_) = first.users
    pair = pair_of(first)
    second = insert_pair(dequantize, first, zero_point=pair.zero_point + 20)
    assert [f for f in found(graph) if f[0] == "QM402"] == []  # estimators cut tails of that size
    set_qparams(second, zero_point=pair.zero_point - 40)  # as far as a range is widened to have a neighbour's scale
    (finding,) = [f for f in check(graph, GENERIC).findings if f.code == "QM402"]
    assert finding.severity is Severity.INFO
    set_qparams(second, zero_point=pair.zero_point - 60)
    (finding,) = [f for f in check(graph, GENERIC).findings if f.code == "QM402"]
    assert finding.severity is Severity.WARNING
    assert finding.numbers["clipped"] == pytest.approx(59.5 / 255, abs=1e-4)


def test_what_a_relu_can_not_write_is_not_cut_off(graph: GraphModule) -> None:
    conv = the(graph, "conv2d")
    with graph.graph.inserting_after(conv):
        relu = graph.graph.call_function(torch.ops.aten.relu.default, (conv,))
    first = quantize_after(conv) if len(conv.users) == 1 else next(u for u in conv.users if u is not relu)
    first.replace_input_with(conv, relu)
    relu.meta["val"] = conv.meta["val"]
    set_qparams(first, scale=0.02, zero_point=0)
    (dequantize, *_) = first.users
    insert_pair(dequantize, first, zero_point=-128)
    assert [f for f in found(graph) if f[0] == "QM402"] == []


def test_from_16_to_8_bits_is_meant(graph: GraphModule) -> None:
    first = quantize_after(the(graph, "conv2d"))
    (dequantize, *_) = first.users
    wide: dict[str, Any] = {
        "dtype": torch.int16,
        "quant_min": -32767,
        "quant_max": 32767,
        "zero_point": 0,
        "scale": 1e-3,
    }
    insert_pair(dequantize, first)
    set_qparams(first, **wide)
    assert [f for f in found(graph) if f[0][2] == "4"] == []


def test_movement_whose_sides_disagree(graph: GraphModule) -> None:
    permute = the(graph, "permute")
    below = quantize_after(permute)
    scale = pair_of(below).scale
    set_qparams(below, scale=scale * 1.5)
    assert ("QM501", "permute", Severity.INFO) in found(graph)  # a rescale that sharing would save
    assert ("QM501", "permute", Severity.ERROR) in found(graph, XNNPACK)  # does not load
    set_qparams(below, scale=scale / 1.5)
    assert ("QM501", "permute", Severity.WARNING) in found(graph)  # cuts off
    set_qparams(below, scale=scale / 2.1)
    (finding,) = [f for f in check(graph, GENERIC).findings if f.node == "permute"]
    assert (finding.code, finding.severity) == ("QM501", Severity.WARNING)
    assert finding.numbers["loss_db"] == pytest.approx(6.44, abs=0.01)


def test_several_moves_in_a_row_run_in_float_together(graph: GraphModule) -> None:
    """XNNPACK refuses a single move with unequal sides, but runs dq -> permute -> max_pool -> q in float."""
    bypass(quantize_after(the(graph, "permute")))
    set_qparams(quantize_after(the(graph, "max_pool2d", 0)), scale=0.5)
    (code, _, severity) = next(f for f in found(graph, XNNPACK) if f[1] == "max_pool2d")
    assert (code, severity) == ("QM501", Severity.INFO)


def test_a_select_below_a_quantized_root() -> None:
    """The story of DESIGN 3: a narrow branch gets qparams of its own, but its root was quantized before."""
    graph = copy.deepcopy(_converted(Halves))
    assert check(graph, GENERIC).findings == ()
    below = quantize_after(the(graph, "slice"))
    set_qparams(below, scale=pair_of(below).scale / 32)
    (finding,) = check(graph, GENERIC).findings
    assert (finding.code, finding.severity) == ("QM501", Severity.WARNING)
    assert finding.numbers["loss_db"] == pytest.approx(30.1, abs=0.05)
    # the same on XNNPACK, where the slice falls back to float: right, though no better
    assert found(graph, XNNPACK) == [("QM501", finding.node, Severity.WARNING)]


def test_a_join_whose_operand_disagrees(graph: GraphModule) -> None:
    cat = the(graph, "cat")
    operand = cat.args[0][0]  # type: ignore[index]
    assert isinstance(operand, Node)
    source = operand.args[0]
    assert isinstance(source, Node)
    scale = pair_of(source).scale
    set_qparams(source, scale=scale * 0.9)
    assert ("QM502", "cat", Severity.INFO) in found(graph)  # covered: a rescale at the edge
    assert ("QM502", "cat", Severity.ERROR) in found(graph, XNNPACK)
    set_qparams(source, scale=scale * 2)
    assert ("QM502", "cat", Severity.WARNING) in found(graph)  # half of its range is cut off


def test_a_join_of_quantized_and_float(graph: GraphModule) -> None:
    cat = the(graph, "cat")
    operand = cat.args[0][1]  # type: ignore[index]
    assert isinstance(operand, Node)
    source = operand.args[0]
    assert isinstance(source, Node)
    value = source.args[0]
    assert isinstance(value, Node)
    with graph.graph.inserting_after(value):
        loose = graph.graph.call_function(torch.ops.aten.abs.default, (value,))
    loose.meta["val"] = cat.meta["val"]
    cat.replace_input_with(operand, loose)
    assert ("QM503", "cat", Severity.INFO) in found(graph)
