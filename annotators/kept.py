"""The record of an annotated graph, kept in the graph's `meta`: so that a prepared or converted model can be asked."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from .quantizer import Record

_KEY: Final = "quantmark_record"


class Kept:
    """A record, and the name of the global config that it was made under ("" for none)."""

    def __init__(self, backend: str, record: Record | None = None) -> None:
        self.backend = backend
        self.record = record

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        """Copy what decides along with the graph, so that a copied model tells of what it saw itself."""
        if self.record is None:
            return self
        return Kept(self.backend, replace(self.record, components=copy.deepcopy(self.record.components, memo)))

    def __reduce__(self) -> tuple[type[Kept], tuple[str]]:
        """Leave the record behind when pickled: it holds nodes of the graph, which are none outside it."""
        return Kept, (self.backend,)


def keep(model: GraphModule, backend: str, record: Record) -> None:
    """Keep the record of a graph that was just annotated; `prepare_pt2e` and `convert_pt2e` hand it on.

    Of several quantizers, the last that quantized anything is kept.
    """
    if not record.account.plan.cells and kept(model) is not None:
        return
    model.meta[_KEY] = Kept(backend, record)


def kept(model: GraphModule) -> tuple[str, Record] | None:
    """Return the config's name and the record of a graph that was annotated, or None."""
    found = model.meta.get(_KEY)
    return (found.backend, found.record) if isinstance(found, Kept) and found.record is not None else None
