"""The record of an annotated graph, kept in the graph's `meta`: so that a prepared or converted model can be asked."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    from .quantizer import BackendQuantizer, Record

_KEY: Final = "quantmark_record"


class Kept(NamedTuple):
    """A record, with the name of the global config then ("" for none) and the quantizer that made it."""

    backend: str
    record: Record
    quantizer: BackendQuantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        """Copy what decides along with the graph, so that a copied model tells of what it saw itself."""
        components = copy.deepcopy(self.record.components, memo)
        return self._replace(record=replace(self.record, components=components))

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Leave the record behind when pickled: it holds nodes of the graph, which are none outside it."""
        return _nothing, ()


def _nothing() -> None:
    """Stand for a record that was left behind."""


def keep(model: GraphModule, quantizer: BackendQuantizer) -> None:
    """Keep the record of a graph that was just annotated; `prepare_pt2e` and `convert_pt2e` hand it on.

    Of several quantizers, the last that quantized anything is kept.
    """
    if quantizer.record.account.plan.cells or kept(model) is None:
        name = quantizer.config.name if quantizer.config else ""
        model.meta[_KEY] = Kept(name, quantizer.record, quantizer)


def kept(model: GraphModule) -> Kept | None:
    """Return what was kept of the annotation of a graph; None if there is no such thing."""
    found = model.meta.get(_KEY)
    return found if isinstance(found, Kept) else None
