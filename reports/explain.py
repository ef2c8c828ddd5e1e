"""`explain`: what a quantizer annotated, fused, shared, requantized and left float, and why. Reads its record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from ..annotators.graph import module_path, op_name
from ..annotators.kept import kept
from ..annotators.quantizer import BackendQuantizer
from ..annotators.roles import Role
from ..observers.errors import InputError
from ..observers.observer import PerChannelBiasObserver, PerChannelRangeObserver
from ..observers.qparams import choose_qparams
from ..observers.ranges import UNBOUNDED, union
from .explanation import Edge, Explanation, FusedBlock, Group, Numbers, Op, Status

if TYPE_CHECKING:
    from ..annotators.account import OpAccount
    from ..annotators.blocks import Block
    from ..annotators.quantizer import Record
    from ..observers.observer import RangeObserver
    from ..observers.qparams import QParams
    from ..observers.ranges import Range
    from ..observers.resolution import Assignment
    from .measured import Measurement

_STATUS = {
    Role.BLOCK: Status.BLOCK,
    Role.INSIDE: Status.FUSED,
    Role.OWN: Status.QUANTIZED,
    Role.MOVE: Status.MOVED,
    Role.SELECT: Status.MOVED,
    Role.TUPLE: Status.MOVED,
    Role.JOIN: Status.JOINED,
    Role.FLOAT: Status.FLOAT,
}
_UNFOLDED = "its activation is an op of its own, to share with the join behind it"


def explain(subject: BackendQuantizer | GraphModule, measured: Measurement | None = None) -> Explanation:
    """Return what a quantizer did to a graph, and why.

    May be asked after `prepare_pt2e` (what is annotated), after calibration or conversion (what was decided, too).

    Args:
        subject: the prepared or converted graph; or the quantizer, for the graph that it last annotated.
        measured: what `measure_sqnr` returned, to be shown beside what was decided.

    Raises:
        InputError: if the quantizer has annotated nothing yet, or the graph comes from no `BackendQuantizer`.

    >>> print(explain(prepared))  # doctest: +SKIP
    """
    backend, record = _record_of(subject)
    if not record.account.ops and not record.messages:
        raise InputError("the quantizer has annotated no graph yet; pass it to prepare_pt2e first")
    return replace(_Reader(backend, record).explanation(), measured=measured)


def _record_of(subject: BackendQuantizer | GraphModule) -> tuple[str, Record]:
    if isinstance(subject, BackendQuantizer):
        return (subject.config.name if subject.config else ""), subject.record
    if not isinstance(subject, GraphModule):
        raise InputError(f"explain takes a BackendQuantizer or a prepared or converted graph, got {type(subject)}")
    found = kept(subject)
    if found is None:
        raise InputError(
            "the graph holds no record of a BackendQuantizer: it was not annotated by one, or exported or pickled "
            "since; pass the graph that prepare_pt2e or convert_pt2e returned, or the quantizer"
        )
    return found.backend, found.record


@dataclass(frozen=True)
class Member:
    """A quantized tensor that a decision was about.

    Args:
        cell: its name.
        values: the nodes whose values it holds.
        own: the qparams that it would have by itself.
        given: those that its values are rounded to, one after the other.
    """

    cell: str
    values: tuple[str, ...]
    own: QParams
    given: tuple[QParams, ...]


def sharing_members(record: Record) -> list[list[Member]]:
    """Return the quantized tensors that each decision was about, as it left them: at a join, requantized for it."""
    reader = _Reader("", record)
    found = []
    for decision in reader.decisions:
        names = [name for name, _ in decision.ranges]
        joined = reader.qparams_of(names[0]) if decision.kind == "join" and names else []
        members = []
        for name in names:
            seen, given = reader.range_of(name), reader.qparams_of(name)
            if seen is None or not given:
                continue
            cell = reader.plan.cells[name]
            own = cell.fixed or choose_qparams(seen, cell.scheme, cell.contract, reader.headroom_of(name))
            given += joined if joined != given else []
            members.append(Member(name, cell.values, own, tuple(given)))
        found.append(members)
    return found


class _Reader:
    """A quantizer's record, with what became of each cell."""

    def __init__(self, backend: str, record: Record) -> None:
        self.backend = backend
        self.record = record
        self.account = self.record.account
        self.plan = self.account.plan
        self.decisions = self.record.decisions
        self.assignments: dict[str, Assignment] = dict(self.account.assignments)
        self.observers: dict[str, RangeObserver] = {}
        for component in self.record.components:
            self.observers |= component.observers
            if not self.account.assignments:
                self.assignments |= component.resolution().assignments
        self.output_of = {op.node: op.output for op in self.account.ops}
        self.why_float = self._why_float()
        self.first: dict[str, str] = {}  # a group is called by the cell that comes first in the graph
        self.headrooms: dict[str, float] = {}  # the least of each group
        for name, cell in self.plan.cells.items():
            if name not in self.assignments:
                continue
            group = self.assignments[name].group
            self.first.setdefault(group, name)
            if cell.headroom is not None:
                self.headrooms[group] = min(cell.headroom, self.headrooms.get(group, cell.headroom))

    def explanation(self) -> Explanation:
        groups = self._groups()
        activations = [n for n in self.plan.cells if self._kind(n) == "activation"]
        return Explanation(
            backend=self.backend,
            ops=tuple(self._op(op) for op in self.account.ops),
            blocks=tuple(self._block(name, block) for name, block in self.record.blocks.items()),
            groups=groups,
            decisions=self.decisions,
            messages=(*self.record.messages, *self._nested()),
            outputs=self.account.outputs,
            observed=(sum(name in self.assignments for name in activations), len(activations)),
        )

    def _nested(self) -> list[str]:
        names = self.record.branches
        return [f"nested graphs are prepared by themselves and not listed here: {', '.join(names)}"] if names else []

    def _why_float(self) -> dict[str, str]:
        """Return cell -> the decision that left it float."""
        found: dict[str, str] = {}
        for decision in self.decisions:
            grouped = {name for group in decision.groups for name in group}
            for name, _ in decision.ranges:
                if name not in grouped:
                    notes = [note for note in decision.notes if name in note]
                    taken = f"{decision.outcome.value} was chosen"
                    better = [f"{taken}, because {outcome.lower()} {why}" for outcome, why in decision.rejected[:1]]
                    found.setdefault(name, "; ".join(notes or better) or f"{taken}: {decision.reason}")
        return found

    # -- cells ----------------------------------------------------------------------------------------------

    def _kind(self, cell: str) -> str:
        if cell in self.account.weights:
            return "weight"
        return "bias" if cell in self.account.biases else "activation"

    def _is_float(self, cell: str) -> bool:
        """Tell whether the cell was left float, by a decision on itself or on a cell that it follows."""
        if not cell:
            return True
        assigned = self.assignments.get(cell)
        if assigned is not None:
            return assigned.qparams is None
        follows = self.plan.cells[cell].follows if cell in self.plan.cells else frozenset()
        return any(self._is_float(each) for each in follows)

    def _group(self, cell: str) -> str:
        """Return the name of a cell's group; "" where it is float."""
        if self._is_float(cell):
            return ""
        assigned = self.assignments.get(cell)
        return self.first.get(assigned.group, cell) if assigned is not None else cell

    def _groups(self) -> dict[str, Group]:
        members: dict[str, list[str]] = {}
        for name in self.plan.cells:
            if group := self._group(name):
                members.setdefault(group, []).append(name)
        return {name: self._described(name, cells) for name, cells in members.items()}

    def _described(self, name: str, cells: list[str]) -> Group:
        ranges = [found for cell in cells if (found := self.range_of(cell)) is not None]
        whole = union(ranges) if ranges else None
        return Group(
            name=name,
            cells=tuple(cells),
            values=tuple(dict.fromkeys(value for cell in cells for value in self.plan.cells[cell].values)),
            kind=self._kind(name),
            numbers=self._numbers(name),
            range=(whole.min, whole.max) if whole else None,
        )

    def qparams_of(self, cell: str) -> list[QParams]:
        """Return the qparams that a cell's values are rounded to, one after the other; none where it is float."""
        assigned = self.assignments.get(cell)
        return [] if assigned is None else [each for each in (assigned.through, assigned.qparams) if each is not None]

    def headroom_of(self, cell: str) -> float | None:
        """Return the least headroom of the cells that share the cell's qparams, or None for the scheme's."""
        return self.headrooms.get(self.assignments[cell].group)

    def range_of(self, cell: str) -> Range | None:
        """Return the range of a cell as observed, or None."""
        if cell in self.account.ranges:
            return self.account.ranges[cell]
        observer = self.observers.get(cell)
        return observer.known_range() if observer is not None else None

    def _numbers(self, cell: str) -> Numbers | None:
        observer, assigned = self.observers.get(cell), self.assignments.get(cell)
        if isinstance(observer, (PerChannelRangeObserver, PerChannelBiasObserver)):
            return _of_channels(observer) if observer.trouble() is None else None
        if assigned is not None and assigned.qparams is not None:
            return numbers_of(assigned.qparams)
        return None

    # -- ops and blocks -------------------------------------------------------------------------------------

    def _op(self, op: OpAccount) -> Op:
        edges = tuple(self._edge(op, value, cell) for value, cell in op.inputs)
        output = self._group(op.output)
        if op.role is Role.TUPLE and edges:
            output = edges[0].group  # its items are parts of what it reads
        return Op(
            node=op.node,
            op=op.op,
            module=op.module,
            status=self._status(op, [*(edge.group for edge in edges), output]),
            block=op.block,
            inputs=edges,
            output=output,
            reads=op.reads,
            why=tuple(self._why(op, edges)),
        )

    def _status(self, op: OpAccount, groups: list[str]) -> Status:
        quantized = bool(self._group(self.output_of.get(op.block, ""))) if op.block else any(groups)
        return _STATUS[op.role] if quantized else Status.FLOAT

    def _edge(self, op: OpAccount, value: str, cell: str) -> Edge:
        group, above = self._group(cell), self._group(self.output_of.get(value, ""))
        assigned = self.assignments.get(cell)
        decided = assigned is not None and self.output_of.get(value, "") in self.assignments
        through_wide = assigned is not None and assigned.through is not None and op.role is not Role.SELECT
        return Edge(
            value=value,
            group=group,
            kind=self._kind(cell),
            requantized=decided and bool(group and above and (group != above or through_wide)),
        )

    def _why(self, op: OpAccount, edges: tuple[Edge, ...]) -> list[str]:
        found = [op.why] if op.why else []
        if op.role in {Role.MOVE, Role.SELECT, Role.TUPLE} and not (edges or op.output):
            found.append(f"data movement is not annotated for {op.config}")
        if op.role is Role.BLOCK and op.node in self.record.blocks:
            block = self.record.blocks[op.node]
            found += [f"the activation behind it is not fused: {block.unfused}"] if block.unfused else []
            found += [_UNFOLDED] if self._is_unfolded(op.node, block) else []
        if op.role is Role.INSIDE:
            found.append(f"in the block of {op.block}")
        if op.output and self._is_float(op.output):
            found.append(f"output left float; {self.why_float.get(op.output, 'nothing was observed there')}")
        for (value, cell), edge in zip(op.inputs, edges, strict=True):
            if edge.requantized:
                found.append(f"{value} is requantized")
            elif not edge.group and edge.kind == "activation" and cell != op.output:
                found.append(f"reads {value} in float; {self.why_float.get(cell, 'nothing was observed there')}")
        return found

    def _block(self, name: str, block: Block) -> FusedBlock:
        cell = self.output_of.get(name, "")
        assigned = self.assignments.get(cell)
        qparams = assigned.qparams if assigned else None
        unfolded = self._is_unfolded(name, block)
        bounds = UNBOUNDED if unfolded else block.bounds
        return FusedBlock(
            output=name,
            module=module_path(block.head),
            members=tuple((node.name, op_name(node)) for node in block.members),
            lower=bounds.lower,
            upper=bounds.upper,
            group=self._group(cell),
            holds=qparams.honours(bounds) if qparams else None,
            unfused=block.unfused or (_UNFOLDED if unfolded else ""),
        )

    def _is_unfolded(self, name: str, block: Block) -> bool:
        """Tell whether a block's activation became an op of its own, so that it can share with a join."""
        cell = self.plan.cells.get(self.output_of.get(name, ""))
        assigned = self.assignments.get(cell.name) if cell is not None and cell.may_unfold else None
        return assigned is not None and assigned.qparams is not None and not assigned.qparams.honours(block.bounds)


def numbers_of(qparams: QParams) -> Numbers:
    """Return the qparams of a whole tensor as plain numbers."""
    scheme = qparams.scheme
    return Numbers(
        dtype=str(scheme.dtype).removeprefix("torch."),
        quant_min=scheme.quant_min,
        quant_max=scheme.quant_max,
        scale=qparams.scale,
        zero_point=qparams.zero_point,
    )


def _of_channels(observer: PerChannelRangeObserver | PerChannelBiasObserver) -> Numbers:
    scale, zero_point = observer.calculate_qparams()
    points = set(zero_point.tolist())
    return Numbers(
        dtype=str(observer.dtype).removeprefix("torch."),
        quant_min=observer.quant_min,
        quant_max=observer.quant_max,
        scale=float(scale.max()),
        zero_point=points.pop() if len(points) == 1 else None,
        channels=scale.numel(),
    )
