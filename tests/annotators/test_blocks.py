"""Blocks that are cut short, shared, residual or in odd company: right nevertheless."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer, QuantizationAnnotation
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantmark import configs
from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.checks import check
from quantmark.configs.base import BiasConfig, BiasKind, BlockRules, WeightConfig
from quantmark.observers.qparams import INT16_SYMMETRIC
from support.flow import (
    Inputs,
    calls,
    export,
    is_dequantize,
    minmax_config,
    observed,
    outputs,
    pair_of,
    quantize,
    quantized_value,
    sqnr_db,
)

ANYTHING = minmax_config()


class Parts(nn.Module):
    """A few layers, and a function that runs them in some way."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.other = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(6, 6)
        self.embedding = nn.Embedding(10, 6)
        self.relu = nn.ReLU()

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def model(run: Callable[..., Any]) -> Parts:
    return Parts(run).eval()


def image() -> Inputs:
    torch.manual_seed(1)
    return (torch.randn(2, 4, 6, 6),)


def rows(*extra: Any) -> Inputs:
    torch.manual_seed(1)
    return (torch.randn(3, 6), *extra)


def losses(float_model: nn.Module, converted: GraphModule, inputs: Inputs) -> list[float]:
    """SQNR of each output in dB; dtypes and shapes must agree."""
    with torch.no_grad():
        want, got = (pytree.tree_leaves(m(*copy.deepcopy(inputs))) for m in (float_model, converted))
    assert [(t.dtype, t.shape) for t in want] == [(t.dtype, t.shape) for t in got]
    return [sqnr_db(w, g) for w, g in zip(want, got, strict=True) if w.numel()]


# -- blocks that end early ----------------------------------------------------------------------------------


def test_a_head_with_other_readers_keeps_its_activation_outside() -> None:
    def run(m: Parts, x: Tensor) -> Any:
        y = m.conv(x)
        return y, torch.relu(y)

    flow = quantize(model(run), image(), ANYTHING)
    raw, activated = outputs(flow.converted)
    (relu,) = calls(flow.converted, "relu")
    assert str(quantized_value(raw).target) == "aten.conv2d.default"
    assert quantized_value(activated) is relu
    assert is_dequantize(relu.args[0])
    assert pair_of(raw).zero_point != pair_of(raw).quant_min
    assert pair_of(activated).zero_point == pair_of(activated).quant_min
    assert min(losses(model(run), flow.converted, image())) > 35


def test_a_tail_behind_something_that_is_no_head_stands_alone() -> None:
    def run(m: Parts, x: Tensor) -> Any:
        return F.max_pool2d(m.conv(x), 2).relu()

    flow = quantize(model(run), image(), ANYTHING)
    (relu,) = calls(flow.converted, "relu")
    assert is_dequantize(relu.args[0])
    assert set(flow.quantizer.record.blocks) == {"conv2d"}  # type: ignore[attr-defined]
    assert min(losses(model(run), flow.converted, image())) > 35


def test_a_layer_that_runs_twice_makes_two_blocks_with_one_weight() -> None:
    def run(m: Parts, x: Tensor) -> Any:
        return m.relu(m.norm(m.conv(m.relu(m.norm(m.conv(x))))))

    flow = quantize(model(run), image(), ANYTHING, keep=True)
    blocks = flow.quantizer.record.blocks.values()  # type: ignore[attr-defined]
    assert [[n.name for n in b.members] for b in blocks] == [["conv2d", "relu"], ["conv2d_1", "relu_1"]]
    first, second = calls(flow.converted, "conv2d")
    assert constants(first) == constants(second)
    assert min(losses(model(run), flow.converted, image())) > 35


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_layer_that_runs_twice_has_a_derived_bias_for_each_input(per_channel: bool) -> None:
    """The bias asks the shared weight for its scale, which is in no other cell's following then."""

    def run(m: Parts, x: Tensor) -> Any:
        return m.relu(m.conv(m.relu(m.conv(x))))

    config = replace(
        ANYTHING, bias=BiasConfig(kind=BiasKind.INT32_DERIVED), weight=WeightConfig(per_channel=per_channel)
    )
    flow = quantize(model(run), image(), config)
    assert check(flow.converted, config).findings == ()
    assert all(is_dequantize(head.args[2]) for head in calls(flow.converted, "conv2d"))
    assert min(losses(model(run), flow.converted, image())) > 30


def constants(head: Any) -> Any:
    """What a head's quantized weight is read from."""
    assert is_dequantize(head.args[1])
    return head.args[1].args[0]


def test_a_weight_that_two_layers_read_on_different_axes_has_scales_for_each() -> None:
    def run(m: Parts, x: Tensor) -> Any:
        return m.linear(x), x @ m.linear.weight

    flow = quantize(model(run), rows(), ANYTHING)
    (linear,), (matmul,) = calls(flow.converted, "linear"), calls(flow.converted, "matmul")
    weights: list[Any] = [linear.args[1], matmul.args[1]]
    assert [w.args[3] for w in weights] == [0, 1]
    assert min(losses(model(run), flow.converted, rows())) > 35


def test_a_weight_tied_to_an_embedding_stays_whole_for_the_look_up() -> None:
    def run(m: Parts, tokens: Tensor) -> Any:
        looked_up = m.embedding(tokens)
        return looked_up, F.linear(m.linear(looked_up).relu(), m.embedding.weight)

    inputs = (torch.arange(10).reshape(2, 5),)
    flow = quantize(model(run), inputs, ANYTHING)
    looked_up, logits = losses(model(run), flow.converted, inputs)
    assert looked_up == float("inf")
    assert logits > 35
    assert all(is_dequantize(n.args[1]) for n in calls(flow.converted, "linear"))


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: F.conv2d(x, m.conv.weight * 2 + m.other.weight).relu(),
        lambda _, x: F.conv2d(x, x[:, :, :3, :3].mean(0, keepdim=True)).relu(),
    ],
    ids=["computed from constants", "computed from the input"],
)
def test_a_weight_that_is_no_constant_is_not_quantized_as_one(run: Callable[..., Any]) -> None:
    flow = quantize(model(run), image(), ANYTHING)
    assert flow.quantizer.record.blocks == {}  # type: ignore[attr-defined]
    assert min(losses(model(run), flow.converted, image())) > 35


# -- residual blocks -------------------------------------------------------------------------------------------

RESIDUALS: dict[str, Callable[..., Any]] = {
    "add": lambda m, x: (m.linear(x) + x).relu(),
    "add_": lambda m, x: m.linear(x).add_(x).relu_(),
    "sub": lambda m, x: F.relu6(m.linear(x) - x),
    "mul": lambda m, x: (m.linear(x) * x).clamp(0, 1),
    "scalar": lambda m, x: (m.linear(x) + 1).relu(),
    "twice the same": lambda m, x: (m.linear(x) + 0.5 * x).relu(),
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_a_residual_takes_its_activation_in(name: str) -> None:
    flow = quantize(model(RESIDUALS[name]), rows(), ANYTHING)
    (output,) = outputs(flow.converted)
    pair = pair_of(output)
    clamp = quantized_value(output)
    assert not is_dequantize(clamp.args[0])
    assert pair.zero_point == pair.quant_min
    assert min(losses(model(RESIDUALS[name]), flow.converted, rows())) > 35


@pytest.mark.parametrize("name", ["sub", "mul"])
def test_a_residual_that_the_backend_does_not_fuse_keeps_it_outside(name: str) -> None:
    flow = quantize(model(RESIDUALS[name]), rows(), configs.xnnpack(estimator="minmax"))
    (output,) = outputs(flow.converted)
    assert is_dequantize(quantized_value(output).args[0])
    assert min(losses(model(RESIDUALS[name]), flow.converted, rows())) > 35


def test_a_config_without_activations_leaves_them_all_outside() -> None:
    rules = replace(ANYTHING, blocks=BlockRules(activations=frozenset(), residual_activations=frozenset()))

    def run(m: Parts, x: Tensor) -> Any:
        return (m.linear(x).relu() + x).relu()

    flow = quantize(model(run), rows(), rules)
    assert all(is_dequantize(n.args[0]) for n in calls(flow.converted, "relu"))
    assert min(losses(model(run), flow.converted, rows())) > 35


# -- what may not be observed -----------------------------------------------------------------------------------


def test_only_floats_with_values_are_observed() -> None:
    def run(m: Parts, x: Tensor, *others: Tensor) -> Any:
        empty, whole, mask, wide = others
        y = m.linear(x).relu()
        return (
            (whole + 1, mask & (whole > 2), torch.where(mask, y, x), y.masked_fill(mask, 0.0), y * whole),
            (m.linear(empty).relu(), torch.cat([empty, y]), y[:, :0]),
            (wide + 1, y.double() * wide, torch.fft.rfft(y).abs()),
        )

    inputs = rows(
        torch.randn(0, 6), torch.arange(18).reshape(3, 6), torch.rand(3, 6) > 0.5, torch.randn(3, 6, dtype=torch.double)
    )
    flow = quantize(model(run), inputs, ANYTHING, keep=True)
    for node in observed(flow.prepared):
        value = node.meta["val"]
        assert value.dtype == torch.float32, node
        assert value.numel(), node
    assert min(losses(model(run), flow.converted, inputs)) > 35


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [ANYTHING, minmax_config(INT16_SYMMETRIC)], ids=["int8", "int16"])
def test_half_precision_is_kept_at_every_border(dtype: torch.dtype, scheme: Any) -> None:
    def run(m: Parts, x: Tensor) -> Any:
        y = m.linear(x)
        joined = torch.cat([y.relu(), y * 30 - 20])  # the relu is requantized at the join: two pairs in a row
        halves = torch.cat([y[:, :3], y[:, :3]], 1)
        return m.linear(joined), m.linear(halves), y[:, 3:].sigmoid(), m.linear(x.float().to(x.dtype)).float() + 1

    float_model = model(run).to(dtype)
    inputs = (rows()[0].to(dtype),)
    flow = quantize(float_model, inputs, scheme)
    assert min(losses(float_model, flow.converted, inputs)) > 35


# -- ways to export -----------------------------------------------------------------------------------------------


def network(m: Parts, x: Tensor) -> Any:
    return F.relu6(m.norm(m.other(m.conv(x).relu() + x))).mean((2, 3))


@pytest.mark.parametrize("guards", [True, False], ids=["guards", "no guards"])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_every_way_to_export_gives_the_same_blocks(strict: bool, guards: bool) -> None:
    flow = quantize(model(network), image(), ANYTHING, strict=strict, guards=guards)
    blocks = flow.quantizer.record.blocks.values()  # type: ignore[attr-defined]
    assert [len(b.members) for b in blocks] == [2, 2]
    assert min(losses(model(network), flow.converted, image())) > 35


def test_a_batch_of_any_size_runs() -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    many = (torch.randn(5, 4, 6, 6),)
    flow = quantize(model(network), image(), ANYTHING, dynamic=(({0: batch},),), batches=[image(), many])
    assert min(losses(model(network), flow.converted, many)) > 30


def test_the_branches_of_a_condition_stay_as_they_are() -> None:
    def run(m: Parts, x: Tensor) -> Any:
        y = m.linear(x).relu()
        return torch.cond(y.sum() > x.sum(), lambda t: F.linear(t, m.linear.weight).relu(), lambda t: t - 1, (y,))

    both = [(rows()[0].abs(),), (-rows()[0].abs(),)]
    flow = quantize(model(run), rows(), ANYTHING, batches=both)
    assert {"true_graph_0", "false_graph_0"} <= {str(n.target) for n in flow.converted.graph.nodes}
    with torch.no_grad():
        assert [bool(model(run).linear(x).relu().sum() > x.sum()) for (x,) in both] == [False, True]
    for inputs in both:
        assert min(losses(model(run), flow.converted, inputs)) > 30


# -- manners ---------------------------------------------------------------------------------------------------------


def test_the_users_module_is_left_as_it_was() -> None:
    float_model = model(network)
    before = copy.deepcopy(float_model)
    inputs = image()
    quantize(float_model, inputs, ANYTHING)
    for name, value in before.state_dict().items():
        assert torch.equal(value, float_model.state_dict()[name]), name
    assert list(float_model.state_dict()) == list(before.state_dict())
    with torch.no_grad():
        assert torch.equal(float_model(*inputs), before(*inputs))


def test_the_same_model_is_prepared_the_same_way_again() -> None:
    graph, inputs = export(model(network), image()), image()
    first, second = (quantize(graph, inputs, ANYTHING) for _ in range(2))
    assert text(first.converted) == text(second.converted)


def test_one_quantizer_prepares_one_model_after_another() -> None:
    quantizer = BackendQuantizer(ANYTHING)
    first = quantize(model(network), image(), quantizer)
    again = quantize(model(network), image(), quantizer)
    assert text(first.converted) == text(again.converted)


def text(graph: GraphModule) -> list[str]:
    return [node.format_node() or "" for node in graph.graph.nodes]


def test_annotating_twice_changes_nothing() -> None:
    graph = export(model(network), image())
    quantizer = BackendQuantizer(ANYTHING)
    quantizer.annotate(quantizer.transform_for_annotation(graph))
    before = written(graph)
    assert before
    BackendQuantizer(ANYTHING).annotate(graph)
    quantizer.annotate(quantizer.transform_for_annotation(graph))
    after = written(graph)
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def written(graph: GraphModule) -> dict[str, Any]:
    return {n.name: n.meta[Q_ANNOTATION_KEY] for n in graph.graph.nodes if Q_ANNOTATION_KEY in n.meta}


def test_nodes_that_another_quantizer_took_are_left_alone() -> None:
    graph = export(model(network), image())
    conv, other = calls(graph, "conv2d")
    taken = QuantizationAnnotation(_annotated=True)
    conv.meta[Q_ANNOTATION_KEY] = taken
    prepared = prepare_pt2e(graph, BackendQuantizer(ANYTHING))
    prepared(*image())
    converted = convert_pt2e(prepared)
    assert conv.meta[Q_ANNOTATION_KEY] is taken
    conv, other = calls(converted, "conv2d")
    assert not is_dequantize(conv.args[1])
    assert is_dequantize(other.args[1])
    assert min(losses(model(network), converted, image())) > 35


def theirs() -> XNNPACKQuantizer:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))


@pytest.mark.parametrize("order", ["ours", "theirs, ours", "ours, theirs", "ours, ours"])
def test_quantizers_compose(order: str) -> None:
    made = {"ours": lambda: BackendQuantizer(ANYTHING), "theirs": theirs}
    flow = quantize(model(network), image(), ComposableQuantizer([made[name]() for name in order.split(", ")]))
    assert all(is_dequantize(n.args[1]) for n in calls(flow.converted, "conv2d"))
    assert min(losses(model(network), flow.converted, image())) > 30
