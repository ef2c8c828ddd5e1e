"""Check an annotated graph before torchao reads it: what it would stumble over later is named, at the node at fault.

torchao resolves sharing in `prepare_pt2e` by recursion and look-up: a share with a node that is gone is a KeyError, a
circle a RecursionError, wherever they were written. Every annotation on the graph is looked at, whoever wrote it; what
a backend can run is judged for ours alone. Linear in the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeGuard

from torch.fx import Node
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationSpec,
    SharedQuantizationSpec,
)

from ..configs.ops import MOVEMENT, NO_OPS, POOLS, SELECTS
from ..observers.errors import AnnotationError, SharingConflictError
from ..observers.qparams import choose_qparams
from ..observers.ranges import Bounds, Range
from .blocks import clamp_bounds
from .graph import is_constant, op_name, where
from .neighbours import annotation_of
from .writer import ObserverFactory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.fx.graph_module import GraphModule

    from ..configs.base import BackendConfig
    from ..observers.plan import Cell
    from ..observers.rules import Decision
    from .draft import Place
    from .quantizer import Record

_PASSING: Final = MOVEMENT | NO_OPS | SELECTS | POOLS | {"getitem"}
_PROBE: Final = Range(-1.0, 1.0)  # any range on both sides of 0


def validate(model: GraphModule, record: Record, config_of: Callable[[Node], BackendConfig | None]) -> None:
    """Check every annotation on a graph.

    Args:
        model: the annotated graph.
        record: what we annotated in it.
        config_of: the config that holds for a node, or None.

    Raises:
        AnnotationError: if an annotation shares with what is not there, or in a circle, or asks for what the backend
            can't run.
        SharingConflictError: if sharing would break the contract of a fused activation.
    """
    specs = _specs(model)
    roots = _roots(specs)
    for place, spec in specs.items():
        if isinstance(spec, DerivedQuantizationSpec):
            for source in spec.derived_from:
                _require(source, specs, place, "derives its qparams from")
        elif _is_ours(spec):
            _is_run(place, spec, config_of)
    _decided(record.settled, config_of, model)
    cells = [
        cell for component in record.components for cell in component.plan.cells.values() if cell.contract.is_bounded
    ]
    for cell in cells:
        _can_hold(cell)
    ours = {op.node for op in record.account.ops if not op.why and (op.inputs or op.output)}
    theirs = {place: root for place, root in roots.items() if _node(place).name not in ours}
    _kept_apart({value: cell for cell in cells for value in cell.values}, specs, theirs)


def _specs(model: GraphModule) -> dict[Place, object]:
    """Return what is annotated at each place, in the order in which torchao goes through them."""
    found: dict[Place, object] = {}
    for node in model.graph.nodes:
        annotation = annotation_of(node)
        if annotation is None:
            continue
        for value, spec in annotation.input_qspec_map.items():
            found[value, node] = spec
        if annotation.output_qspec is not None:
            found[node] = annotation.output_qspec
    return found


def _roots(specs: Mapping[Place, object]) -> dict[Place, Place]:
    """Return the place that holds the spec of each place that shares one: shares are followed to their end."""
    roots: dict[Place, Place] = {}
    for place, spec in specs.items():
        way: list[Place] = []
        seen: set[Place] = set()
        at, found = place, spec
        while isinstance(found, SharedQuantizationSpec) and at not in roots:
            if at in seen:
                circle = " -> ".join(_shown(each) for each in [*way[way.index(at) :], at])
                raise AnnotationError(
                    f"{_shown(place)}: its annotation shares qparams in a circle, {circle}: none of them holds a "
                    "concrete QuantizationSpec; give the first one, and let the others share with it"
                )
            way.append(at)
            seen.add(at)
            _require(found.edge_or_node, specs, at, "shares qparams with")
            at, found = found.edge_or_node, specs[found.edge_or_node]
        root = roots.get(at, at)
        roots |= dict.fromkeys(way, root)
    return roots


def _node(place: Place) -> Node:
    """Return the node that is annotated: the reader of an edge."""
    return place[1] if isinstance(place, tuple) else place


def _require(target: Place, specs: Mapping[Place, object], place: Place, does: str) -> None:
    if target in specs:
        return
    nodes = target if isinstance(target, tuple) else (target,)
    gone = [node.name for node in nodes if node.graph is not _node(place).graph or node._erased]
    why = f"but {gone[0]} is not in the graph" if gone else "which is not annotated"
    mend = "annotate what it refers to, or give it a QuantizationSpec of its own"
    raise AnnotationError(f"{_shown(place)}: its annotation {does} {_shown(target)}, {why}; {mend}")


def _is_run(place: Place, spec: QuantizationSpec, config_of: Callable[[Node], BackendConfig | None]) -> None:
    """Raise if one of our activations has a dtype that its backend has no kernels for."""
    value, node = place if isinstance(place, tuple) else (place, place)
    config = config_of(node)
    dtypes = config.limits.activation_dtypes if config is not None else None
    if config is None or dtypes is None or spec.dtype in dtypes or is_constant(value):
        return
    listed = ", ".join(map(str, dtypes))
    raise AnnotationError(
        f"{_shown(place)}: annotated as {spec.dtype}, for which {config.name} has no kernels (it has {listed}); set "
        "another scheme for this op, or leave it float"
    )


def _decided(
    decisions: Iterable[Decision], config_of: Callable[[Node], BackendConfig | None], model: GraphModule
) -> None:
    """Raise if a decision has an outcome that no config of the graph lists."""
    decisions = [decision for decision in decisions if decision.kind in {"branches", "join"}]
    if not decisions:  # few graphs are decided about beforehand
        return
    configs = {id(c): c for node in model.graph.nodes if (c := config_of(node)) is not None}.values()
    legal = {outcome for c in configs for outcome in (*c.branches.outcomes, *c.joins.outcomes)}
    for decision in decisions:
        if decision.outcome not in legal:
            listed = ", ".join(sorted(outcome.value for outcome in legal))
            raise AnnotationError(
                f"{decision.where}: decided as {decision.outcome.value}, which is not legal here (legal: {listed}); "
                "list it in the config's branches.outcomes or joins.outcomes if the backend can do it"
            )


def _can_hold(cell: Cell) -> None:
    """Raise if no qparams of a cell's scheme saturate at the lower bound of its activation.

    The upper bound is a matter of the scale: it is missed only where that is at its floor, which is no fault of ours.
    """
    lower = Bounds(cell.contract.lower, None)
    qparams = cell.fixed or choose_qparams(_PROBE, cell.scheme, lower)
    if qparams.honours(lower):
        return
    bounds = f"[{cell.contract.lower}, {cell.contract.upper}]"
    raise SharingConflictError(
        f"{cell.where}: an activation with the bounds {bounds} was folded into it, but no qparams of its scheme "
        f"({cell.scheme}) saturate there; fuse it in an affine scheme, or leave the activation by itself"
    )


def _kept_apart(contracts: Mapping[str, Cell], specs: Mapping[Place, object], roots: Mapping[Place, Place]) -> None:
    """Raise if an annotation ties a tensor that may go beyond a contract's bounds to the tensor of that contract."""
    for place, root in roots.items():
        cell = contracts.get(root.name) if isinstance(root, Node) else None
        if cell is None or not _is_ours(specs[root]):
            continue
        value = place[0] if isinstance(place, tuple) else place
        if value.name not in cell.values and not _stays_within(value, contracts, cell):
            raise SharingConflictError(
                f"{_shown(place)}: its annotation shares the qparams of {cell.where}, whose saturation stands for an "
                f"activation with the bounds [{cell.contract.lower}, {cell.contract.upper}], and would be clamped so "
                "too; give it qparams of its own"
            )


def _is_ours(spec: object) -> TypeGuard[QuantizationSpec]:
    return isinstance(getattr(spec, "observer_or_fake_quant_ctr", None), ObserverFactory)


def _stays_within(value: Node, contracts: Mapping[str, Cell], cell: Cell) -> bool:
    """Tell whether values can't leave the bounds: they are clamped so, or moved from a tensor that is."""
    node = value
    while True:
        if node.name in cell.values or (node.name in contracts and contracts[node.name].contract == cell.contract):
            return True
        bounds = clamp_bounds(node)
        if bounds is not None and bounds.then(cell.contract) == bounds:
            return True
        if op_name(node) not in _PASSING or not node.args or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]


def _shown(place: Place) -> str:
    if isinstance(place, tuple):
        return f"the edge from {place[0].name} to {where(place[1])}"
    return where(place)
