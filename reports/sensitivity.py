"""Which part of a model bears quantization worst: SQNR at the outputs with one part quantized at a time.

The model is calibrated and converted once. Then the converted graph itself is run with the quantize/dequantize pairs of
one part in force and all others passed over, so that whatever is not in that part computes on floats. Only what lies
below the part is computed anew.
"""

from __future__ import annotations

import math
from collections import ChainMap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from ..annotators.kept import kept
from ..checks.qdq import is_dequantize, is_quantize
from ..observers.errors import InputError
from .erased import erased_blocks
from .explain import explain, numbers_of, sharing_members
from .explanation import Status
from .replay import draws, replay_with, writes_in_place
from .sensitive import Part, Sensitivity
from .sqnr import Energies, is_real, numbers_of_quantize, output_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..observers.ranges import Bounds
    from .explanation import Explanation, Numbers

By = Literal["block", "family", "module"]
_KINDS = {Status.BLOCK: "block", Status.QUANTIZED: "op", Status.JOINED: "join"}


@dataclass
class SensitivityBench:
    """A converted graph whose constants are not folded, and what was summed up about it so far.

    Args:
        graph: what `convert_pt2e(prepared, fold_quantize=False)` returned.
        by: what a part is; see `workflow.sensitivity`.
    """

    graph: GraphModule
    by: By
    batches: int = 0
    sums: dict[tuple[int, int], Energies] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found = explain(self.graph)
        self.parts = _parts(self.graph, self.found, self.by)
        self.pairs = _Pairs.of(self.graph)
        everything = frozenset(self.pairs.dequantizes)
        self.active = [everything, *(pairs for _, pairs in self.parts)]
        self.fresh = writes_in_place(self.graph) or draws(self.graph)
        self.below = [_below(self.graph, active) for active in self.active] if not self.fresh else []

    @property
    def runs_per_batch(self) -> int:
        """How many steps `runs` takes for each batch."""
        return len(self.parts) + 1

    def runs(self, batches: Iterable[Sequence[Any]]) -> Iterator[None]:
        """Run each part on each batch, one at a step."""
        for batch in batches:
            self.batches += 1
            interpreter = _Partly(self.graph, self.pairs, frozenset())
            wanted = tree_leaves(replay_with(interpreter, batch))
            for index in range(len(self.active)):
                found = tree_leaves(self._run(index, interpreter.env, batch))
                for place, (ours, theirs) in enumerate(zip(wanted, found, strict=True)):
                    if is_real(ours) and is_real(theirs) and ours.shape == theirs.shape:
                        self.sums.setdefault((index, place), Energies()).add(ours, theirs)
                yield

    def _run(self, index: int, known: dict[Node, Any], batch: Sequence[Any]) -> Any:
        interpreter = _Partly(self.graph, self.pairs, self.active[index])
        if self.fresh:  # what was computed before may have been written into since; the same numbers must be drawn
            return replay_with(interpreter, batch)
        return interpreter.run_below(known, self.below[index])

    def sensitivity(self) -> Sensitivity:
        """Return what was found.

        Raises:
            InputError: if there were no batches, or the model has no float output.
        """
        if not self.batches:
            raise InputError("there are no batches to measure sensitivity on; give at least one")
        places = [place for index, place in self.sums if index == 0]
        if not places:
            raise InputError("the model has no float output to measure sensitivity at")
        stands_for = {stand_in.name: block.output.name for stand_in, block in erased_blocks(self.graph).items()}
        names = [stands_for.get(name, name) for name in output_names(self.graph)]
        parts = [
            Part(**about._asdict(), outputs_db=tuple(self._db(index, place) for place in places))
            for index, (about, _) in enumerate(self.parts, start=1)
        ]
        return Sensitivity(
            backend=self.found.backend,
            by=self.by,
            batches=self.batches,
            outputs=tuple(names[place] for place in places),
            together_db=tuple(self._db(0, place) for place in places),
            parts=tuple(sorted(parts, key=lambda part: (math.isnan(part.worst_db), part.worst_db))),
        )

    def _db(self, index: int, place: int) -> float:
        """Return a part's SQNR at an output; NaN where the output never had the shape that it has in float."""
        sums = self.sums.get((index, place))
        return math.nan if sums is None else sums.sqnr_db


@dataclass(frozen=True)
class _Pairs:
    """The quantize/dequantize pairs of a graph.

    Args:
        quantizes: each, with the value that it reads.
        dequantizes: each, with its quantize.
        bounds: values whose activation was erased, because saturation stands for it, with its bounds.
    """

    quantizes: Mapping[Node, Node]
    dequantizes: Mapping[Node, Node]
    bounds: Mapping[Node, Bounds]

    @classmethod
    def of(cls, graph: GraphModule) -> _Pairs:
        nodes = graph.graph.nodes
        quantizes = {node: node.args[0] for node in nodes if is_quantize(node)}
        dequantizes = {node: node.args[0] for node in nodes if is_dequantize(node) and node.args[0] in quantizes}
        erased = {node: block.bounds for node, block in erased_blocks(graph).items() if block.bounds.is_bounded}
        return cls(quantizes, dequantizes, erased)


def _below(graph: GraphModule, active: frozenset[Node]) -> list[Node]:
    """Return the nodes, in order, whose values depend on an active dequantize, and the output."""
    found: set[Node] = set(active)
    for node in graph.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes) or node.op == "output":
            found.add(node)
    return [node for node in graph.graph.nodes if node in found]


class _Partly(Interpreter):
    """Runs a graph with some of its dequantizes in force; the value that another gives back passes as it is."""

    def __init__(self, graph: GraphModule, pairs: _Pairs, active: frozenset[Node]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.pairs = pairs
        self.active = active

    def run_node(self, n: Node) -> Any:
        source = self.pairs.quantizes.get(n)
        if source is not None:
            bounds = self.pairs.bounds.get(source)
            return self.env[source] if bounds is None else self.env[source].clamp(bounds.lower, bounds.upper)
        quantize = self.pairs.dequantizes.get(n)
        if quantize is not None:
            return self._round(quantize, n) if n in self.active else self.env[quantize]
        return super().run_node(n)

    def _round(self, quantize: Node, dequantize: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(quantize)
        codes = self.call_function(quantize.target, args, kwargs)
        args, kwargs = self.fetch_args_kwargs_from_env(dequantize)
        return self.call_function(dequantize.target, (codes, *args[1:]), kwargs)

    def run_below(self, known: dict[Node, Any], nodes: list[Node]) -> Any:
        """Return the outputs, computing the nodes anew and taking the other values as known."""
        changed: dict[Node, Any] = {}
        self.env = ChainMap(changed, known)  # type: ignore[assignment]  # looked up in, and written to, alike
        with torch.no_grad():
            for node in nodes:
                changed[node] = self.run_node(node)
        return changed[nodes[-1]]


class _About(NamedTuple):
    """What a part is; see `Part`."""

    name: str
    kind: str
    title: str
    module: str
    nodes: tuple[str, ...]


_PartPairs = tuple[_About, frozenset[Node]]


def _parts(graph: GraphModule, found: Explanation, by: By) -> list[_PartPairs]:
    """Return the parts that quantize anything, each with its dequantizes, in graph order."""
    nodes = {node.name: node for node in graph.graph.nodes}
    nodes |= {block.output.name: stand_in for stand_in, block in erased_blocks(graph).items()}
    parts = _families(graph, nodes, found) if by == "family" else _computing_parts(nodes, found)
    parts = [part for part in parts if part[1]]
    return _by_module(parts) if by == "module" else parts


def _computing_parts(nodes: dict[str, Node], found: Explanation) -> list[_PartPairs]:
    """Return the blocks, quantized ops and joins, with what they read and write."""
    blocks = {block.output: block for block in found.blocks}
    computing = {op.node for op in found.ops if op.status is not Status.MOVED}
    parts = []
    for op in found.ops:
        if op.status not in _KINDS:
            continue
        block = blocks.get(op.node)
        members = tuple(name for name, _ in block.members) if block is not None else (op.node,)
        pairs = _read_pairs(nodes, members, computing) | _written_pairs(nodes[op.node], _numbers(found, op.output))
        title = block.title if block is not None else op.op
        module = block.module if block is not None else op.module
        parts.append((_About(op.node, _KINDS[op.status], title, module, members), frozenset(pairs)))
    return parts


def _by_module(parts: list[_PartPairs]) -> list[_PartPairs]:
    modules: dict[str, list[_PartPairs]] = {}
    for part in parts:
        modules.setdefault(part[0].module, []).append(part)
    found = []
    for module, inside in modules.items():
        title = ", ".join(dict.fromkeys(about.title for about, _ in inside))
        nodes = tuple(name for about, _ in inside for name in about.nodes)
        pairs = frozenset(pair for _, pairs in inside for pair in pairs)
        found.append((_About(module, "module", title, module, nodes), pairs))
    return found


def _read_pairs(nodes: dict[str, Node], members: Sequence[str], computing: set[str]) -> set[Node]:
    """Return the dequantizes between the members and the ops that compute what they read, constants included."""
    pairs: set[Node] = set()
    waiting = [value for name in members if name in nodes for value in nodes[name].all_input_nodes]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node.name in computing or node.op == "placeholder":
            continue
        seen.add(node)
        if is_dequantize(node):
            pairs.add(node)
        waiting += node.all_input_nodes
    return pairs


def _written_pairs(node: Node, numbers: Numbers | None) -> set[Node]:
    """Return the dequantizes by which the readers of a node get it, where it is quantized by these numbers."""
    if numbers is None:
        return set()
    quantizes = [user for user in node.users if is_quantize(user) and numbers_of_quantize(user) == numbers]
    return {user for quantize in quantizes for user in quantize.users if is_dequantize(user)}


def _numbers(found: Explanation, group: str) -> Numbers | None:
    return found.groups[group].numbers if group in found.groups else None


def _families(graph: GraphModule, nodes: dict[str, Node], found: Explanation) -> list[_PartPairs]:
    """Return the roots and branches that were decided about, without the ops that read them."""
    keeper = kept(graph)
    members = sharing_members(keeper.record) if keeper is not None else []
    parts = []
    for decision, tensors in zip(found.decisions, members, strict=True):
        if decision.kind != "branches":
            continue
        pairs: set[Node] = set()
        for each in tensors:
            for name in each.values:
                pairs |= _pairs_through(nodes[name], [numbers_of(qparams) for qparams in each.given])
        title = f"{decision.outcome.value} branches"
        values = tuple(dict.fromkeys(name for each in tensors for name in each.values))
        parts.append((_About(decision.where, "family", title, "", values), frozenset(pairs)))
    return parts


def _pairs_through(node: Node, numbers: Sequence[Numbers]) -> set[Node]:
    """Return the dequantizes by which a value is rounded to these numbers, one after the other."""
    if not numbers:
        return set()
    first = _written_pairs(node, numbers[0])
    return first.union(*(_pairs_through(each, numbers[1:]) for each in first))
