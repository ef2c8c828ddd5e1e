"""Rewrites before annotation: the same values bit for bit, spelled so that they can be quantized."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule
from torch.testing import assert_close

from quantmark import AnnotationWarning, BackendQuantizer
from quantmark.annotators.graph import EXPORTED_AS, op_name
from quantmark.annotators.memory import written_memory
from quantmark.configs import BackendConfig, OpRules, WeightConfig
from quantmark.observers.qparams import INT16_SYMMETRIC
from support.flow import calls, export, minmax_config, observed, quantize, sqnr_db

Step = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """A convolution, and whatever `body` makes of it."""

    def __init__(self, body: Step, *, head: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1) if head else None
        self.register_buffer("buffer", torch.ones(1, 4, 1, 1))
        self.buffer: Tensor
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x if self.conv is None else self.conv(x))


def image(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return (2.0 * torch.randn(2, 3, 6, 6)).to(dtype)


def transformed(graph: GraphModule, config: BackendConfig | None = None) -> GraphModule:
    return BackendQuantizer(config or minmax_config()).transform_for_annotation(copy.deepcopy(graph))


def spelled(graph: GraphModule) -> list[str]:
    """The operators of a graph in order, with their scalar arguments."""

    def text(argument: object) -> str:
        return f"{argument:g}" if isinstance(argument, (int, float)) else str(argument)

    lines = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and op_name(node) not in {"conv2d", "getitem"}:
            scalars = [text(a) for a in node.args if not isinstance(a, torch.fx.Node)]
            lines.append(" ".join([str(node.target).removeprefix("aten."), *scalars]))
    return lines


def assert_same(body: Step, x: Tensor | None = None, *, head: bool = True, **how: Any) -> GraphModule:
    """The rewritten graph computes the same bits, from inputs and buffers that end up the same; twice is once."""
    x = image() if x is None else x
    model = Net(body, head=head).eval().to(x.dtype)
    graph = export(model, (x.clone(),), **how)
    new = transformed(graph)
    given, expected = x.clone(), x.clone()
    with torch.no_grad():
        assert_close(new(given), graph(expected), rtol=0, atol=0, equal_nan=True)
    assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
    for name, buffer in graph.named_buffers():
        assert_close(new.get_buffer(name), buffer, rtol=0, atol=0)
    once = [(n.name, n.target, n.args, n.kwargs) for n in new.graph.nodes]
    again = BackendQuantizer(minmax_config()).transform_for_annotation(new)
    assert [(n.name, n.target, n.args, n.kwargs) for n in again.graph.nodes] == once
    new.graph.lint()
    return new


# -- any chain of ops -----------------------------------------------------------------------------------------


def kept(part: Callable[[Tensor], Tensor]) -> Callable[[Tensor, list[Tensor]], Tensor]:
    """A part is taken now and returned at the end."""

    def op(y: Tensor, found: list[Tensor]) -> Tensor:
        found.append(part(y))
        return y

    return op


OPS: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "relu": lambda y, _: F.relu(y),
    "relu_": lambda y, _: y.relu_(),
    "relu6": lambda y, _: F.relu6(y),
    "relu6_": lambda y, _: F.relu6(y, inplace=True),
    "hardtanh": lambda y, _: F.hardtanh(y, -1.0, 0.7),
    "clamp": lambda y, _: y.clamp(-0.5, 0.9),
    "clamp_crossed": lambda y, _: y.clamp(0.4, 0.1),
    "clamp_": lambda y, _: y.clamp_(max=1.1),
    "clip": lambda y, _: y.clip(min=-0.3),
    "clamp_min": lambda y, _: y.clamp_min(0.05),
    "threshold": lambda y, _: F.threshold(y, 0.0, 0.0),
    "threshold_other": lambda y, _: F.threshold(y, 0.1, 0.2),
    "add": lambda y, _: y + 0.1,
    "add_alpha": lambda y, _: torch.add(y, 0.3, alpha=2),
    "add_": lambda y, _: y.add_(0.7),
    "sub": lambda y, _: y - 1,
    "rsub": lambda y, _: 0.3 - y,
    "mul": lambda y, _: y * 1.7,
    "mul_": lambda y, _: y.mul_(0.9),
    "square": lambda y, _: y * y,
    "add_self": lambda y, _: y.add_(y),
    "dropout": lambda y, _: F.dropout(y, 0.5, training=False),
    "keep": kept(lambda y: y),
    "keep_part": kept(lambda y: y[:, 1:3]),
    "keep_moved": kept(lambda y: y.transpose(1, 2)[0]),
    "keep_flat": kept(lambda y: y.flatten(1)),
    "write_part": lambda y, _: [y, y[:, :2].relu_()][0],
    "write_row": lambda y, _: [y, y[:, :, 0].fill_(0.5)][0],
    "write_kept": lambda y, found: [y, *(part.mul_(0.5) for part in found[-1:])][0],
    "copy_back": lambda y, _: y.copy_(y.flip(1)),
    "use_kept": lambda y, found: y + sum(float(i) * part.mean() for i, part in enumerate(found, 1)),
}


@settings(max_examples=40)
@given(names=st.lists(st.sampled_from(sorted(OPS)), max_size=7), head=st.booleans())
def test_any_chain_keeps_its_bits(names: list[str], head: bool) -> None:
    def body(_: Net, y: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for name in names:
            y = OPS[name](y, found)
        return [*found, y]

    assert_same(body, head=head)


@settings(max_examples=15)
@given(
    names=st.lists(st.sampled_from(sorted(OPS.keys() - {"threshold_other", "square"})), max_size=7), head=st.booleans()
)
@pytest.mark.filterwarnings("ignore::quantmark.AnnotationWarning")
def test_any_chain_is_quantized_right(names: list[str], head: bool) -> None:
    def body(_: Net, y: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for name in names:
            y = OPS[name](y, found)
        return [*found, y]

    config = minmax_config(INT16_SYMMETRIC, weight=WeightConfig(scheme=INT16_SYMMETRIC))  # little noise
    flow = quantize(Net(body, head=head).eval(), (image(),), config, batches=[(image(),)], keep=True)
    with torch.no_grad():
        expected, actual = flow.prepared(image()), flow.converted(image())
    for a, b in zip(expected, actual, strict=True):
        assert (a - b).abs().max() <= 0.01 * (1.0 + a.abs().max())


# -- writes in place ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_later_readers_of_the_base_read_what_was_written(strict: bool) -> None:
    def body(_: Net, y: Tensor) -> tuple[Tensor, Tensor]:
        z = y * 2.0
        y.relu_()
        return z, y + z

    new = assert_same(body, strict=strict)
    assert spelled(new) == ["mul.Tensor", "relu.default", "add.Tensor"]
    flow = quantize(Net(body).eval(), (image(),), minmax_config(), strict=strict, keep=True)
    assert all(sqnr_db(a, b) > 30 for a, b in zip(flow.prepared(image()), flow.converted(image()), strict=True))


def test_views_of_the_base_are_taken_anew() -> None:
    def body(_: Net, y: Tensor) -> tuple[Tensor, ...]:
        part = y[:, :2]
        turned = part.transpose(1, 2)
        unread = y[0]
        mean = unread.mean()
        y.relu_().mul_(2.0)
        return part + 1.0, turned, y, mean

    new = assert_same(body)
    assert spelled(new)[-4:] == ["mul.Tensor", "slice.Tensor 1 0 2", "transpose.int 1 2", "add.Tensor"]
    assert written_memory(new) == {}
    flow = quantize(Net(body).eval(), (image(),), minmax_config(), keep=True)
    assert all(sqnr_db(a, b) > 30 for a, b in zip(flow.prepared(image()), flow.converted(image()), strict=True))


def test_a_write_into_a_view_of_a_tensor_that_is_read_later_stays_and_all_that_shares_it_is_float() -> None:
    def body(net: Net, y: Tensor) -> Tensor:
        y[:, :2].relu_()
        return y + net.buffer

    new = assert_same(body)
    assert spelled(new)[:3] == ["slice.Tensor 1 0 2", "relu_.default", "alias.default"]
    with pytest.warns(AnnotationWarning, match=r"^relu_ \(relu\) writes in place into memory .* stays float"):
        flow = quantize(Net(body).eval(), (image(),), minmax_config(), keep=True)
    assert {"slice_1", "relu_"}.isdisjoint(node.name for node in observed(flow.prepared))
    assert "alias_default" in {node.name for node in observed(flow.prepared)}  # read by the addition, behind the write
    assert sqnr_db(flow.prepared(image()), flow.converted(image())) > 30


def test_one_warning_for_each_memory_that_is_written() -> None:
    def body(_: Net, y: Tensor) -> Tensor:
        y[:, :2] = 1.5
        y[:, 0] += 2.0
        return y

    assert_same(body)
    quantizer = BackendQuantizer(minmax_config())
    with pytest.warns(AnnotationWarning) as caught:
        quantize(Net(body).eval(), (image(),), quantizer, keep=True)
    said = [str(w.message) for w in caught if w.category is AnnotationWarning]
    assert len([text for text in said if "writes in place" in text]) == 1
    assert quantizer.record.messages == said


def test_a_write_into_an_input_stays() -> None:
    def body(net: Net, y: Tensor) -> Tensor:
        before = y * 2.0
        y.relu_()
        y.add_(1.0)
        assert net.conv is None
        return before + y

    new = assert_same(body, head=False)
    assert spelled(new) == ["mul.Tensor", "relu_.default", "add_.Tensor 1", "add.Tensor"]
    assert set(written_memory(new)) == set(calls(new, "relu_"))
    quantizer = BackendQuantizer(minmax_config())
    flow = quantize(Net(body, head=False), (image(),), quantizer, batches=[(image(),)], keep=True)
    assert quantizer.record.messages == []
    given = image()
    assert sqnr_db(flow.prepared(image()), flow.converted(given)) > 30
    assert_close(given, image().relu() + 1.0)


def test_a_write_into_a_buffer_stays() -> None:
    def body(net: Net, y: Tensor) -> Tensor:
        before = y * net.buffer
        net.buffer.mul_(0.5)
        return before + y * net.buffer

    new = assert_same(body)
    assert "mul_.Tensor 0.5" in spelled(new)
    flow = quantize(Net(body).eval(), (image(),), minmax_config(), keep=True)
    for _ in range(2):  # the sum reads it before and after
        before = flow.converted.get_buffer("buffer").clone()
        flow.prepared.get_buffer("buffer").copy_(before)
        assert sqnr_db(flow.prepared(image()), flow.converted(image())) > 20
        assert_close(flow.converted.get_buffer("buffer"), 0.5 * before)


def test_a_write_that_keeps_the_dtype_of_its_base_stays() -> None:
    def body(_: Net, y: Tensor) -> Tensor:
        return y.add_(torch.ones(1, dtype=torch.float64))

    assert spelled(assert_same(body))[-1] == "add_.Tensor"


def test_integers_may_be_written_in_place() -> None:
    def body(_: Net, y: Tensor) -> tuple[Tensor, Tensor]:
        index = y.argmax(1)
        index.add_(1)
        return y, index

    assert "add_.Tensor 1" in spelled(assert_same(body))


# -- operands -------------------------------------------------------------------------------------------------


def test_tensor_keywords_become_positional() -> None:
    def body(net: Net, y: Tensor) -> Tensor:
        z = torch.add(input=y, other=net.buffer)
        return F.conv2d(input=z, weight=net.buffer.expand(4, 4, 1, 1), bias=None, stride=2)

    new = assert_same(body)
    for node in new.graph.nodes:
        assert not any(isinstance(value, torch.fx.Node) for value in node.kwargs.values())
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    w = graph.placeholder("w")
    conv = graph.call_function(
        torch.ops.aten.conv2d.default, (), {"input": x, "weight": w, "padding": [1, 1], "groups": 1}
    )
    graph.output(conv)
    (conv,) = calls(transformed(GraphModule(nn.Module(), graph)), "conv2d")
    assert [str(a) for a in conv.args] == ["x", "w", "None", "[1, 1]", "[1, 1]", "[1, 1]", "1"][: len(conv.args)]
    assert "weight" not in conv.kwargs


SCALARS: list[tuple[Step, str]] = [
    (lambda _, y: y + 2, "add.Tensor"),
    (lambda _, y: 2.5 + y, "add.Tensor"),
    (lambda _, y: y - 0.1, "sub.Tensor"),
    (lambda _, y: y * 3, "mul.Tensor"),
    (lambda _, y: 1 - y, "sub.Tensor"),
    (lambda _, y: torch.rsub(y, y * y), "sub.Tensor"),
    (lambda _, y: torch.ops.aten.add.Scalar(y, 2.0), "add.Tensor"),
    (lambda _, y: y.mul_(2.0), "mul.Tensor"),
    (lambda _, y: torch.add(y, 2, alpha=3), "add.Tensor 2"),
    (lambda _, y: torch.rsub(y, 2, alpha=3), "rsub.Scalar 2 3"),
    (lambda _, y: y + 1e38, "add.Tensor 1e+38"),
    (lambda _, y: y * torch.finfo(torch.float32).min, "mul.Tensor -3.40282e+38"),
    (lambda _, y: y + math.inf, "add.Tensor inf"),
    (lambda _, y: y * math.nan, "mul.Tensor nan"),
    (lambda _, y: y.argmax(1) + 2, "add.Tensor 2"),
    (lambda _, y: y.argmax(1) * 2.5, "mul.Tensor 2.5"),
    (lambda _, y: y.mean() * 2.5, "mul.Tensor 2.5"),
    (lambda _, y: (y > 0) + 1.0, "add.Tensor 1"),
]


@pytest.mark.parametrize(("body", "expected"), SCALARS, ids=[f"{i}-{name}" for i, (_, name) in enumerate(SCALARS)])
def test_scalars_become_constants_where_a_tensor_is_as_good(body: Step, expected: str) -> None:
    new = assert_same(body)
    assert spelled(new)[-1] == expected
    (node,) = new.graph.find_nodes(op="output")
    (result,) = node.args[0]
    lifted = [n for n in result.all_input_nodes if "scalar" in str(n.target)]
    tensors_alone = spelled(new) == ["mul.Tensor", "sub.Tensor"]  # y - y * y
    assert len(lifted) == (" " not in expected and not tensors_alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_takes_constants_that_it_holds_exactly(dtype: torch.dtype) -> None:
    new = assert_same(lambda _, y: (y * 0.5 + 0.1, F.relu6(y.relu_())), image(dtype))
    assert spelled(new)[:2] == ["mul.Tensor", "add.Tensor 0.1"]


def test_scalars_stay_where_the_backend_has_no_constants() -> None:
    graph = export(Net(lambda _, y: 1.0 - y * 2.0).eval(), (image(),))
    assert spelled(transformed(graph, minmax_config(ops=OpRules(constants=False)))) == ["mul.Tensor 2", "rsub.Scalar 1"]
    without = minmax_config(ops=OpRules(own=OpRules().own - {"sub"}))
    assert spelled(transformed(graph, without)) == ["mul.Tensor", "rsub.Scalar 1"]


# -- clamps ---------------------------------------------------------------------------------------------------

INF = math.inf
CLAMPS: list[tuple[Step, list[str]]] = [
    (lambda _, y: F.relu(y), ["relu.default"]),
    (lambda _, y: F.relu(y, inplace=True), ["relu.default"]),
    (lambda _, y: F.relu6(y), ["hardtanh.default 0 6"]),
    (lambda _, y: F.relu6(y, inplace=True), ["hardtanh.default 0 6"]),
    (lambda _, y: F.hardtanh(y, 0.0, 6.0), ["hardtanh.default 0 6"]),
    (lambda _, y: F.hardtanh(y), ["hardtanh.default -1 1"]),
    (lambda _, y: F.hardtanh_(y, -2.0, 2.0), ["hardtanh.default -2 2"]),
    (lambda _, y: y.clamp(0, 6), ["hardtanh.default 0 6"]),
    (lambda _, y: torch.clamp(y, max=6, min=0), ["hardtanh.default 0 6"]),
    (lambda _, y: torch.clip(y, 0.5, 1), ["hardtanh.default 0.5 1"]),
    (lambda _, y: y.clamp(min=0), ["relu.default"]),
    (lambda _, y: y.clamp_min(0), ["relu.default"]),
    (lambda _, y: y.clamp_min(-1), ["clamp.default -1 None"]),
    (lambda _, y: y.clamp_max(3), ["clamp.default None 3"]),
    (lambda _, y: F.threshold(y, 0.0, 0.0), ["relu.default"]),
    (lambda _, y: F.threshold(y, 0.1, 0.0), ["threshold.default 0.1 0"]),
    (lambda _, y: y.clamp(0.0, INF), ["relu.default"]),
    (lambda _, y: y.clamp(-INF, 2.0), ["clamp.default None 2"]),
    (lambda _, y: y.clamp(-INF, INF), ["clamp.default -inf inf"]),
    (lambda _, y: y.clamp(3.0, 1.0), ["hardtanh.default 1 1"]),
    (lambda _, y: y.clamp(min=math.nan), ["clamp.default nan"]),
    (lambda _, y: y.relu().clamp(max=6), ["hardtanh.default 0 6"]),
    (lambda _, y: y.clamp(max=6).relu(), ["hardtanh.default 0 6"]),
    (lambda _, y: y.clamp(max=-1).relu(), ["hardtanh.default 0 0"]),
    (lambda _, y: F.relu6(F.relu(F.hardtanh(y))), ["hardtanh.default 0 1"]),
    (lambda _, y: (z := y.relu(), z.clamp(max=6)), ["relu.default", "clamp.default None 6"]),
    (lambda _, y: y.clamp(min=torch.tensor(0.0)), ["clamp.Tensor"]),
    (lambda _, y: y.argmax(1).clamp(0, 2), ["clamp.default 0 2"]),
    (lambda _, y: y.argmax(1).clamp(0.5, 2), ["clamp.default 0.5 2"]),
]


@pytest.mark.parametrize(("body", "expected"), CLAMPS, ids=[str(i) for i in range(len(CLAMPS))])
def test_a_clamp_has_one_spelling(body: Step, expected: list[str]) -> None:
    found = spelled(assert_same(body))
    assert found[-len(expected) :] == expected


def test_a_clamp_keeps_nan_and_infinity() -> None:
    x = image()
    x[0, 0, 0, :3] = torch.tensor([math.nan, INF, -INF])
    for body in (F.relu6, lambda y: y.clamp(0, 1).relu(), lambda y: F.threshold(y, 0.0, 0.0), lambda y: y.clip(max=2)):
        assert_same(lambda _, y, body=body: body(y), x, head=False)  # type: ignore[misc]


def test_a_clamp_that_the_user_leaves_float_is_not_swallowed() -> None:
    graph = export(Net(lambda _, y: y.relu().clamp(max=6)).eval(), (image(),))
    quantizer = BackendQuantizer(minmax_config()).set_operator_type("relu", None)
    new = quantizer.transform_for_annotation(graph)
    assert spelled(new) == ["relu.default", "clamp.default None 6"]


# -- the rest of the model ------------------------------------------------------------------------------------


def test_a_node_remembers_the_operator_that_it_was_exported_with() -> None:
    new = assert_same(lambda _, y: (F.relu6(y + 1.0), y.relu_() * 2.0))
    remembered = {n.name: str(n.meta[EXPORTED_AS]) for n in new.graph.nodes if EXPORTED_AS in n.meta}
    assert remembered == {"relu6": "aten.relu6.default", "relu_": "aten.relu_.default"}


def test_the_users_model_is_left_as_it_was() -> None:
    model = Net(lambda net, y: F.relu6(y.relu_() * 2.0 + net.buffer) - 1.0).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(image())
    flow = quantize(model, (image(),), minmax_config(), keep=True)
    assert sqnr_db(expected, flow.converted(image())) > 25
    assert_close(model(image()), expected, rtol=0, atol=0)
    assert list(model.state_dict()) == list(state)
    assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert model.conv is not None
    assert model.conv.weight.dtype is torch.float32


def test_sizes_that_vary_are_kept() -> None:
    def body(_: Net, y: Tensor) -> Tensor:
        part = y[:, :2]
        y.relu_()
        return y.view(y.shape[0], -1) * 0.5 + part.flatten(1).mean() - y.shape[0]

    dynamic = {"x": {0: Dim("batch", min=2, max=8)}}
    graph = export(Net(body).eval(), (image(),), dynamic=dynamic)
    new = transformed(graph)
    for batch in (2, 5):
        x = torch.randn(batch, 3, 6, 6)
        with torch.no_grad():
            assert_close(new(x), graph(x), rtol=0, atol=0)


def test_a_large_graph_is_rewritten_in_linear_time() -> None:
    def body(_: Net, y: Tensor) -> Tensor:
        for _step in range(150):
            y = (y * 0.99 + 0.01).relu_().clamp_(max=5.0)
        return y

    new = assert_same(body)
    assert len(spelled(new)) == 450
    assert len({n.target for n in new.graph.nodes if n.op == "get_attr" and "scalar" in str(n.target)}) == 300
