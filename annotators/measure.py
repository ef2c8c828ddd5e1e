"""Measure a float model's ranges once, for a `RangeTable`: the ranges-first road."""

from __future__ import annotations

import copy
from functools import partial, reduce
from typing import TYPE_CHECKING, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e.observer import ObserverBase
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from ..observers.errors import InputError, NonFiniteError
from ..observers.estimators import HistogramEstimator, MinMaxEstimator
from ..observers.fields import got, require
from ..observers.observer import PerChannelBiasObserver, PerChannelRangeObserver, RangeObserver
from ..observers.table import Entry, RangeTable
from .batches import as_batches, checked, graph_inputs, is_exported
from .folding import part_norms
from .graph import constant_tensor, is_float_tensor, where
from .kept import kept
from .transform import SpelledAs
from .writer import ObserverFactory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.fx import Node


def observe_ranges(
    model: ExportedProgram | GraphModule,
    batches: Iterable[Sequence[Tensor] | Tensor],
    *,
    estimator: Literal["minmax", "histogram"] = "histogram",
    quantizer: Quantizer | None = None,
) -> RangeTable:
    """Run a float model over calibration batches and return the range of every float tensor in it.

    Batch norms are folded first, as `prepare_pt2e` does, so that the names and ranges are those that the quantizer
    will ask for. The model is left untouched.

    Args:
        model: what `torch.export.export` returned, or its `.module()`.
        batches: tensors, or sequences of the model's positional arguments.
        estimator: "histogram" also keeps each tensor's histogram; "minmax" its range alone.
        quantizer: the quantizer that the table is for, where it takes ops apart before it annotates them (Arm's
            configs: softmax, means, norms): the table then has the parts too.

    Raises:
        InputError: if the model is not exported, there are no batches, or one does not fit the model.
        NonFiniteError: if a tensor held NaN or infinity; names the node.
    """
    given: object = model
    if not (isinstance(given, ExportedProgram) or (isinstance(given, GraphModule) and is_exported(given))):
        raise InputError(
            "observe_ranges takes an exported model: pass torch.export.export(model, inputs), or its .module(); "
            f"{got(model)}"
        )
    require(estimator in ("histogram", "minmax"), 'observe_ranges takes estimator="histogram" or "minmax"', estimator)
    require(
        quantizer is None or isinstance(quantizer, Quantizer),
        "observe_ranges takes a quantizer, as BackendQuantizer(config) makes one",
        quantizer,
    )
    graph = copy.deepcopy(model.module() if isinstance(model, ExportedProgram) else model)
    part_norms(graph)
    recorder = _Recorder(HistogramEstimator if estimator == "histogram" else MinMaxEstimator, quantizer)
    prepared = prepare_pt2e(graph, recorder)
    count = 0
    with torch.no_grad():
        for batch in checked(as_batches(batches), graph_inputs(prepared), finite=False):
            prepared(*batch)
            count += 1
    if not count:
        raise InputError("observe_ranges got no batches")
    entries: dict[str, Entry] = {}
    for name, (node_where, observer) in recorder.observers.items():
        if int(observer.estimator.nonfinite_batches):
            raise NonFiniteError(
                f"{node_where}: {int(observer.estimator.nonfinite_batches)} batch(es) held NaN or infinity"
            )
        entry = Entry.of(observer.estimator)
        if entry is not None:
            entries[name] = entry
    return RangeTable(entries)


def fill_ranges(prepared: GraphModule, table: RangeTable) -> int:
    """Fill the observers of a prepared model from a table, instead of calibrating it; return how many were filled.

    A table says nothing of what happens in the graphs of cond, scan and while_loop: observers there need batches.

    Raises:
        InputError: if the model is no graph module, or the table none.
        MissingRangeError: if the table lacks a tensor that an observer watches, or names one that the model never had.
    """
    require(isinstance(prepared, GraphModule), "fill_ranges takes what prepare_pt2e returned", prepared)
    require(isinstance(table, RangeTable), "fill_ranges takes a RangeTable (see observe_ranges)", table)
    constants = {n.name: c for n in prepared.graph.nodes if (c := constant_tensor(prepared, n)) is not None}
    kinds = (PerChannelRangeObserver, PerChannelBiasObserver)
    outer = [child for child in prepared.children() if not isinstance(child, GraphModule)]
    modules = (module for child in outer for module in child.modules())  # a fake-quantize holds its observer
    observers = [m for m in modules if isinstance(m, RangeObserver) and not isinstance(m, kinds)]
    # A constant was shown to its observer when that was made.
    observers = [observer for observer in observers if not set(observer.cell.values) <= set(constants)]
    names = dict.fromkeys(v for observer in observers for v in observer.cell.values if v not in constants)
    table.require(names, _known_names(prepared) or table)
    for observer in observers:
        entry = cell_entry(observer.cell.values, table, constants)
        observer.fill(entry.estimator() if entry else MinMaxEstimator())
    return len(observers)


def _known_names(prepared: GraphModule) -> set[str]:
    """Return the nodes that a prepared model has, or had before it was annotated or trained; none if not known."""
    found = kept(prepared)
    if found is None:
        return set()
    annotated = {op.node for op in found.record.account.ops}
    return {*found.record.gone, *annotated, *(node.name for node in prepared.graph.nodes)}


def read_ranges(prepared: GraphModule) -> RangeTable:
    """Return what the observers of a calibrated model saw; a tensor that shares one with others has their range."""
    kinds = (PerChannelRangeObserver, PerChannelBiasObserver)
    observers = [m for m in prepared.children() if isinstance(m, RangeObserver) and not isinstance(m, kinds)]
    entries: dict[str, Entry] = {}
    for observer in sorted(observers, key=lambda observer: -len(observer.cell.values)):  # the narrowest cell last
        entry = Entry.of(observer.estimator)
        if entry is not None:
            entries |= dict.fromkeys(observer.cell.values, entry)
    return RangeTable(entries)


def cell_entry(values: Sequence[str], table: RangeTable, constants: Mapping[str, Tensor]) -> Entry | None:
    """Return what an observer of all the named tensors would have seen: the table's entries, constants as they are.

    Returns None if that is nothing at all.
    """
    measured = [table[value] for value in values if value not in constants]
    plain = not measured or any(entry.histogram is None for entry in measured)
    shown = [_entry_of(constants[value], plain=plain) for value in values if value in constants]
    entries = [*measured, *(entry for entry in shown if entry is not None)]
    return reduce(Entry.merge, entries) if entries else None


def _entry_of(constant: Tensor, *, plain: bool) -> Entry | None:
    estimator = MinMaxEstimator() if plain else HistogramEstimator()
    if constant.numel() and constant.is_floating_point():
        estimator.update(constant.detach())
    return Entry.of(estimator)


class _TensorObserver(ObserverBase):
    """Records one node's tensor; never asked for qparams."""

    def __init__(self, estimator: MinMaxEstimator, **_: object) -> None:
        super().__init__(dtype=torch.int8)
        self.estimator = estimator

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            self.estimator.update(x.detach())
        return x

    def calculate_qparams(self, **kwargs: object) -> None:
        raise NotImplementedError


class _Recorder(SpelledAs):
    """Puts an observer of its own on every float tensor."""

    def __init__(self, make: type[MinMaxEstimator], quantizer: Quantizer | None) -> None:
        super().__init__(quantizer)
        self.make = make
        self.observers: dict[str, tuple[str, _TensorObserver]] = {}

    def annotate(self, model: GraphModule) -> GraphModule:
        if self.observers:  # the body of a loop, which torchao comes to later: its names are not the graph's
            return model
        for node in model.graph.nodes:
            if node.op in {"call_function", "placeholder"} and is_float_tensor(node):
                spec = QuantizationSpec(
                    dtype=torch.int8,
                    observer_or_fake_quant_ctr=ObserverFactory("_TensorObserver", partial(self._build, node)),  # type: ignore[arg-type]  # duck-typed
                )
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                    output_qspec=spec, allow_implicit_sharing=False, _annotated=True
                )
        return model

    def _build(self, node: Node, **_: object) -> nn.Module:
        observer = _TensorObserver(self.make())
        self.observers[node.name] = (where(node), observer)
        return observer
