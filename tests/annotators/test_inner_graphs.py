"""Nested graphs within nested graphs, and nested graphs in an outer one that has nothing to quantize itself."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.composable_quantizer import ComposableQuantizer

from quantmark import BackendQuantizer, UncalibratedError, configs, fill_ranges, observe_ranges, quantize, sqnr_db
from quantmark.annotators.quantizer import AnnotationWarning


class Layers(nn.Module):
    """Two layers, one for each way through a cond."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def choose(self, x: Tensor) -> Tensor:
        """Go one way or the other."""
        found = torch.cond(x[0, 0] > 0, lambda t: F.relu(self.a(t)), self.b, (x,))
        return cast("Tensor", found)

    def forward(self, x: Tensor) -> Tensor:
        """Do nothing but choose."""
        return self.choose(x)


class CondInCond(Layers):
    """A choice on one way of a choice."""

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", torch.cond(x[1, 1] > 0, self.choose, self.b, (x,)))


class CondInWhile(Layers):
    """A choice in each of three rounds, by their number: rounding can't turn it."""

    def forward(self, x: Tensor) -> Tensor:
        def step(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, torch.cond(count < 1, lambda t: F.relu(self.a(t)), self.b, (x,))

        return cast("Tensor", while_loop(lambda count, _: count < 3, step, (torch.tensor(0), x))[1])


class WhileInWhile(Layers):
    """Two rounds in each of three."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, F.relu(self.a(x))

        def step(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, while_loop(lambda count, _: count < 2, inner, (torch.tensor(0), x))[1]

        return cast("Tensor", while_loop(lambda count, _: count < 3, step, (torch.tensor(0), x))[1])


class ScanInCond(Layers):
    """A recurrent net on one way of a choice."""

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            state = F.relu(self.a(x + state))
            return state, state.clone()

        def recur(x: Tensor) -> Tensor:
            return cast("Tensor", scan(step, torch.zeros(4), x)[1])

        return cast("Tensor", torch.cond(x[1, 1] > 0, recur, self.b, (x,)))


LINEAR_GRAPHS: dict[type[nn.Module], int] = {Layers: 2, CondInCond: 3, CondInWhile: 2, WhileInWhile: 1, ScanInCond: 2}
"""How many of the innermost graphs hold a layer."""


def batches() -> list[Tensor]:
    """Return batches that go every way: the signs of two elements take turns."""
    found = [torch.randn(3, 4) for _ in range(8)]
    for index, x in enumerate(found):
        x[0, 0] = abs(x[0, 0]) * (-1) ** index
        x[1, 1] = abs(x[1, 1]) * (-1) ** (index // 2)
    return found


def innermost(model: nn.Module) -> list[GraphModule]:
    """Return the nested graphs that hold no other, whether registered or not."""
    graphs = [each for each in vars(model).values() if isinstance(each, GraphModule)]
    graphs += [each for each in model.children() if isinstance(each, GraphModule)]
    return [each for graph in graphs for each in (innermost(graph) or [graph])]


def quantize_nodes(graph: GraphModule) -> list[Node]:
    return [n for n in graph.graph.nodes if str(n.target).startswith("quantized_decomposed.quantize_per_tensor")]


def quantizes(graph: GraphModule) -> int:
    return len(quantize_nodes(graph))


@pytest.mark.parametrize("backend", ["xnnpack", "cadence", "arm_tosa"])
@pytest.mark.parametrize("make", LINEAR_GRAPHS, ids=lambda make: make.__name__)
def test_inner_graphs_are_quantized_and_survive_conversion(make: Callable[[], nn.Module], backend: str) -> None:
    torch.manual_seed(0)
    model, data = make().eval(), batches()
    program = torch.export.export(model, (data[0],))
    wanted = [model(x) for x in data]
    prepared = prepare_pt2e(program.module(), BackendQuantizer(getattr(configs, backend)()))
    for x in data:
        prepared(x)
    converted = convert_pt2e(prepared)
    linears = [each for each in innermost(converted) if any("linear" in str(n.target) for n in each.graph.nodes)]
    assert len(linears) == LINEAR_GRAPHS[type(model)]
    assert all(quantizes(each) > 0 for each in linears)
    assert min(sqnr_db(y, converted(x)) for x, y in zip(data, wanted, strict=True)) > 25
    again = torch.export.export(converted, (data[0],)).module()
    assert all(torch.equal(again(x), converted(x)) for x in data)
    assert all(torch.equal(program.module()(x), y) for x, y in zip(data, wanted, strict=True))


@pytest.mark.parametrize("make", LINEAR_GRAPHS, ids=lambda make: make.__name__)
def test_in_training_inner_graphs_survive_conversion(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, data = make().eval(), batches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AnnotationWarning)  # they stay float
        program = torch.export.export(model, (data[0],)).module()
        prepared = prepare_qat_pt2e(program, BackendQuantizer(configs.xnnpack(is_qat=True)))
    for x in data:
        prepared(x)
    converted = convert_pt2e(prepared)
    assert min(sqnr_db(model(x), converted(x)) for x in data) > 25


def test_a_batch_norm_in_a_branch_is_folded() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.Conv1d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = x[None]
            return cast("Tensor", torch.cond(x[0, 0] > 0, lambda t: F.relu(self.norm(self.a(t))), self.b, (y,)))

    torch.manual_seed(0)
    model, data = Norms(), batches()
    for x in data:
        model.norm(x[None])  # statistics of its own
    program = torch.export.export(model.eval(), (data[0],))
    converted = quantize(program, data, configs.xnnpack(), progress=False).model
    assert not any("batch_norm" in str(n.target) for graph in innermost(converted) for n in graph.graph.nodes)
    assert min(sqnr_db(model(x), converted(x)) for x in data) > 30
    assert all(torch.equal(program.module()(x), model(x)) for x in data)


def test_branches_are_trained_in_float_and_say_so() -> None:
    class Between(Layers):
        def forward(self, x: Tensor) -> Tensor:
            way = torch.cond(x[0, 0] > 0, lambda t: F.relu(self.a(t)), self.b, (self.a(x),))
            return cast("Tensor", self.b(way))

    torch.manual_seed(0)
    model, data = Between().train(), batches()
    program = torch.export.export(model, (data[0],)).module()
    with pytest.warns(AnnotationWarning, match="runs its branches in float"):
        prepared = prepare_qat_pt2e(program, BackendQuantizer(configs.xnnpack(is_qat=True)))
    move_exported_model_to_train(prepared)
    for x in data:
        prepared(x).square().mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in prepared.parameters())
    move_exported_model_to_eval(prepared)
    converted = convert_pt2e(prepared)
    assert quantizes(converted) > 0
    assert min(sqnr_db(model(x), converted(x)) for x in data) > 25


def test_a_table_fills_no_observer_in_a_branch_with_the_range_of_a_namesake() -> None:
    class Namesakes(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.a(100 * x)) + self.choose(x)

    torch.manual_seed(0)
    model, data = Namesakes().eval(), batches()
    program = torch.export.export(model, (data[0],))
    prepared = prepare_pt2e(program.module(), BackendQuantizer(configs.xnnpack()))
    fill_ranges(prepared, observe_ranges(program, [(x,) for x in data]))
    with pytest.raises(UncalibratedError, match="Observers without data"):
        convert_pt2e(copy.deepcopy(prepared))
    for x in data:
        prepared(x)
    inner = innermost(convert_pt2e(prepared))
    scales = [cast("float", node.args[1]) for graph in inner for node in quantize_nodes(graph)]
    assert max(scales) < 0.1  # the outer relu has 0.8


def test_with_ranges_given_beforehand_branches_stay_float_and_say_so() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(Layers(), nn.Linear(4, 4)).eval(), batches()
    program = torch.export.export(model, (data[0],))
    table = observe_ranges(program, [(x,) for x in data])
    with pytest.warns(AnnotationWarning, match="runs its branches in float"):
        converted = convert_pt2e(prepare_pt2e(program.module(), BackendQuantizer(configs.xnnpack(), ranges=table)))
    assert quantizes(converted) > 0
    assert [quantizes(each) for each in innermost(converted)] == [0, 0]
    assert min(sqnr_db(model(x), converted(x)) for x in data) > 30


def test_a_rule_that_matches_inside_alone_matches() -> None:
    program = torch.export.export(Layers().eval(), (batches()[0],))
    quantizer = BackendQuantizer(configs.xnnpack()).set_operator_type("linear", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare_pt2e(program.module(), quantizer)
    assert not [each for each in caught if "matched no node" in str(each.message)]


def test_a_rule_by_module_says_that_it_reaches_no_nested_graph() -> None:
    program = torch.export.export(Layers().eval(), (batches()[0],))
    quantizer = BackendQuantizer(configs.xnnpack()).set_module_name("a", None)
    said = "module name 'a' matched no node (ops in the graphs of cond, scan and while_loop carry no module path)"
    with pytest.warns(AnnotationWarning, match=re.escape(said)):
        prepare_pt2e(program.module(), quantizer)


def test_an_outer_graph_with_nothing_to_quantize_says_nothing() -> None:
    program = torch.export.export(Layers().eval(), (batches()[0],))
    with warnings.catch_warnings():
        warnings.simplefilter("error", AnnotationWarning)
        prepare_pt2e(program.module(), BackendQuantizer(configs.xnnpack()))


@pytest.mark.arm
def test_a_later_quantizer_may_trace_the_outer_graph_anew() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(Layers(), nn.Linear(4, 4)).eval(), batches()
    both = ComposableQuantizer([BackendQuantizer(configs.xnnpack()), BackendQuantizer(configs.arm_tosa())])
    prepared = prepare_pt2e(torch.export.export(model, (data[0],)).module(), both)
    for x in data:
        prepared(x)
    converted = convert_pt2e(prepared)
    assert min(sqnr_db(model(x), converted(x)) for x in data) > 25
