"""Defects at the borders of blocks, planted in graphs of a config that runs every op."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quantmark import BackendQuantizer, configs
from quantmark.checks import Finding, Severity, check
from quantmark.configs import BiasConfig, BiasKind, BlockRules, SymmetricActivation
from quantmark.observers.qparams import INT8_SYMMETRIC
from support.flow import calls, constant, minmax_config, quantize
from support.planting import bypass, insert_pair, quantize_after, set_qparams, the

X = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)
GENERIC = minmax_config()
DERIVED = minmax_config(bias=BiasConfig(kind=BiasKind.INT32_DERIVED))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.a(x))
        z = nn.functional.relu6(self.b(y))
        return torch.relu(self.c(z) + y)


@cache
def _converted(derived: bool = False) -> GraphModule:
    return quantize(Net().eval(), X, DERIVED if derived else GENERIC).converted


@pytest.fixture
def graph() -> GraphModule:
    return copy.deepcopy(_converted())


@pytest.fixture
def derived() -> GraphModule:
    return copy.deepcopy(_converted(derived=True))


def only(model: GraphModule, config: configs.BackendConfig | None, code: str) -> Finding:
    """The one finding on a model, which has the code."""
    (found,) = check(model, config).findings
    assert found.code == code
    return found


@pytest.mark.parametrize("config", [GENERIC, None])
def test_what_the_annotators_wrote_is_in_order(graph: GraphModule, config: configs.BackendConfig | None) -> None:
    report = check(graph, config)
    assert report.findings == ()
    assert report.counts == {"quantizes": 5, "dequantizes": 9, "weighted ops": 3}


def test_a_pair_between_head_and_clamp(graph: GraphModule) -> None:
    insert_pair(the(graph, "conv2d"), quantize_after(the(graph, "relu")), scale=0.1, zero_point=0)
    found = only(graph, GENERIC, "QM101")
    assert (found.node, found.severity) == ("relu", Severity.WARNING)
    output = quantize_after(the(graph, "relu")).args[1]
    assert isinstance(output, float)
    assert found.numbers["loss_db"] == pytest.approx(20 * torch.tensor(0.1 / output).log10().item(), abs=0.01)
    assert found.numbers["middle_scale"] == 0.1


def test_the_loss_is_what_fused_qparams_would_gain(graph: GraphModule) -> None:
    """A relu whose output shares the signed qparams of its input could have twice the resolution."""
    shared: dict[str, Any] = {"scale": 0.05, "zero_point": 0}
    set_qparams(quantize_after(the(graph, "relu")), **shared)
    insert_pair(the(graph, "conv2d"), quantize_after(the(graph, "relu")))
    found = only(graph, GENERIC, "QM101")
    assert found.numbers["loss_db"] == pytest.approx(20 * torch.tensor(255 / 127).log10().item(), abs=0.01)


def test_a_pair_behind_a_residual_add_is_only_assumed_without_a_config(graph: GraphModule) -> None:
    insert_pair(the(graph, "add"), quantize_after(the(graph, "relu", 1)))
    assert only(graph, GENERIC, "QM101").severity is Severity.WARNING
    assert only(graph, None, "QM101").severity is Severity.INFO


def test_a_clamp_that_the_config_does_not_fold_stays_apart_by_right(graph: GraphModule) -> None:
    insert_pair(the(graph, "conv2d"), quantize_after(the(graph, "relu")))
    for rules in (
        BlockRules(activations=frozenset({"hardtanh"})),
        BlockRules(activation_heads=frozenset({"linear"})),
    ):
        assert "QM101" not in check(graph, replace(GENERIC, blocks=rules)).codes()


def test_a_middle_with_two_readers_is_no_split_block(graph: GraphModule) -> None:
    conv = the(graph, "conv2d")
    middle = insert_pair(conv, quantize_after(the(graph, "relu")))
    (dequantize,) = middle.users
    with graph.graph.inserting_after(dequantize):
        graph.graph.call_function(torch.ops.aten.abs.default, (dequantize,))
    assert "QM101" not in check(graph, GENERIC).codes()


def test_symmetric_qparams_are_a_reason_to_stay_apart() -> None:
    rules = BlockRules(symmetric_activation=SymmetricActivation.SEPARATE)
    config = minmax_config(INT8_SYMMETRIC, blocks=rules)
    converted = quantize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), X, config).converted
    assert check(converted, config).findings == ()
    one_sided = replace(config, blocks=BlockRules())
    assert [f.severity for f in check(converted, one_sided).findings] == [Severity.WARNING]
    (finding,) = check(converted).findings
    assert (finding.code, finding.severity) == ("QM101", Severity.INFO)
    assert "symmetric" in finding.message


def test_a_batch_norm_behind_a_pair(graph: GraphModule) -> None:
    conv, relu = the(graph, "conv2d"), the(graph, "relu")
    (dequantize,) = insert_pair(conv, quantize_after(relu)).users
    with graph.graph.inserting_after(dequantize):
        args = (dequantize, None, None, None, None, False, 0.1, 1e-5, False)
        norm = graph.graph.call_function(torch.ops.aten.batch_norm.default, args)
    relu.replace_input_with(dequantize, norm)
    assert only(graph, GENERIC, "QM101").node == norm.name


def test_a_weight_quantized_without_its_input(graph: GraphModule) -> None:
    head = the(graph, "conv2d")
    bypass(head.args[0].args[0])  # type: ignore[union-attr, arg-type]
    found = only(graph, GENERIC, "QM102")
    assert (found.node, found.module_path, found.severity) == (head.name, "a", Severity.WARNING)
    assert "weight and output quantized, input float" in found.message


def test_a_weight_quantized_without_its_output(graph: GraphModule) -> None:
    bypass(quantize_after(the(graph, "hardtanh")))
    found = [f for f in check(graph, GENERIC).findings if f.code == "QM102" and f.node == "conv2d_1"]
    assert [f.severity for f in found] == [Severity.INFO]


def test_a_float_weight_between_quantized_values(graph: GraphModule) -> None:
    head = the(graph, "conv2d", 1)
    weight = head.args[1]
    assert isinstance(weight, Node)
    with graph.graph.inserting_before(head):
        float_weight = graph.graph.get_attr("b.weight")
    float_weight.meta["val"] = torch.empty(4, 4, 1, 1)
    head.replace_input_with(weight, float_weight)
    graph.register_parameter("_w", nn.Parameter(torch.randn(4, 4, 1, 1)))
    float_weight.target = "_w"
    graph.graph.eliminate_dead_code()
    found = only(graph, GENERIC, "QM102")
    assert (found.node, found.severity) == (head.name, Severity.INFO)


def test_a_module_that_is_left_float_is_worth_knowing_at_most() -> None:
    quantizer = BackendQuantizer(GENERIC).set_module_name("b", None)
    found = check(quantize(Net().eval(), X, quantizer).converted, GENERIC).findings
    assert [(f.code, f.node, f.severity) for f in found] == [("QM102", "conv2d_1", Severity.INFO)]


def test_a_bias_of_another_kind(graph: GraphModule, derived: GraphModule) -> None:
    assert check(derived, DERIVED).findings == ()
    float_bias = [f for f in check(graph, DERIVED).findings if f.code == "QM103"]
    assert [(f.node, f.severity) for f in float_bias] == [(f"conv2d{i}", Severity.ERROR) for i in ("", "_1", "_2")]
    assert [f.node for f in check(derived, GENERIC).findings if f.code == "QM103"] == ["conv2d", "conv2d_1", "conv2d_2"]


def test_a_derived_bias_with_another_scale(derived: GraphModule) -> None:
    dequantize = the(derived, "conv2d").args[2]
    assert isinstance(dequantize, Node)
    constant(dequantize.args[1]).mul_(1.5)
    found = only(derived, DERIVED, "QM104")
    assert (found.node, found.severity) == ("conv2d", Severity.ERROR)
    assert found.numbers["ratio"] == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_derived_bias_with_a_zero_point(derived: GraphModule, factor: float) -> None:
    dequantize = the(derived, "conv2d").args[2]
    assert isinstance(dequantize, Node)
    constant(dequantize.args[1]).mul_(factor)
    constant(dequantize.args[2]).add_(5)
    assert only(derived, DERIVED, "QM104").numbers["zero_point"] == 5.0


def test_calls_are_what_the_tests_think_they_are(graph: GraphModule) -> None:
    assert [n.name for n in calls(graph, "conv2d")] == ["conv2d", "conv2d_1", "conv2d_2"]
