"""What a kind of check is: its codes and the function that finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .findings import Finding
    from .qdq import Facts


@dataclass(frozen=True)
class Kind:
    """One kind of check.

    Args:
        name: what is checked, in a few words.
        codes: code -> what it stands for, in one sentence.
        find: yields the findings on a graph.
    """

    name: str
    codes: Mapping[str, str]
    find: Callable[[Facts], Iterator[Finding]]
