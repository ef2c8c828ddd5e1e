"""Branches under a backend's pass that hoists one quantize above the tensor that they are parts of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..annotators.graph import numel, op_name, users
from ..observers.qparams import scale_of, sharing_loss_db
from ..observers.ranges import union
from ..observers.rules import HoistRule
from .findings import Finding, Severity
from .kinds import Kind
from .losses import detour_loss_db
from .qdq import Facts, finding, is_dequantize, is_quantize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Node

    from .encoding import Encoding

HAIR_DB: Final = 0.1  # branches that sharing would cost less could as well share


@dataclass(frozen=True)
class Hoist:
    """A tensor above which the backend's pass would hoist, with the values below that are quantized, breadth first."""

    root: Node
    leaves: tuple[tuple[Node, Encoding], ...]

    @property
    def is_identical(self) -> bool:
        """Tell whether all quantize ops are the same, so that the hoist changes nothing."""
        return len({_key(encoding) for _, encoding in self.leaves}) == 1


def _key(encoding: Encoding) -> tuple[object, ...]:
    return (encoding.scales, encoding.zero_points, encoding.scheme)


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the branch families that the config's hoist rule harms, or that miss a hoist by a hair."""
    rule = facts.config.branches.hoist
    if rule is HoistRule.NEVER:
        return
    for node in facts.nodes:
        hoist = find_hoist(facts, node)
        if hoist is None or hoist.is_identical:
            continue
        if rule is HoistRule.ALWAYS:
            yield from _harmed(facts, hoist)
        else:
            yield from _missed(hoist)


def find_hoist(facts: Facts, root: Node) -> Hoist | None:
    """Return what the pass would hoist above a node, or None if it would not.

    Every path must go through ops that it knows and end in a quantize; where parts are all that is read, they must
    be enough of the root. A dequantize with nothing but parts below is moved down by an earlier pass.
    """
    rules = facts.config.branches
    if root.op == "output" or is_quantize(root) or _looks_through(root, rules.hoist_through) or facts.is_constant(root):
        return None
    leaves, moves, pending = [], [], [root]
    while pending:
        value = pending.pop(0)
        for user in users(value):
            if is_quantize(user):
                encoding = facts.encoding(user)
                if encoding is None or encoding.axis is not None or not encoding.is_usable:
                    return None
                leaves.append((value, encoding))
            elif _looks_through(user, rules.hoist_through):
                moves.append(user)
                pending.append(user)
            else:
                return None
    parts = {op_name(move) for move in moves} <= rules.covering
    enough = sum(map(numel, moves)) >= rules.min_coverage * numel(root)
    if len(leaves) < 2 or not moves or (parts and (not enough or is_dequantize(root))):
        return None
    return Hoist(root, tuple(leaves))


def _looks_through(node: Node, names: frozenset[str]) -> bool:
    if op_name(node) == "getitem":
        return op_name(node.args[0]) in names  # type: ignore[arg-type]  # getitem of a tuple: args[0] is its node
    return op_name(node) in names


def representative(hoist: Hoist) -> Encoding:
    """Return the qparams that the pass puts above the root: the largest zero point, of equals the last."""
    distinct = {_key(encoding): encoding for _, encoding in hoist.leaves}
    return max(reversed(distinct.values()), key=lambda encoding: encoding.zero_points[0])


def _harmed(facts: Facts, hoist: Hoist) -> Iterator[Finding]:
    """Find families whose branches lose by passing the qparams that are hoisted."""
    chosen = representative(hoist).qparams
    losses = [
        (value.name, 0.0 if _key(encoding) == _key(representative(hoist)) else detour_loss_db(encoding.qparams, chosen))
        for value, encoding in hoist.leaves
    ]
    worst = max(loss for _, loss in losses)
    if worst < HAIR_DB:
        return
    clipped = sum(1 for _, encoding in hoist.leaves if not chosen.covers(encoding.qparams.representable))
    listed = ", ".join(f"{name} {loss:.1f} dB" for name, loss in losses)
    yield finding(
        "QM701",
        Severity.ERROR if worst > facts.config.branches.max_sharing_loss_db else Severity.WARNING,
        hoist.root,
        f"{facts.config.name} hoists one quantize above its {len(losses)} branches, whose qparams differ; "
        f"predicted loss: {listed}",
        "give all branches the same qparams, or leave one of their consumers float, so that no hoist happens",
        {
            "branches": float(len(losses)),
            "clipped": float(clipped),
            "loss_db": worst,
            "scale": chosen.scale,
            "zero_point": float(chosen.zero_point),
        },
    )


def _missed(hoist: Hoist) -> Iterator[Finding]:
    """Find families that could share their qparams at next to no cost, and so be hoisted for free."""
    encodings = [encoding for _, encoding in hoist.leaves]
    if len({encoding.scheme for encoding in encodings}) > 1:
        return
    shared = scale_of(union(e.qparams.representable for e in encodings), encodings[0].scheme)
    worst = max(sharing_loss_db(encoding.scales[0], shared) for encoding in encodings)
    if worst >= HAIR_DB:
        return
    yield finding(
        "QM702",
        Severity.INFO,
        hoist.root,
        f"the qparams of its {len(encodings)} branches differ by a hair, so that no hoist happens; sharing would cost "
        f"at most {max(worst, 0.0):.2f} dB",
        "give all branches the qparams of the covering range",
        {"branches": float(len(encodings)), "loss_db": max(worst, 0.0), "scale": shared},
    )


KIND = Kind(
    "branches",
    {
        "QM701": "branches with differing qparams below a tensor that the backend hoists a quantize above",
        "QM702": "branches that differ by a hair and so miss a free hoist",
    },
    find,
)
