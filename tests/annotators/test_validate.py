"""Annotations that can't work, planted one by one: a named error instead of what torchao stumbles over."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    ComposableQuantizer,
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

from quantmark import AnnotationError, BackendQuantizer, SharingConflictError, configs, observe_ranges
from quantmark.annotators.neighbours import annotation_of
from quantmark.observers.qparams import INT8_SYMMETRIC
from quantmark.observers.qparams import INT16_SYMMETRIC as INT16
from quantmark.observers.rules import Outcome
from support.flow import calls, export, is_quantize, minmax_config, outputs, pair_of, quantize

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
CONFIG = minmax_config()
Plant = Callable[[GraphModule], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.a(x))
        return torch.cat([y, self.b(x)], 1).sigmoid(), y.tanh()


SPEC = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_tensor_affine,
    observer_or_fake_quant_ctr=MinMaxObserver,
)


def node(graph: GraphModule, name: str) -> Node:
    found: Node = next(n for n in graph.graph.nodes if n.name == name)
    return found


def annotate(graph: GraphModule, name: str, output: Any, **inputs: Any) -> None:
    """Annotate a node as another quantizer would."""
    specs = {node(graph, value): spec for value, spec in inputs.items()}
    node(graph, name).meta["quantization_annotation"] = QuantizationAnnotation(
        input_qspec_map=specs, output_qspec=output, _annotated=True
    )


def shared(graph: GraphModule, *names: str) -> SharedQuantizationSpec:
    nodes = [node(graph, name) for name in names]
    return SharedQuantizationSpec(nodes[0] if len(nodes) == 1 else (nodes[0], nodes[1]))


def gone(graph: GraphModule) -> SharedQuantizationSpec:
    """A share with a node that was erased since."""
    with graph.graph.inserting_before(node(graph, "sigmoid")):
        lost = graph.graph.call_function(torch.ops.aten.neg.default, (node(graph, "cat"),))
    graph.graph.erase_node(lost)
    return SharedQuantizationSpec(lost)


def circle(graph: GraphModule) -> None:
    annotate(graph, "tanh", shared(graph, "sigmoid"), relu=shared(graph, "tanh"))
    annotate(graph, "sigmoid", shared(graph, "relu", "tanh"))


def _derive(_: object) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


BROKEN: dict[str, tuple[Plant, str]] = {
    "a node that is not annotated": (
        lambda g: annotate(g, "tanh", shared(g, "x")),
        r"tanh \(tanh\): its annotation shares qparams with x \(placeholder\), which is not annotated",
    ),
    "an edge that is not there": (
        lambda g: annotate(g, "tanh", shared(g, "x", "tanh")),
        r"tanh \(tanh\): its annotation shares qparams with the edge from x to tanh \(tanh\), which is not",
    ),
    "a node that is gone": (
        lambda g: annotate(g, "tanh", gone(g)),
        r"shares qparams with neg_default \(neg\), but neg_default is not in the graph; annotate what it refers to",
    ),
    "a circle": (circle, r"shares qparams in a circle, .* -> .* -> .*: none of them holds a concrete"),
    "itself": (lambda g: annotate(g, "tanh", shared(g, "tanh")), r"in a circle, tanh \(tanh\) -> tanh \(tanh\)"),
    "derived from what is not there": (
        lambda g: annotate(
            g,
            "tanh",
            DerivedQuantizationSpec(derived_from=[node(g, "x")], derive_qparams_fn=_derive, dtype=torch.int32),
        ),
        r"tanh \(tanh\): its annotation derives its qparams from x \(placeholder\), which is not annotated",
    ),
}


class Foreign(Quantizer):
    """Another quantizer, which plants what it is given."""

    def __init__(self, plant: Plant) -> None:
        super().__init__()
        self.plant = plant

    def annotate(self, model: GraphModule) -> GraphModule:
        self.plant(model)
        return model

    def validate(self, model: GraphModule) -> None: ...


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("how", ["composed", "rest", "alone"])
def test_a_broken_annotation_of_another_quantizer(kind: str, how: str) -> None:
    plant, message = BROKEN[kind]
    quantizer: Quantizer = BackendQuantizer(CONFIG)
    if how == "composed":
        quantizer = ComposableQuantizer([Foreign(plant), BackendQuantizer(CONFIG)])
    elif how == "rest":  # after us, in the place that a config has for it
        ours = BackendQuantizer(replace(CONFIG, rest=Foreign(plant)))
        quantizer = ours.set_operator_type(torch.ops.aten.tanh, None).set_operator_type(torch.ops.aten.sigmoid, None)
    graph = export(Net().eval(), (X,))
    if how == "alone":
        plant(graph)
    with pytest.raises(AnnotationError, match=message):
        prepare_pt2e(graph, quantizer)


def annotated(config: Any = CONFIG) -> tuple[BackendQuantizer, GraphModule]:
    """A good annotated graph, and the quantizer that annotated it."""
    quantizer, graph = BackendQuantizer(config), export(Net().eval(), (X,))
    quantizer.validate(quantizer.annotate(quantizer.transform_for_annotation(graph)))
    return quantizer, graph


@pytest.mark.parametrize(
    "config", [CONFIG, configs.xnnpack(), configs.cadence(), configs.xnnpack(activation="sym8"), minmax_config(INT16)]
)
def test_what_we_annotate_is_in_order(config: Any) -> None:
    quantizer, graph = annotated(config)
    assert quantizer.validate(graph) is None  # type: ignore[func-returns-value]


def test_an_annotation_without_kernels() -> None:
    """An int16 activation among XNNPACK's, which is what an illegal outcome comes to."""
    quantizer, graph = annotated(configs.xnnpack())
    found = annotation_of(node(graph, "relu"))
    assert found is not None
    found.output_qspec = replace(found.output_qspec, dtype=torch.int16, quant_min=-32768, quant_max=32767)  # type: ignore[type-var]
    with pytest.raises(AnnotationError, match=r"relu \(relu\): annotated as torch.int16, for which xnnpack has no ker"):
        quantizer.validate(graph)
    annotate(graph, "relu", replace(SPEC, dtype=torch.int16, quant_min=-32768, quant_max=32767))
    quantizer.validate(graph)  # another quantizer may annotate for another backend


def test_a_decision_that_is_not_legal() -> None:
    model = Net().eval()
    table = observe_ranges(torch.export.export(model, (X,)), [X])
    quantizer, graph = BackendQuantizer(CONFIG, table), export(model, (X,))
    quantizer.annotate(quantizer.transform_for_annotation(graph))
    quantizer.validate(graph)
    assert quantizer.record.settled
    planted = tuple(replace(decision, outcome=Outcome.WIDE_ROOT) for decision in quantizer.record.settled)
    quantizer.record.settled = planted
    with pytest.raises(AnnotationError, match=r"decided as wide_root, which is not legal here .legal: float"):
        quantizer.validate(graph)


def test_a_contract_that_its_scheme_can_not_hold() -> None:
    quantizer, graph = annotated()
    for component in quantizer.record.components:
        cells = component.plan.cells
        changed = {n: c._replace(scheme=INT8_SYMMETRIC) for n, c in cells.items() if c.contract.is_bounded}
        component.plan = component.plan._replace(cells={**cells, **changed})
    with pytest.raises(SharingConflictError, match=r"relu \(relu.*no qparams of its scheme .* saturate there"):
        quantizer.validate(graph)


@pytest.mark.parametrize("how", ["cat", "edge"])
def test_a_tensor_with_negative_values_that_shares_with_a_fused_relu(how: str) -> None:
    """Another quantizer shares our relu's qparams with its own op, which they would clamp at 0."""

    def plant(graph: GraphModule) -> None:
        if how == "cat":
            annotate(graph, "cat", shared(graph, "relu"), relu=shared(graph, "relu"), conv2d_1=shared(graph, "relu"))
        else:
            annotate(graph, "cat", SPEC, conv2d_1=shared(graph, "relu"))

    quantizer = ComposableQuantizer([Foreign(plant), BackendQuantizer(CONFIG)])
    with pytest.raises(SharingConflictError, match=r"shares the qparams of relu \(relu\), whose saturation stands for"):
        prepare_pt2e(export(Net().eval(), (X,)), quantizer)


def test_a_tensor_within_the_bounds_may_share() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            y = torch.relu(self.a(x))
            return nn.functional.max_pool2d(y, 2), torch.clamp(y, 0.0, 1.0)

    def plant(graph: GraphModule) -> None:
        annotate(graph, "max_pool2d", shared(graph, "relu"), relu=shared(graph, "relu"))
        annotate(graph, "clamp", shared(graph, "relu"), relu=shared(graph, "relu"))

    quantizer = ComposableQuantizer([Foreign(plant), BackendQuantizer(CONFIG)])
    converted = quantize(Pooled().eval(), (X,), quantizer).converted
    pooled, clamped = outputs(converted)
    (relu,) = calls(converted, "relu")
    fused = next(user for user in relu.users if is_quantize(user))
    assert pair_of(pooled) == pair_of(clamped) == pair_of(fused)


@pytest.mark.parametrize("bounds", [(0.0, 0.0), (0.0, 1e-9), (-1e-9, 3.0), (0.5, 1.0), (-2.0, -1.0), (0.0, 1e12)])
@pytest.mark.parametrize("config", [configs.xnnpack(eps=1e-2), configs.cadence(), minmax_config(INT16), CONFIG])
def test_odd_bounds_are_no_fault_of_the_annotation(bounds: tuple[float, float], config: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            return self.a(x).clamp(*bounds) + x

    quantizer, graph = BackendQuantizer(config), export(Odd().eval(), (X,))
    quantizer.validate(quantizer.annotate(quantizer.transform_for_annotation(graph)))


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = x.sigmoid() + x
        return x


def test_it_is_linear() -> None:
    """Each node is looked at a fixed number of times: eight times the nodes, eight times the time, not 64 times."""

    def seconds(depth: int) -> float:
        quantizer, graph = BackendQuantizer(CONFIG), export(Deep(depth), (X,))
        quantizer.annotate(quantizer.transform_for_annotation(graph))
        return min(timeit.repeat(lambda: quantizer.validate(graph), number=1, repeat=5))

    assert seconds(400) < 20 * seconds(50)
