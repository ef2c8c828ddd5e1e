"""Other quantizers on the same graph: what they annotated before us, and what the config's `rest` adds after us.

torchao shares observers between equal-looking specs at one tensor unless the reader's annotation forbids it, and the
first in graph order wins. So an annotation that we did not write can pull one of our cells into a group that breaks
its contract. Two rules keep that from happening:

* A tensor that another quantizer has annotated already is read with that quantizer's own qparams.
* Of what `rest` annotates, an edge that reads one of our tensors is made to share with it on the page, unless the
  annotation ties several tensors together; such a tie keeps a group of its own, requantized at the edge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx.graph_module import GraphModule

    from ..observers.qparams import Scheme
    from .draft import Place


def annotation_of(node: Node) -> QuantizationAnnotation | None:
    """Return the annotation that some quantizer gave the node, or None."""
    found = node.meta.get(Q_ANNOTATION_KEY)
    return found if isinstance(found, QuantizationAnnotation) and found._annotated else None


def foreign_spec(node: Node) -> QuantizationSpec | None:
    """Return the spec of a node's output as another quantizer wrote it, shared ones followed to their end."""
    annotation = annotation_of(node)
    spec: object = annotation.output_qspec if annotation else None
    seen: set[object] = set()
    while isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node not in seen:
        seen.add(spec.edge_or_node)
        spec = _spec_at(spec.edge_or_node)
    return spec if isinstance(spec, QuantizationSpec) else None


def _spec_at(place: Place) -> object:
    annotation = annotation_of(place[1] if isinstance(place, tuple) else place)
    if annotation is None:
        return None
    return annotation.input_qspec_map.get(place[0]) if isinstance(place, tuple) else annotation.output_qspec


def matches(spec: QuantizationSpec, scheme: Scheme) -> bool:
    """Tell whether a foreign spec describes the same integers as one of our schemes."""
    mine = (scheme.dtype, scheme.quant_min, scheme.quant_max, scheme.qscheme, False)
    return (spec.dtype, spec.quant_min, spec.quant_max, spec.qscheme, spec.is_dynamic) == mine


def reconcile(model: GraphModule, ours: set[Node], fresh: Callable[[Node], QuantizationSpec]) -> None:
    """Tie what another quantizer annotated after us to our tensors, on the page.

    Args:
        model: the annotated graph.
        ours: the nodes that we annotated, or found annotated.
        fresh: makes the spec of a new group of its own, for a node that ties several tensors together.
    """
    for node in model.graph.nodes:
        annotation = annotation_of(node)
        if annotation is None or node in ours or not _touches(node, annotation, ours):
            continue
        inputs = annotation.input_qspec_map
        if len([spec for spec in inputs.values() if spec is not None]) > 1 and _is_tied(annotation):
            _tie_apart(node, annotation, fresh(node))
            continue
        annotation.allow_implicit_sharing = False
        for value, spec in list(inputs.items()):
            mine = foreign_spec(value)
            if isinstance(spec, QuantizationSpec) and mine is not None and _same_integers(spec, mine):
                inputs[value] = SharedQuantizationSpec(value)


def _touches(node: Node, annotation: QuantizationAnnotation, ours: set[Node]) -> bool:
    """Tell whether the node reads, or refers to, a tensor of ours."""
    targets = [s.edge_or_node for s in _specs(annotation) if isinstance(s, SharedQuantizationSpec)]
    ends = [target[1] if isinstance(target, tuple) else target for target in targets]
    return any(value in ours for value in [*annotation.input_qspec_map, *ends] if value is not node)


def _specs(annotation: QuantizationAnnotation) -> list[object]:
    return [*annotation.input_qspec_map.values(), annotation.output_qspec]


def _is_tied(annotation: QuantizationAnnotation) -> bool:
    return any(isinstance(spec, SharedQuantizationSpec) for spec in annotation.input_qspec_map.values())


def _tie_apart(node: Node, annotation: QuantizationAnnotation, spec: QuantizationSpec) -> None:
    """Give a node that ties its tensors together a group of its own: its operands are requantized at their edges."""
    annotation.allow_implicit_sharing = False
    values = [value for value, old in annotation.input_qspec_map.items() if old is not None]
    annotation.input_qspec_map[values[0]] = spec
    shared = SharedQuantizationSpec((values[0], node))
    for value in values[1:]:
        annotation.input_qspec_map[value] = shared
    if annotation.output_qspec is not None:
        annotation.output_qspec = shared


def _same_integers(spec: QuantizationSpec, mine: QuantizationSpec) -> bool:
    fields = ("dtype", "quant_min", "quant_max", "qscheme", "is_dynamic")
    return all(getattr(spec, field) == getattr(mine, field) for field in fields)
