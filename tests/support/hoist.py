"""Packed tensors cut into branches, and what Cadence's hoist pass makes of them.

The real pass is executorch's `AdvanceQuantizeOpAboveDefInBranchPass`, run on the edge graph; `HoistIdentical` is a
double of the repaired one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import executorch.backends.cadence.aot.ops_registrations  # noqa: F401  # registers torch.ops.cadence
import torch
from executorch.backends.cadence.aot.reorder_ops import AdvanceQuantizeOpAboveDefInBranchPass, CadenceReorderOpsInGraph
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quantmark.observers.ranges import Range
from quantmark.observers.table import RangeTable

FIXTURES = Path(__file__).parent.parent / "fixtures" / "ranges"
WIDTH = 4  # columns of a branch

REORDERING = CadenceReorderOpsInGraph.passes  # the pass, after those that run before it
HoistAlways = AdvanceQuantizeOpAboveDefInBranchPass


class HoistIdentical(HoistAlways):
    """The repaired pass: what the real one would hoist, but only where all quantize ops agree."""

    def get_descendent_quant_ops(self, node: Node) -> list[Node]:
        found: list[Node] = super().get_descendent_quant_ops(node)
        return found if len({quantize.args[1:] for quantize in found}) <= 1 else []


# -- what the pass did ----------------------------------------------------------------------------------------


def quantizes(node: Any) -> bool:
    return isinstance(node, Node) and "quantized_decomposed.quantize_per_tensor" in str(node.target)


def dequantizes(node: Any) -> bool:
    return isinstance(node, Node) and "quantized_decomposed.dequantize_per_tensor" in str(node.target)


@dataclass
class Lowered:
    """A converted model on the edge dialect, before and after passes."""

    edge: EdgeProgramManager
    outputs: list[Tensor]

    @property
    def graph(self) -> torch.fx.Graph:
        graph: torch.fx.Graph = self.edge.exported_program().graph
        return graph

    def root(self, index: int) -> Node:
        """The tensor that input `index` is cut from: itself, or its negative."""
        found = [n for n in self.graph.nodes if n.op == "placeholder" and n.name.startswith("x_")][index]
        (first, *others) = list(found.users)
        root: Node = first if not others and "neg" in str(first.target) else found
        return root

    def below(self, root: Node) -> list[Node]:
        """The quantize ops that are reached from a root through movement, in graph order."""
        seen: dict[Node, None] = {}
        front = list(root.users)
        while front:
            node = front.pop(0)
            if quantizes(node):
                seen[node] = None
            elif any(part in str(node.target) for part in MOVED):
                front += list(node.users)
        return list(seen)

    def hoisted(self, index: int) -> bool:
        """Tell whether one quantize stands directly below the root, and nothing else."""
        users = list(self.root(index).users)
        return len(users) == 1 and quantizes(users[0])

    def effective_quantizes(self) -> list[Node]:
        """The quantize ops that change a value: not those that follow a dequantize with the same qparams."""
        return [n for n in self.graph.nodes if quantizes(n) and not _undone(n)]


MOVED = ("slice", "select", "split", "getitem", "view", "squeeze", "permute", "expand", "clone", "transpose", "t_copy")


def _undone(quantize: Node) -> bool:
    source = quantize.args[0]
    return dequantizes(source) and source.args[1:] == quantize.args[1:]  # type: ignore[union-attr]


def lower(converted: GraphModule, inputs: Sequence[Tensor], *passes: Any) -> Lowered:
    """Take a converted model to the edge dialect, run passes on it, and run it."""
    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    with torch.no_grad():
        edge = to_edge(torch.export.export(converted, tuple(inputs)), compile_config=config)
        return transformed(edge, inputs, *passes)


def transformed(edge: EdgeProgramManager, inputs: Sequence[Tensor], *passes: Any) -> Lowered:
    if passes:  # on a copy: the pass rewrites the graph that it is given, too
        edge = copy.deepcopy(edge).transform([each() for each in passes])
    with torch.no_grad():
        outputs = edge.exported_program().module()(*inputs)
    return Lowered(edge, list(outputs) if isinstance(outputs, (tuple, list)) else [outputs])


def identical(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


# -- packed tensors -------------------------------------------------------------------------------------------


def scenario(name: str) -> list[Range]:
    """The ranges of a fixture's branches, as float32 holds them."""
    table = RangeTable.from_json((FIXTURES / f"{name}.json").read_text())
    return [Range(_float32(table[key].range.min), _float32(table[key].range.max)) for key in table]


def scenarios() -> list[str]:
    return sorted(path.stem for path in FIXTURES.glob("*.json"))


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def packed(ranges: Sequence[Range], rows: int, *, seed: int = 0) -> Tensor:
    """Rows of branches side by side, each `WIDTH` columns with exactly the given range."""
    generator = torch.Generator().manual_seed(seed)
    columns = []
    for range_ in ranges:
        part = range_.min + torch.rand(rows, WIDTH, generator=generator) * (range_.max - range_.min)
        part = part.clamp(range_.min, range_.max)
        part[0, 0], part[1, 1] = range_.min, range_.max
        columns.append(part)
    return torch.cat(columns, 1)


Cut = Callable[[Tensor, int], Sequence[Tensor]]


def _nested(x: Tensor, count: int) -> list[Tensor]:
    """Cut the first half (rounded up) and the rest, then each in branches."""
    middle = (count + 1) // 2
    halves = (x[:, : middle * WIDTH], middle), (x[:, middle * WIDTH :], count - middle)
    return [half[:, WIDTH * i : WIDTH * i + WIDTH] for half, number in halves for i in range(number)]


CUTS: dict[str, Cut] = {
    "slice": lambda x, n: [x[:, WIDTH * i : WIDTH * i + WIDTH] for i in range(n)],
    "narrow": lambda x, n: [x.narrow(1, WIDTH * i, WIDTH) for i in range(n)],
    "select": lambda x, n: [x.view(-1, n, WIDTH)[:, i] for i in range(n)],
    "split": lambda x, _: x.split(WIDTH, 1),
    "split_with_sizes": lambda x, n: x.split([WIDTH] * n, 1),
    "chunk": lambda x, n: x.chunk(n, 1),
    "unbind": lambda x, n: x.view(-1, n, WIDTH).unbind(1),
    "tensor_split": lambda x, n: x.tensor_split(n, 1),
    "nested": _nested,
    "views": lambda x, n: [
        x[:, WIDTH * i : WIDTH * i + WIDTH].unsqueeze(1).transpose(1, 2).flatten(1) for i in range(n)
    ],
}
UNHOISTED = frozenset({"split", "split_with_sizes", "chunk"})  # the pass does not look through these


class Towers(nn.Module):
    """For each (cut, computed): an input, cut into branches, each read by a quantized op of its own.

    Below "slice" these are linear + relu, below the other cuts a linear without bias. `computed` roots are the
    negatives of their inputs, which negative data makes up for: the float op costs nothing.
    """

    def __init__(self, kinds: Sequence[tuple[str, bool]], ranges: Sequence[Range], outputs: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds, self.count = list(kinds), len(ranges)
        cuts = [cut for cut, _ in kinds for _ in ranges]
        self.towers = nn.ModuleList(nn.Linear(WIDTH, outputs, bias=cut == "slice") for cut in cuts)
        for index, tower in enumerate(self.towers):
            if isinstance(tower.bias, Tensor):
                range_ = ranges[index % self.count]
                tower.bias.data *= max(abs(range_.min), abs(range_.max)) or 1.0

    def forward(self, *x: Tensor) -> list[Tensor]:
        outputs = []
        towers = iter(self.towers)
        for (cut, computed), value in zip(self.kinds, x, strict=True):
            for branch in CUTS[cut](-value if computed else value, self.count):
                out = next(towers)(branch)
                outputs.append(torch.relu(out) if cut == "slice" else out)
        return outputs

    def inputs(self, ranges: Sequence[Range], rows: int, *, seed: int = 0) -> tuple[Tensor, ...]:
        return tuple(
            -packed(ranges, rows, seed=seed + i) if computed else packed(ranges, rows, seed=seed + i)
            for i, (_, computed) in enumerate(self.kinds)
        )


def loss_db(own: float, other: float) -> float:
    """How many dB `other` is below `own`; two infinite ones are equal."""
    return 0.0 if math.isinf(own) and own == other else own - other
