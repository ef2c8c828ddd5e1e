"""What is written on the graph: one concrete spec a cell, everything else refers to it, nothing is implied."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationSpec, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantmark.annotators.quantizer import BackendQuantizer
from support.flow import calls, export, minmax_config, observers, quantize, sqnr_db

CONFIG = minmax_config()


class Net(nn.Module):
    """A block that several ops read, an op that reads one tensor twice, movement, and a join."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x).relu()
        z = torch.cat([self.second(y).view(3, 6), y, y])
        return z.t(), y * y, self.second(x) + y


def inputs() -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(3, 6),)


def annotated() -> GraphModule:
    graph = export(Net().eval(), inputs())
    quantizer = BackendQuantizer(CONFIG)
    quantizer.annotate(quantizer.transform_for_annotation(graph))
    return graph


def specs(graph: GraphModule) -> list[tuple[Node | tuple[Node, Node], Any]]:
    """Every annotated place with its spec, in the order in which torchao reads them."""
    found: list[tuple[Node | tuple[Node, Node], Any]] = []
    for node in graph.graph.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is not None:
            found += [((value, node), spec) for value, spec in annotation.input_qspec_map.items()]
            found += [(node, annotation.output_qspec)] if annotation.output_qspec is not None else []
    return found


def test_a_shared_place_refers_to_a_concrete_one_that_stands_before_it() -> None:
    concrete = []
    for place, spec in specs(annotated()):
        if isinstance(spec, SharedQuantizationSpec):
            assert spec.edge_or_node in concrete, place
        else:
            assert isinstance(spec, QuantizationSpec)
            concrete.append(place)
    assert concrete


def test_nothing_is_shared_that_the_page_does_not_say() -> None:
    annotations = [n.meta[Q_ANNOTATION_KEY] for n in annotated().graph.nodes if Q_ANNOTATION_KEY in n.meta]
    assert annotations
    assert not any(a.allow_implicit_sharing for a in annotations)


def test_the_inside_of_a_block_is_taken_but_not_observed() -> None:
    first, *_ = calls(annotated(), "linear")
    annotation = first.meta[Q_ANNOTATION_KEY]
    assert annotation._annotated
    assert annotation.output_qspec is None
    assert {value.name for value in annotation.input_qspec_map} == {"x", "first_weight"}


def test_every_concrete_spec_has_one_observer_and_a_place_no_two() -> None:
    concrete = [place for place, spec in specs(annotated()) if isinstance(spec, QuantizationSpec)]
    prepared = quantize(Net().eval(), inputs(), CONFIG, keep=True).prepared
    modules = {id(prepared.get_submodule(str(n.target))) for n in observers(prepared)}
    assert len(modules) == len(concrete)
    seen = Counter((n.args[0], id(prepared.get_submodule(str(n.target)))) for n in observers(prepared))
    assert max(seen.values()) == 1


def test_weights_are_observed_before_the_first_batch() -> None:
    flow = quantize(Net().eval(), inputs(), CONFIG, batches=[inputs()], keep=True)
    weights: list[Any] = [m for m in flow.prepared.modules() if hasattr(m, "ch_axis")]
    assert len(weights) == 3  # one for each op that reads it
    assert all(torch.isfinite(w.channel_min).all() for w in weights)


class Deep(nn.Module):
    """Hundreds of residual blocks in a row, and a tensor that all of them read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        skip = y = self.linear(x)
        for step in range(300):
            y = (y + skip).relu() if step % 3 else y.t().contiguous().t()
        return torch.div(y, 200)


def test_a_deep_graph_needs_no_deep_stack() -> None:
    flow = quantize(Deep().eval(), inputs(), CONFIG)
    with torch.no_grad():
        assert sqnr_db(Deep().eval()(*inputs()), flow.converted(*inputs())) > 20
