"""How counts and numbers are spoken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..observers.rules import Decision


ROOT: Final = "(root)"
"""What the root module is called, whose path is empty."""
_SLIGHT_DB: Final = 0.1


def counted(count: int, what: str) -> str:
    """Return "1 block", "2 blocks", "1 group of several tensors": `what` is a plural that begins with its noun."""
    return f"{count} {said(count, what)}"


def said(count: int, what: str) -> str:
    """Return the words for so many of something: the first word in the singular for one."""
    first, space, rest = what.partition(" ")
    one = first.removesuffix("es") if first.endswith("ches") else first.removesuffix("s")
    return f"{one}{space}{rest}" if count == 1 else what


def loss_words(decision: Decision) -> str:
    """Return what a decision costs the member that it costs most, and why that is fine where it is.

    An operand of a join is coarser than it would be alone because the join's output is: finer codes of its own would
    restore nothing.
    """
    if not decision.losses_db:
        return ""
    loss = f"{decision.worst_loss_db:.2f} dB"
    if decision.finding or decision.worst_loss_db < _SLIGHT_DB:
        return loss
    return f"{loss}, as its output is" if decision.kind == "join" else f"{loss}, within budget"
