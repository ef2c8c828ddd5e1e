"""The one place where cells become torchao annotations, in `node.meta`.

The first place of a cell in graph order holds the concrete spec, every other place refers to it: a star, so no
chain can be long and no cycle can arise. Implicit sharing is switched off: all sharing is on the page.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch.fx import Node
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from ..observers.estimators import HistogramEstimator, MinMaxEstimator, MovingAverageEstimator, PercentileEstimator
from ..observers.observer import Component
from ..observers.plan import Cell, Plan
from ..observers.ranges import UNBOUNDED
from .conversion import (
    PlannedFakeQuantize,
    PlannedObserver,
    PlannedPerChannelBias,
    PlannedPerChannelFakeQuantize,
    PlannedPerChannelObserver,
)
from .folding import order_in_training
from .graph import constant_tensor, is_constant, matters, where

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torchao.quantization.pt2e.quantizer import QuantizationSpecBase

    from ..configs.base import ActivationConfig, BackendConfig
    from ..observers.estimators import Estimator
    from ..observers.observer import RangeObserver
    from ..observers.qparams import Scheme
    from .draft import Draft, Place, Weight


# torchao unites specs that look alike at one tensor, ch_axis included, which means nothing per tensor: with an axis
# that no other spec has, a cell is never drawn into another quantizer's group (see neighbours.py).
_APART = 1 << 16


class ObserverFactory:
    """What torchao calls to make the observer (or fake-quantize) of a cell.

    torchao copies specs deeply for each observer that it makes; the factory is immutable and answers with itself,
    so that all observers of a component meet in the same component.
    """

    __slots__ = ("__name__", "_args", "_build")

    def __init__(self, name: str, build: Callable[..., nn.Module], *args: object) -> None:
        self.__name__ = name  # torchao passes ch_axis only where this holds "PerChannel"
        self._build = build
        self._args = args

    def with_args(self, **kwargs: object) -> Callable[[], nn.Module]:
        """Return a constructor with the spec's fields bound, as torchao's own observers have it."""
        return partial(self._build, *self._args, **kwargs)

    def __call__(self, **kwargs: object) -> nn.Module:
        """Make the observer."""
        return self._build(*self._args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> ObserverFactory:
        """Return the factory itself: it holds no state of its own."""
        return self


class PlannedSpec(QuantizationSpec):
    """torchao's spec of a cell, made in half the time: a frozen dataclass sets its fields one by one.

    What its constructor checks, `Scheme` has checked.
    """

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


def write(draft: Draft, plan: Plan, presets: dict[str, Estimator] | None = None) -> list[Component]:
    """Write the annotations of a draft, and return the components that will decide.

    `presets` are estimators that have seen the data already: the observers take over from them and need no batches.
    """
    specs = _Specs(draft, plan, presets or {})
    (outputs, reads), shared = draft.places, specs.shared
    in_training = any(sketch.config.is_qat for sketch in draft.cells.values())
    for node in order_in_training(draft.model) if in_training else draft.model.graph.nodes:
        edges, cell = reads.get(node), outputs.get(node)
        if edges is None and cell is None:
            continue
        inputs: dict[Node, QuantizationSpecBase | None] = {}
        written = ""  # a cell that the node's annotation speaks of
        for value, read in edges.items() if edges else ():
            if (spec := shared.get(read) or specs.at((value, node), read)) is not None:
                inputs[value], written = spec, written or read
        output = None
        if cell is not None and (output := specs.at(node, cell)) is not None:
            written = cell
        if written:
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                input_qspec_map=inputs, output_qspec=output, allow_implicit_sharing=False, _annotated=True
            )
            claim(node, draft.cells[written].config.marker)
    return specs.components


def fresh_spec(node: Node, config: BackendConfig) -> QuantizationSpec:
    """Return the spec of a group of its own for the tensors of one node, with nothing to decide."""
    scheme = config.activation.scheme
    cell = Cell(name=f"{node.name}+", where=where(node), scheme=scheme)
    component = Component(Plan(cells={cell.name: cell}), config.on_uncalibrated)
    kind = PlannedFakeQuantize if config.is_qat else PlannedObserver

    def build(**kwargs: object) -> nn.Module:
        return kind.planned(component, cell.name, make_estimator(config.activation), None, **kwargs)

    return _spec(scheme, ObserverFactory(kind.__name__, build))


def _spec(
    scheme: Scheme, factory: ObserverFactory, axis: int | None = None, *, per_channel: bool = False
) -> QuantizationSpec:
    """Return torchao's spec for a tensor of the scheme."""
    return PlannedSpec(
        dtype=scheme.dtype,
        quant_min=scheme.quant_min,
        quant_max=scheme.quant_max,
        qscheme=scheme.channel_qscheme if per_channel else scheme.qscheme,
        ch_axis=axis,
        observer_or_fake_quant_ctr=factory,
    )


def claim(node: Node, marker: str | None = None) -> None:
    """Mark the node as taken for quantizers that don't look at annotations (executorch 1.5.1: Arm, Cortex-M).

    `marker` is the key by which the backend's partitioner knows a quantized node; it survives export and lowering.
    """
    node.meta["quantizer_matched"] = True
    if marker:
        node.meta["custom"] = {**node.meta.get("custom", {}), marker: {"quantized": True}}


def mark_inside(nodes: Mapping[Node, str | None]) -> None:
    """Mark the inner nodes of blocks as annotated, so that no later quantizer claims them; the values are markers."""
    for node, marker in nodes.items():
        if Q_ANNOTATION_KEY not in node.meta:
            claim(node, marker)
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(allow_implicit_sharing=False, _annotated=True)


class _Specs:
    """The spec of each place, made as the writer comes to it."""

    def __init__(self, draft: Draft, plan: Plan, presets: dict[str, Estimator]) -> None:
        self.draft = draft
        self.presets = presets
        self.cells = plan.cells
        self.anchors: dict[str, Place] = {}
        self.shared: dict[str, SharedQuantizationSpec] = {}
        # Cells whose contract could be broken by a reader that another quantizer annotates after us.
        bounded = {
            name for name, cell in self.cells.items() if cell.contract is not UNBOUNDED and cell.contract.is_bounded
        }
        self.apart = {cell for node, cell in draft.outputs.items() if cell in bounded and self._is_read_otherwise(node)}
        registry: list[RangeObserver] = []
        self.components = []
        self.component_of: dict[str, Component] = {}
        for part in plan.components():
            first = next(iter(part.cells))
            component = Component(part, draft.cells[first].config.on_uncalibrated, registry)
            self.components.append(component)
            self.component_of |= dict.fromkeys(part.cells, component)

    def at(self, place: Place, cell: str) -> QuantizationSpecBase | None:
        if (shared := self.shared.get(cell)) is not None:
            return shared
        if (anchor := self.anchors.get(cell)) is not None:
            shared = self.shared[cell] = SharedQuantizationSpec(anchor)
            return shared
        if cell in self.draft.foreign:
            return None if place is self.draft.foreign[cell] else SharedQuantizationSpec(self.draft.foreign[cell])
        if cell not in self.cells:
            return None
        self.anchors[cell] = place
        if cell in self.draft.biases:
            return self._bias(cell)
        weight = self.draft.weights.get(cell)
        return self._weight(cell, weight) if weight else self._activation(cell)

    def _activation(self, cell: str) -> QuantizationSpec:
        planned = self.cells[cell]
        kind = PlannedFakeQuantize if self.draft.cells[cell].config.is_qat else PlannedObserver
        factory = ObserverFactory(kind.__name__, self._observe, cell, kind)
        return _spec(planned.scheme, factory, _APART if cell in self.apart else None)

    def _observe(self, cell: str, kind: type[PlannedObserver | PlannedFakeQuantize], **kwargs: object) -> nn.Module:
        constant = self._is_constant(cell)
        estimator = MinMaxEstimator() if constant else make_estimator(self.draft.cells[cell].config.activation)
        observer = kind.planned(self.component_of[cell], cell, estimator, self.presets.get(cell), **kwargs)
        return self._shown_constant(observer, cell) if constant else observer

    def _shown_constant(self, observer: nn.Module, cell: str) -> nn.Module:
        """Show a constant to its observer at once: calibration has nothing to add, in training it moves."""
        place = self.anchors[cell]
        if isinstance(place, tuple) and not self.draft.cells[cell].config.is_qat:
            value = constant_tensor(self.draft.model, place[0])
            if value is not None:
                observer(value)
        return observer

    def _is_read_otherwise(self, value: Node) -> bool:
        reads = self.draft.reads
        others = (user for user in value.users if value not in reads.get(user, ()))
        return any(user.op == "call_function" and matters(user) for user in others)

    def _is_constant(self, cell: str) -> bool:
        place = self.anchors[cell]
        return isinstance(place, tuple) and is_constant(place[0])

    def _weight(self, cell: str, weight: Weight) -> QuantizationSpec:
        config, component = weight.config, self.component_of[cell]
        if weight.channel_axis is None:
            flat = PlannedFakeQuantize if config.is_qat else PlannedObserver

            def build(**kwargs: object) -> nn.Module:
                return self._shown_constant(flat.planned(component, cell, MinMaxEstimator(), None, **kwargs), cell)

            name = flat.__name__
        else:
            channelwise = PlannedPerChannelFakeQuantize if config.is_qat else PlannedPerChannelObserver

            def build(**kwargs: object) -> nn.Module:
                observer = channelwise.planned(component, cell, weight.channels, search=config.weight.search, **kwargs)
                return self._shown_constant(observer, cell)

            name = channelwise.__name__
        axis = weight.channel_axis
        return _spec(self.cells[cell].scheme, ObserverFactory(name, build), axis, per_channel=axis is not None)

    def _bias(self, cell: str) -> QuantizationSpec:
        bias, component = self.draft.biases[cell], self.component_of[cell]

        def build(**kwargs: object) -> nn.Module:
            return self._shown_constant(PlannedPerChannelBias.planned(component, cell, bias, **kwargs), cell)

        factory = ObserverFactory(PlannedPerChannelBias.__name__, build)
        return _spec(self.cells[cell].scheme, factory, 0, per_channel=bias.channels is not None)


def make_estimator(activation: ActivationConfig) -> Estimator:
    """Return a new estimator as the config names it."""
    if activation.estimator == "moving_average":
        return MovingAverageEstimator(activation.averaging_constant)
    if activation.estimator == "percentile":
        return PercentileEstimator(activation.percent)
    return HistogramEstimator() if activation.estimator == "histogram" else MinMaxEstimator()
