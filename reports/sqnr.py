"""Measure SQNR: a float graph and its quantized twin, run node by node on the same batches and held side by side.

Nodes are matched by name: `prepare_pt2e` and `convert_pt2e` keep the names of what they find, once batch norms are
folded and the quantizer has spelled the graph as it wants it; the float graph is treated likewise first.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

from ..annotators.graph import is_constant, module_path, op_name, users
from ..annotators.kept import kept
from ..annotators.transform import SpelledAs
from ..checks.qdq import is_dequantize, is_quantize, library_op
from ..observers.errors import ConfigError, InputError
from ..observers.metrics import ratio_db
from ..observers.qparams import QParams, Scheme
from .erased import erased_blocks
from .explain import numbers_of, sharing_members
from .measured import Measurement, OutputSqnr, TensorSqnr
from .replay import replay, snapshot, writes_in_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .explain import Member
    from .explanation import Numbers

_FLAT_QUANTIZE = "quantize_per_tensor"


def float_twin(exported: GraphModule, quantized: GraphModule) -> GraphModule:
    """Return a float graph with the names and spellings of the quantized one; changes the given one."""
    found = kept(quantized)
    # a copy, since a transform leaves a note in it
    return prepare_pt2e(exported, SpelledAs(copy.copy(found.quantizer) if found is not None else None))


def measure_graphs(reference: GraphModule, quantized: GraphModule, batches: Iterable[Sequence[Any]]) -> Measurement:
    """Measure a quantized graph against the float graph, as `float_twin` returned it.

    Holds the float tensors of one batch at a time.

    Raises:
        InputError: if there are no batches, or the graphs have different outputs.
    """
    bench = _Bench(reference, quantized)
    for batch in batches:
        bench.run(batch)
    if not bench.batches:
        raise InputError("there are no batches to measure SQNR on; give at least one")
    return bench.measurement()


@dataclass
class Energies:
    """Energies of signal and noise, in squared real units, over all batches."""

    signal: float = 0.0
    noise: float = 0.0
    rounding: float = 0.0

    def add(self, wanted: Tensor, found: Tensor, rounded: Tensor | None = None) -> None:
        """Add a tensor of the float graph, as it was found in the quantized one, and as it would be when rounded."""
        self.signal += _energy(wanted)
        self.noise += _energy(_wide(wanted) - _wide(found))
        if rounded is not None:
            self.rounding += _energy(_wide(wanted) - rounded)

    @property
    def sqnr_db(self) -> float:
        """The ratio of the two, in dB."""
        return ratio_db(self.signal, self.noise)


@dataclass
class _Loss:
    """Energies of a member's rounding noise: by its own qparams, and by those that it was given."""

    own: float = 0.0
    given: float = 0.0

    def add(self, member: Member, values: list[Tensor]) -> None:
        for value in values:
            self.own += _energy(_wide(value) - _rounded(value, [member.own]))
            self.given += _energy(_wide(value) - _rounded(value, member.given))

    @property
    def db(self) -> float:
        if self.own == self.given:
            return 0.0
        return ratio_db(self.given, self.own) if self.own else math.inf


@dataclass
class _Bench:
    """Two graphs side by side, and what was summed up so far."""

    reference: GraphModule
    quantized: GraphModule
    batches: int = 0
    sums: dict[tuple[str, Node | None], Energies] = field(default_factory=dict)
    outputs: dict[int, Energies] = field(default_factory=dict)
    losses: dict[tuple[int, str], _Loss] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.quantized.graph.nodes}
        self.rank = {name: index for index, name in enumerate(self.nodes)}
        self.erased: dict[Node, str] = {}
        references = {node.name: node for node in self.reference.graph.nodes}
        self.twins = {name: n for name, n in references.items() if self._is_twin(n, self.nodes.get(name))}
        self.twins |= self._twins_by_origin()
        origin = {self.nodes[name]: node.name for name, node in self.twins.items()}
        for stand_in, block in erased_blocks(self.quantized, origin).items():
            name = self.erased[stand_in] = block.output.name
            self.nodes[name], self.rank[name] = block.output, self.rank[stand_in.name]
            twin = references.get(name) or self.twins.get(stand_in.name)
            if twin is not None:
                self.twins[name] = twin
        self.copies = writes_in_place(self.reference)
        found = kept(self.quantized)
        self.members = sharing_members(found.record) if found is not None else []

    def _is_twin(self, node: Node, other: Node | None) -> bool:
        return (
            other is not None
            and node.op == other.op
            and node.op in {"placeholder", "call_function"}
            and op_name(node) == op_name(other)
            and not is_constant(node)
        )

    def _twins_by_origin(self) -> dict[str, Node]:
        """Return the twins of nodes that were written anew (convolutions in training): the one such op of a module."""
        left, there = self._by_origin(self.quantized), self._by_origin(self.reference)
        return {
            nodes[0].name: there[key][0] for key, nodes in left.items() if len(nodes) == len(there.get(key, ())) == 1
        }

    def _by_origin(self, graph: GraphModule) -> dict[tuple[str, str], list[Node]]:
        found: dict[tuple[str, str], list[Node]] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.name not in self.twins and op_name(node) and not is_constant(node):
                found.setdefault((op_name(node), module_path(node)), []).append(node)
        return found

    def run(self, batch: Sequence[Any]) -> None:
        values: dict[str, Tensor] = {}

        wanted_as: dict[Node, list[str]] = {}
        for name, node in self.twins.items():
            wanted_as.setdefault(node, []).append(name)

        def keep(node: Node, value: Any) -> Any:
            if node in wanted_as and is_real(value):
                values.update(dict.fromkeys(wanted_as[node], snapshot(value, copy=self.copies)))
            return value

        def compare(node: Node, value: Any) -> Any:
            if is_real(value):
                self._compare(node, value, values)
            return value

        wanted = tree_leaves(replay(self.reference, batch, keep))
        for index, members in enumerate(self.members):
            for member in members:
                loss = self.losses.setdefault((index, member.cell), _Loss())
                loss.add(member, [values[name] for name in member.values if name in values])
        found = tree_leaves(replay(self.quantized, batch, compare))
        self._compare_outputs(wanted, found)
        self.batches += 1

    def _compare(self, node: Node, value: Tensor, values: dict[str, Tensor]) -> None:
        if not is_dequantize(node):
            wanted = values.get(node.name)
            if (
                wanted is not None
                and wanted.shape == value.shape
                and any(not is_quantize(user) for user in users(node))
            ):
                self._sums(node.name, None).add(wanted, value)
            return
        source, pairs = _read_through(node)
        name = self.erased.get(source, source.name) if source is not None else ""
        wanted = values.get(name)
        if wanted is None or wanted.shape != value.shape:
            return
        first = next(user for user in pairs[-1].users if is_dequantize(user))  # torchao makes one per reader
        if node is first and any(not is_quantize(user) for twin in pairs[-1].users for user in twin.users):
            qparams = [each for pair in pairs if (each := _qparams(pair)) is not None]
            rounded = _rounded(wanted, qparams) if len(qparams) == len(pairs) else None
            self._sums(name, pairs[-1]).add(wanted, value, rounded)

    def _sums(self, name: str, quantize: Node | None) -> Energies:
        return self.sums.setdefault((name, quantize), Energies())

    def _compare_outputs(self, wanted: list[Any], found: list[Any]) -> None:
        if len(wanted) != len(found):
            raise InputError(f"the float model has {len(wanted)} outputs, the quantized one {len(found)}")
        for index, (ours, theirs) in enumerate(zip(wanted, found, strict=True)):
            if is_real(ours) and is_real(theirs) and ours.shape == theirs.shape:
                self.outputs.setdefault(index, Energies()).add(ours, theirs)

    def measurement(self) -> Measurement:
        order = self.rank
        names = output_names(self.reference)
        keys = sorted(self.sums, key=lambda key: (order[key[0]], order[key[1].name] if key[1] else -1))
        return Measurement(
            batches=self.batches,
            outputs=tuple(
                OutputSqnr(index=index, node=names[index], sqnr_db=sums.sqnr_db)
                for index, sums in sorted(self.outputs.items())
            ),
            tensors=tuple(self._tensor(name, quantize) for name, quantize in keys),
            losses_db=tuple(
                {cell: loss.db for (at, cell), loss in self.losses.items() if at == index}
                for index in range(len(self.members))
            ),
            unmatched=tuple(name for name, node in self.nodes.items() if self._is_unmatched(node)),
        )

    def _tensor(self, name: str, quantize: Node | None) -> TensorSqnr:
        node, sums = self.nodes[name], self.sums[name, quantize]
        numbers = numbers_of_quantize(quantize) if quantize is not None else None
        alone = math.inf if quantize is None else ratio_db(sums.signal, sums.rounding) if numbers else math.nan
        return TensorSqnr(
            node=name,
            op=op_name(node) or node.op,
            module=module_path(node),
            numbers=numbers,
            sqnr_db=sums.sqnr_db,
            rounding_db=alone,
        )

    def _is_unmatched(self, node: Node) -> bool:
        if node.op != "call_function" or node.name in self.twins or is_quantize(node) or is_dequantize(node):
            return False
        return is_real(node.meta.get("val")) and not is_constant(node)


def output_names(model: GraphModule) -> list[str]:
    """Return the names of the nodes that write the model's outputs, quantize and dequantize passed over."""
    (output,) = model.graph.find_nodes(op="output")
    found = []
    for each in tree_leaves(output.args[0]):
        node = each
        while isinstance(node, Node) and (is_dequantize(node) or is_quantize(node)) and isinstance(node.args[0], Node):
            node = node.args[0]
        found.append(node.name if isinstance(node, Node) else "")
    return found


def _energy(value: Tensor) -> float:
    """Return the sum of squares, summed up in float64."""
    return float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype is torch.float64 else value.float()


def is_real(value: object) -> TypeGuard[Tensor]:
    """Tell whether a value is a float tensor with anything in it."""
    return isinstance(value, Tensor) and value.is_floating_point() and 0 not in value.shape


def _read_through(dequantize: Node) -> tuple[Node | None, list[Node]]:
    """Return the value that a dequantize gives back, and the quantizes that it passed on the way, the first first."""
    pairs: list[Node] = []
    node: object = dequantize
    while isinstance(node, Node) and is_dequantize(node):
        quantize = node.args[0]
        if not isinstance(quantize, Node) or not is_quantize(quantize):
            return None, []
        pairs.insert(0, quantize)
        node = quantize.args[0]
    return (node, pairs) if isinstance(node, Node) else (None, [])


def _qparams(quantize: Node) -> QParams | None:
    """Return the qparams of a quantize of a whole tensor by numbers, else None."""
    if library_op(quantize) != _FLAT_QUANTIZE or any(isinstance(each, Node) for each in quantize.args[1:]):
        return None
    scale, zero_point, quant_min, quant_max, dtype = cast("tuple[float, int, int, int, torch.dtype]", quantize.args[1:])
    try:
        return QParams(scale, zero_point, Scheme(dtype=dtype, quant_min=quant_min, quant_max=quant_max))
    except ConfigError:  # float8 and the like: no integer codes
        return None


def numbers_of_quantize(quantize: Node) -> Numbers | None:
    """Return the qparams of a quantize of a whole tensor as plain numbers, or None."""
    qparams = _qparams(quantize)
    return numbers_of(qparams) if qparams is not None else None


def _rounded(value: Tensor, qparams: Iterable[QParams]) -> Tensor:
    """Return a tensor rounded to each of the qparams, one after the other."""
    rounded = value.float()
    for each in qparams:
        limits = (each.scheme.quant_min, each.scheme.quant_max)
        rounded = torch.fake_quantize_per_tensor_affine(rounded, each.scale, each.zero_point, *limits)
    return rounded
