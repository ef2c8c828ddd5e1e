"""The record of an annotated graph, kept in the graph's `meta`: so that a prepared or converted model can be asked."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from .quantizer import BackendQuantizer, Record

_KEY: Final = "quantmark_record"


class Kept:
    """A record, with the quantizer that made it and the name of the global config then ("" for none)."""

    def __init__(self, backend: str, record: Record | None = None, quantizer: BackendQuantizer | None = None) -> None:
        self.backend = backend
        self.record = record
        self.quantizer = quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        """Copy what decides along with the graph, so that a copied model tells of what it saw itself."""
        if self.record is None:
            return self
        components = copy.deepcopy(self.record.components, memo)
        return Kept(self.backend, replace(self.record, components=components), self.quantizer)

    def __reduce__(self) -> tuple[type[Kept], tuple[str]]:
        """Leave the record behind when pickled: it holds nodes of the graph, which are none outside it."""
        return Kept, (self.backend,)


def keep(model: GraphModule, quantizer: BackendQuantizer) -> None:
    """Keep the record of a graph that was just annotated; `prepare_pt2e` and `convert_pt2e` hand it on.

    Of several quantizers, the last that quantized anything is kept.
    """
    if quantizer.record.account.plan.cells or kept(model) is None:
        name = quantizer.config.name if quantizer.config else ""
        model.meta[_KEY] = Kept(name, quantizer.record, quantizer)


def kept(model: GraphModule) -> Kept | None:
    """Return what was kept of the annotation of a graph, with a record; None if there is no such thing."""
    found = model.meta.get(_KEY)
    return found if isinstance(found, Kept) and found.record is not None else None
