"""Branch families, found in real exports: what their leaves are, and what comes of them in the converted graph."""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from quantmark import configs
from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.configs.base import BackendConfig
from quantmark.observers.plan import Family, Hoist
from quantmark.observers.qparams import INT8_AFFINE, INT16_SYMMETRIC
from quantmark.observers.rules import BranchRules, Conflict, Decision, HoistRule, Outcome
from support.flow import Flow, Inputs, Pair, export, is_dequantize, minmax_config, pair_of, quantize, sqnr_db

Cut = Callable[[Tensor], Tensor]
CUTS: dict[str, Cut] = {  # each reads 4 columns of [4, 12]
    "slice": lambda x: x[:, :4],
    "narrow": lambda x: x.narrow(1, 4, 4),
    "split": lambda x: x.split(4, 1)[1],
    "split_with_sizes": lambda x: x.split([4, 8], 1)[0],
    "chunk": lambda x: x.chunk(3, 1)[2],
    "tensor_split": lambda x: x.tensor_split(3, 1)[1],
    "hsplit": lambda x: x.hsplit(3)[0],
    "index_select": lambda x: x.index_select(1, torch.arange(4, 8)),
    "select": lambda x: x.view(4, 3, 4).select(1, 1),
    "subscript": lambda x: x.view(4, 3, 4)[:, 2],
    "unbind": lambda x: x.view(4, 3, 4).unbind(1)[2],
    "nested": lambda x: x[:, 2:11][:, 2:6],
}
MOVES: dict[str, Cut] = {  # [4, 4] -> [4, 4]
    "view": lambda x: x.contiguous().view(2, 8).view(4, 4),
    "reshape": lambda x: x.reshape(16).reshape(4, 4),
    "flatten": lambda x: x.flatten().unflatten(0, (4, 4)),
    "permute": lambda x: x.permute(1, 0),
    "transpose": lambda x: x.transpose(0, 1),
    "t": torch.t,
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "expand": lambda x: x.expand(2, 4, 4)[0],
    "clone": torch.clone,
    "contiguous": lambda x: x.contiguous(),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, False),
    "alias": torch.ops.aten.alias.default,
}


class Towers(nn.Module):
    """A root tensor, cut into branches, each with a linear of its own; and one linear on all of it."""

    def __init__(self, cuts: dict[str, Cut], root: str = "input") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cuts, self.root = list(cuts.values()), root
        self.constant = nn.Parameter(torch.randn(4, 12))
        self.producer = nn.Linear(12, 12)
        self.towers = nn.ModuleList(nn.Linear(4, 3) for _ in cuts)
        self.whole = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        root: Tensor = {"input": x, "parameter": self.constant}.get(self.root, x)
        if self.root == "float":
            root = x.fmod(1e6)
        elif self.root == "block":
            root = torch.relu(self.producer(x))
        found = [tower(cut(root)) for tower, cut in zip(self.towers, self.cuts, strict=True)]
        return [*found, self.whole(root), x.cumsum(0)]


def columns(*scales: float) -> Inputs:
    """A batch of [4, 12] whose columns, four by four, have the given magnitudes; each reaches both ends."""
    torch.manual_seed(1)
    x = torch.rand(4, 12) * 2 - 1
    x[0], x[1] = -1.0, 1.0
    return (x * torch.tensor(scales).repeat_interleave(12 // len(scales)),)


def families(quantizer: object) -> list[Family]:
    assert isinstance(quantizer, BackendQuantizer)
    return [family for component in quantizer.record.components for family in component.plan.families]


def hoists(quantizer: object) -> list[Hoist]:
    assert isinstance(quantizer, BackendQuantizer)
    return [each for component in quantizer.record.components for each in component.plan.hoists]


def decisions(quantizer: object) -> list[Decision]:
    assert isinstance(quantizer, BackendQuantizer)
    return [each for each in quantizer.record.decisions if each.kind == "branches"]


def annotate(graph: GraphModule, config: BackendConfig | BackendQuantizer) -> BackendQuantizer:
    quantizer = config if isinstance(config, BackendQuantizer) else BackendQuantizer(config)
    quantizer.annotate(quantizer.transform_for_annotation(graph))
    return quantizer


def linears(graph: GraphModule) -> list[Node]:
    return [n for n in graph.graph.nodes if str(n.target) in {"aten.linear.default", "aten.addmm.default"}]


def operand(node: Node) -> Node:
    found = node.args[1] if "addmm" in str(node.target) else node.args[0]
    assert isinstance(found, Node)
    return found


def entry(node: Node) -> Pair | None:
    """The qparams at a linear's input, or None where it reads float."""
    return pair_of(operand(node)) if is_dequantize(operand(node)) else None


@functools.cache
def exported(root: str) -> torch.export.ExportedProgram:
    return torch.export.export(Towers(CUTS, root).eval(), columns(1.0))


def functionalized(graph: GraphModule) -> GraphModule:
    """The same graph in the spelling that functionalization leaves: every view is a copy."""
    for node in graph.graph.nodes:
        name, _, overload = str(node.target).removeprefix("aten.").partition(".")
        twin = getattr(torch.ops.aten, f"{name}_copy", None)
        if node.op == "call_function" and twin is not None and str(node.target).startswith("aten."):
            node.target = getattr(twin, overload)
    graph.recompile()
    return graph


SPELLINGS: dict[str, Callable[[torch.export.ExportedProgram], torch.nn.Module]] = {
    "exported": lambda program: program.module(),
    "decomposed": lambda program: program.run_decompositions().module(),
    "functionalized": lambda program: functionalized(program.run_decompositions().module()),
}


# -- discovery ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", list(SPELLINGS))
@pytest.mark.parametrize("root", ["input", "float", "block"])
def test_every_cut_of_any_root_is_a_leaf(root: str, spelling: str) -> None:
    graph = SPELLINGS[spelling](exported(root))
    assert isinstance(graph, GraphModule)
    flow = quantize(graph, columns(1.0), minmax_config())
    (family,) = families(flow.quantizer)
    assert family.root_is_float is (root != "block")
    assert len(family.leaves) == len(CUTS) + 1  # and the direct edge
    assert len({leaf.cell for leaf in family.leaves}) == len(family.leaves)
    assert not any(leaf.read_in_float for leaf in family.leaves)
    assert {leaf.consumer_cost for leaf in family.leaves} == {4 * 3 * 4, 4 * 3 * 12}
    (decision,) = decisions(flow.quantizer)
    assert decision.outcome is Outcome.SHARED
    found = {entry(node) for node in linears(flow.converted)[root == "block" :]}
    assert len(found) == 1
    assert None not in found


def test_a_parameter_is_a_root() -> None:
    flow = quantize(exported("parameter").module(), columns(1.0), minmax_config())
    by_root = {family.where.split()[0]: len(family.leaves) for family in families(flow.quantizer)}
    assert by_root["constant"] == len(CUTS) - 3 + 1  # a view of a parameter is a constant, and a root of its own
    assert all(family.root_is_float for family in families(flow.quantizer))
    assert all(entry(node) for node in linears(flow.converted))


def test_branches_go_on_through_movement() -> None:
    def moved(move: Cut) -> Cut:
        return lambda x: move(x[:, :4])

    model = Towers({name: moved(move) for name, move in MOVES.items()}).eval()
    graph = export(model, columns(1.0, 1.0, 50.0))
    flow = quantize(graph, columns(1.0, 1.0, 50.0), minmax_config())
    (family,) = families(flow.quantizer)
    assert len(family.leaves) == len(MOVES) + 1
    *towers, whole = linears(flow.converted)
    assert len({entry(node) for node in towers}) == 1
    assert entry(towers[0]) != entry(whole)
    for node in towers:  # quantized once, however many ops the branch goes through
        pairs = {pair_of(each) for each in above(node) if is_dequantize(each)}
        assert pairs == {entry(node)}


def above(node: Node) -> list[Node]:
    """Everything between a linear's input and the graph's inputs."""
    found, todo = [], [operand(node)]
    while todo:
        found.append(todo.pop())
        todo += [n for n in found[-1].all_input_nodes if n.op == "call_function"]
    return found


def test_movement_above_the_cuts_belongs_to_the_root() -> None:
    cuts: dict[str, Cut] = {
        "a": lambda x: x.t().reshape(3, 4, 4)[0],
        "b": lambda x: x.t().reshape(3, 4, 4).permute(2, 1, 0)[:, :, 1],
    }
    graph = export(Towers(cuts).eval(), columns(1.0))
    quantizer = annotate(graph, minmax_config())
    (family,) = families(quantizer)
    assert len(family.leaves) == 3
    assert family.root is not None
    (component,) = [c for c in quantizer.record.components if c.plan.families]
    held = component.plan.cells[family.root].values
    assert {"x", "reshape", "reshape_1", "permute"} <= set(held)


class Several(nn.Module):
    """One slice read by two ops, one read by a float op, one returned, a split of which nothing reads one part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.producer = nn.Linear(4, 12)
        self.one, self.two, self.other = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.producer(x)
        a, b = y[:, :4], y[:, 4:8]
        c = y.split(4, 1)[2]
        return self.one(a), self.two(a), b.cumsum(1), b, self.other(c)


def test_readers_of_a_branch() -> None:
    torch.manual_seed(0)
    flow = quantize(Several().eval(), (torch.randn(8, 4),), minmax_config())
    (family,) = families(flow.quantizer)
    assert [leaf.read_in_float for leaf in family.leaves] == [False, True, False]
    assert family.leaves[0].consumer_cost == 2 * family.leaves[2].consumer_cost
    assert len(family.leaves) == 3
    _, one, two, other = linears(flow.converted)
    assert entry(one) == entry(two) == entry(other)
    assert operand(one).args[0] is operand(two).args[0]


def test_families_are_cut_by_scheme() -> None:
    cuts = {name: CUTS[name] for name in ("slice", "narrow", "chunk", "split")}
    inputs = columns(1.0, 1.0, 50.0)
    for root in ("input", "block"):
        quantizer = BackendQuantizer(minmax_config())
        for tower in ("towers.1", "towers.2"):
            quantizer.set_module_name(tower, INT16_SYMMETRIC)
        flow = quantize(Towers(cuts, root).eval(), inputs, quantizer)
        narrow, wide = families(quantizer)
        assert [leaf.read_in_float for leaf in narrow.leaves].count(False) == 3
        assert len(wide.leaves) == 2
        assert narrow.root is not None
        assert wide.root is None
        dtypes = [getattr(entry(node), "dtype", None) for node in linears(flow.converted)[root == "block" :]]
        assert dtypes == [torch.int8, torch.int16, torch.int16, torch.int8, torch.int8]


@pytest.mark.parametrize("cut", ["slice", "view"])
def test_float_values_are_not_rounded_to_a_scheme_that_no_reader_has(cut: str) -> None:
    cuts: dict[str, Cut] = {"slice": lambda x: x[:, :4], "view": lambda x: x.reshape(12, 4)}
    quantizer = BackendQuantizer(minmax_config())
    for tower in ("towers.0", "whole"):
        quantizer.set_module_name(tower, INT16_SYMMETRIC)
    inputs = columns(1.0, 1.0, 50.0)
    flow = quantize(Towers({cut: cuts[cut]}).eval(), inputs, quantizer)
    for node in linears(flow.converted):
        assert {pair_of(each).dtype for each in above(node) if is_dequantize(each)} == {torch.int16}


# -- decisions on the graph ---------------------------------------------------------------------------------

FOUR = {name: CUTS[name] for name in ("slice", "narrow", "chunk")}
ALL = (Outcome.SHARED, Outcome.INDEPENDENT, Outcome.WIDE_ROOT, Outcome.FLOAT_ROOT)


def with_rules(**fields: Any) -> BackendConfig:
    return minmax_config(branches=BranchRules(**fields))


def test_differing_branches_of_a_float_root_are_quantized_each_by_itself() -> None:
    inputs = columns(1.0, 30.0, 1.0)
    flow = quantize(Towers(FOUR).eval(), inputs, with_rules())
    first, second, third, whole = (entry(node) for node in linears(flow.converted))
    assert first == third
    assert second == whole
    assert first != second
    (decision,) = decisions(flow.quantizer)
    assert decision.outcome is Outcome.INDEPENDENT
    assert len(decision.groups) == 2
    for node in linears(flow.converted):
        assert len({pair_of(each) for each in above(node) if is_dequantize(each)}) == 1
    for wanted, found in zip(Towers(FOUR).eval()(*inputs), flow.converted(*inputs), strict=True):
        assert sqnr_db(wanted, found) > 35


class CutOnly(nn.Module):
    """A graph input that is cut in three, and nothing else."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = x.split(4, 1)
        return parts


@pytest.mark.parametrize(("scale", "is_float"), [(4.0, False), (62.0, True)])
def test_a_graph_input_that_is_only_cut_is_cut_as_integers_unless_that_ruins_a_part(
    scale: float, is_float: bool
) -> None:
    inputs = columns(1.0, scale, 1.0)
    flow = quantize(CutOnly().eval(), inputs, with_rules(max_float_loss_db=24.1))
    found = [sqnr_db(a, b) for a, b in zip(CutOnly()(*inputs), flow.converted(*inputs), strict=True)]
    assert (min(found) == math.inf) is is_float, found
    (cut,) = [n for n in flow.converted.graph.nodes if str(n.target) == "aten.split.Tensor"]
    assert is_dequantize(operand(cut)) is not is_float
    assert len({pair_of(n) for n in flow.converted.graph.nodes if is_dequantize(n)}) == (0 if is_float else 1)


class Uneven(nn.Module):
    """A producer with narrow and wide channels, 62:1, cut by two slices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.producer = nn.Conv2d(3, 8, 3, padding=1)
        with torch.no_grad():
            assert self.producer.bias is not None
            self.producer.weight[4:] *= 62
            self.producer.bias.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.producer(x)
        return y[:, :4].neg(), y[:, 4:].neg()


@pytest.mark.parametrize(
    ("outcomes", "taken", "least"),
    [
        ((Outcome.SHARED,), Outcome.SHARED, (5.0, 38.0)),
        ((Outcome.SHARED, Outcome.WIDE_ROOT, Outcome.FLOAT_ROOT), Outcome.WIDE_ROOT, (36.0, 37.0)),
        ((Outcome.SHARED, Outcome.FLOAT_ROOT), Outcome.FLOAT_ROOT, (36.0, 37.0)),
        ((Outcome.SHARED, Outcome.INDEPENDENT), Outcome.SHARED, (5.0, 38.0)),
    ],
)
def test_a_producer_with_narrow_and_wide_channels(
    outcomes: tuple[Outcome, ...], taken: Outcome, least: tuple[float, float]
) -> None:
    inputs = (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),)
    flow = quantize(Uneven().eval(), inputs, with_rules(outcomes=outcomes))
    (decision,) = decisions(flow.quantizer)
    assert decision.outcome is taken
    assert decision.finding is (taken is Outcome.SHARED)
    found = [sqnr_db(a, b) for a, b in zip(Uneven().eval()(*inputs), flow.converted(*inputs), strict=True)]
    assert [db > bound for db, bound in zip(found, least, strict=True)] == [True, True], found
    assert (found[0] < 9) is (taken is Outcome.SHARED)


def test_what_a_wide_root_looks_like() -> None:
    inputs = (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),)
    flow = quantize(Uneven().eval(), inputs, with_rules(outcomes=ALL))
    (conv,) = [n for n in flow.converted.graph.nodes if str(n.target) == "aten.conv2d.default"]
    pairs = [pair_of(n) for n in flow.converted.graph.nodes if "dequantize_per_tensor" in str(n.target)]
    wide = [pair for pair in pairs if pair.dtype is torch.int16]
    y = torch.nn.functional.conv2d(*inputs, Uneven().producer.weight, padding=1)
    assert len(set(wide)) == 1
    assert wide[0].zero_point == 0
    assert wide[0].scale * 32767 == pytest.approx(y.abs().max().item(), rel=1e-6)
    (quantized,) = conv.users
    assert quantized.args[5] is torch.int16
    for node in flow.converted.graph.nodes:
        if str(node.target) == "aten.slice.Tensor":
            assert is_dequantize(node.args[0])
            assert pair_of(node.args[0]) == wide[0]


def test_a_wide_root_is_not_taken_from_an_activation_that_saturation_stands_for() -> None:
    class Relu(Uneven):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.relu(self.producer(x))
            return y[:, :4].neg(), y[:, 4:].neg()

    inputs = (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),)
    flow = quantize(Relu().eval(), inputs, with_rules(outcomes=ALL))
    (decision,) = decisions(flow.quantizer)
    assert decision.outcome is Outcome.WIDE_ROOT
    (wide,) = {pair for pair in all_pairs(flow) if pair.dtype is torch.int16}
    assert (wide.quant_min, wide.zero_point, wide.quant_max) == (0, 0, 32767)
    config = with_rules(outcomes=ALL)
    separate = replace(
        config, blocks=replace(config.blocks, symmetric_activation=type(config.blocks.symmetric_activation).SEPARATE)
    )
    flow = quantize(Relu().eval(), inputs, separate)
    assert decisions(flow.quantizer)[0].outcome is Outcome.FLOAT_ROOT


def all_pairs(flow: Flow) -> list[Pair]:
    return [pair_of(n) for n in flow.converted.graph.nodes if "dequantize_per_tensor" in str(n.target)]


def test_a_part_that_nothing_reads_costs_nothing() -> None:
    class Unread(Uneven):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.producer(x)
            narrow, _ = y.split(4, 1)
            return narrow.neg(), y[:, 4:6].neg()

    inputs = (torch.randn(2, 3, 8, 8),)
    quantizer = annotate(export(Unread().eval(), inputs), with_rules())
    (family,) = families(quantizer)
    assert len(family.leaves) == 2


# -- what the backend's pass would hoist --------------------------------------------------------------------


def found_hoists(model: nn.Module, inputs: Inputs, **rules: Any) -> list[list[str]]:
    config = configs.cadence(hoist=HoistRule.ALWAYS)
    config = replace(config, branches=replace(config.branches, **rules))
    return [sorted(each.costs) for each in hoists(annotate(export(model.eval(), inputs), config))]


def cut_by(*cuts: Cut, root: str = "input") -> Towers:
    model = Towers({str(i): cut for i, cut in enumerate(cuts)}, root)
    model.whole = nn.Linear(12, 3)
    return model


class Parts(nn.Module):
    """Cuts of an input, each with a linear; optionally more is done with the input."""

    def __init__(self, cuts: list[Cut], more: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [int(cut(torch.zeros(4, 12)).shape[-1]) for cut in cuts]
        self.cuts, self.more = cuts, more
        self.towers = nn.ModuleList(nn.Linear(size, 3) for size in sizes)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [tower(cut(x)) for tower, cut in zip(self.towers, self.cuts, strict=True)]
        return found + ([self.more(x)] if self.more else [])


def first(x: Tensor) -> Tensor:
    return x[:, :4]


def second(x: Tensor) -> Tensor:
    return x[:, 4:8]


def whole(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("cuts", "more", "sizes"),
    [
        pytest.param([first, second], None, [2], id="slices of two thirds"),
        pytest.param([lambda x: x[:, :2], lambda x: x[:, 2:4]], None, [], id="slices of one third"),
        pytest.param([lambda x: x[:, :2], lambda x: x[:, 2:4].t()], None, [2], id="movement needs no coverage"),
        pytest.param([whole, first, second], None, [3], id="direct edge"),
        pytest.param([whole, lambda x: x.t().t()], None, [], id="one cell"),
        pytest.param([first, second], lambda x: x.cumsum(1), [], id="float reader of the root"),
        pytest.param([first, second], lambda x: x[:, 8:].cumsum(1), [], id="float reader of a branch"),
        pytest.param([first, second], lambda x: x[:, 8:], [], id="a branch is returned"),
        pytest.param([lambda x: x.split(4, 1)[0], lambda x: x.split(4, 1)[1]], None, [], id="split"),
        pytest.param([lambda x: x.split(6, 1)[0][:, :3], lambda x: x.split(6, 1)[0][:, 3:]], None, [], id="split each"),
        pytest.param([lambda x: x.unbind(0)[0], lambda x: x.unbind(0)[1]], None, [2], id="unbind"),
        pytest.param([lambda x: x.flip(0)[:, :6], lambda x: x[:, 6:]], None, [], id="an op that the pass stops at"),
    ],
)
def test_what_the_pass_would_hoist_together(
    cuts: list[Cut], more: Callable[[Tensor], Tensor] | None, sizes: list[int]
) -> None:
    assert [len(each) for each in found_hoists(Parts(cuts, more), columns(1.0))] == sizes


class CutAgain(nn.Module):
    """Items of a split are roots of their own for a pass that can't look through the split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one, two = x.split(6, 1)
        return self.a(one[:, :3]), self.b(one[:, 3:]), self.c(two)


def test_a_hoist_below_an_item_of_a_split_is_made_safe() -> None:
    inputs = columns(1.0, 30.0, 1.0, 1.0)
    assert [len(each) for each in found_hoists(CutAgain(), inputs)] == [2]
    for conflict in Conflict:
        flow = quantize(CutAgain().eval(), inputs, configs.cadence(estimator="minmax", conflict=conflict))
        a, b, c = (entry(node) for node in linears(flow.converted))
        assert c is not None
        assert (a == b and a is not None) if conflict is Conflict.UNION else (a is None) != (b is None)
        assert [d.finding for d in decisions(flow.quantizer)] == [False, conflict is Conflict.UNION]
        assert "hoists across differing" in decisions(flow.quantizer)[1].notes[0]


class IntoJoin(nn.Module):
    """One branch goes to a linear, the other into a cat."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(12, 3)
        nn.init.constant_(self.a.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.cat([self.a(x[:, :6]), x[:, 6:]], 1))
        return y


@pytest.mark.parametrize("scales", [(1.0, 1.0), (1.0, 30.0)])
def test_a_join_below_the_root_takes_part_in_the_hoist(scales: tuple[float, float]) -> None:
    inputs = columns(*scales)
    config = configs.cadence(estimator="minmax")
    config = replace(config, ops=replace(config.ops, joins=config.ops.joins | {"cat"}))
    flow = quantize(IntoJoin().eval(), inputs, config)
    (above,) = hoists(flow.quantizer)
    assert set(above.costs) == {"slice_1", "cat"}
    quantizes = {
        n.args[1:6]
        for n in flow.converted.graph.nodes
        if str(n.target) == "quantized_decomposed.quantize_per_tensor.default"
        and str(n.args[0].target) == "aten.slice.Tensor"
    }
    first_, _ = linears(flow.converted)
    assert len(quantizes) == 1
    assert (entry(first_) is not None) is (scales == (1.0, 1.0))


def test_mixed_schemes_never_reach_a_pass_that_hoists_always() -> None:
    quantizer = BackendQuantizer(configs.cadence(estimator="minmax"))
    quantizer.set_module_name("towers.1", replace(INT8_AFFINE, dtype=torch.int16, quant_min=-32768, quant_max=32767))
    flow = quantize(Parts([first, second]).eval(), columns(1.0), quantizer)
    assert [entry(node) is None for node in linears(flow.converted)].count(True) == 1


# -- cost ---------------------------------------------------------------------------------------------------


@functools.cache
def many(branches: int, depth: int) -> GraphModule:
    """One input, cut into branches, each with a row of linear + relu."""
    mode, graph, owner = FakeTensorMode(), Graph(), nn.Module()
    owner.register_buffer("w", torch.zeros(4, 4))

    def call(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = part
        return node

    part, square = mode.from_tensor(torch.empty(1, 4)), mode.from_tensor(torch.empty(4, 4))
    x, outs = graph.placeholder("x"), []
    x.meta["val"] = mode.from_tensor(torch.empty(1, branches * 4))
    for index in range(branches):
        value = call(torch.ops.aten.slice.Tensor, x, 1, index * 4, index * 4 + 4)
        for _ in range(depth):
            weight = graph.get_attr("w")
            weight.meta["val"] = square
            value = call(torch.ops.aten.relu.default, call(torch.ops.aten.linear.default, value, weight))
        outs.append(value)
    joined = call(torch.ops.aten.cat.default, outs, 1)
    graph.output((joined,))
    return GraphModule(owner, graph)


@pytest.mark.parametrize("config", [minmax_config(), configs.cadence(), configs.xnnpack()], ids=lambda c: c.name)
def test_a_root_with_many_branches_costs_no_more_per_node(config: BackendConfig) -> None:
    def seconds(branches: int) -> float:
        graph, best = many(branches, 3), float("inf")
        for _ in range(1 if branches > 100 else 5):
            for node in graph.graph.nodes:
                node.meta = {"val": node.meta.get("val")}
            quantizer = BackendQuantizer(config)
            gc.collect()
            gc.disable()
            start = time.process_time()
            quantizer.annotate(graph)
            best = min(best, time.process_time() - start)
            gc.enable()
        (family,) = families(quantizer)
        assert len(family.leaves) == branches
        return best / len(graph.graph.nodes)

    small, large = seconds(20), seconds(1000)
    assert large < 3 * small, (small, large)
