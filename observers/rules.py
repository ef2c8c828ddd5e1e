"""The words in which a decision is spoken: what may be done, and what a backend does with it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .errors import ConfigError
from .fields import check_fields


class HoistRule(Enum):
    """What a backend does with quantize ops below the branches of one tensor."""

    NEVER = "never"
    """It leaves them where they are."""
    IDENTICAL = "identical"
    """It hoists one quantize above the tensor only if all of them have identical qparams."""
    ALWAYS = "always"
    """It hoists one quantize even if they differ, and so may clip or coarsen some branches."""


class Outcome(Enum):
    """What can be done with a branch family, from cheapest to dearest."""

    SHARED = "shared"
    """Every branch, and the root where it is quantized, has one qparams."""
    INDEPENDENT = "independent"
    """The root stays float, the branches are grouped by their ranges (right for a root that is float anyway)."""
    SPLIT_PRODUCER = "split_producer"
    """The producing linear/conv is cut along its output channels. Not decided yet: needs a graph rewrite."""
    WIDE_ROOT = "wide_root"
    """The root is int16, the branches are grouped by their ranges and rescaled to the narrow scheme."""
    FLOAT_ROOT = "float_root"
    """The root's producer is left to write float, the branches are grouped by their ranges."""


class JoinOutcome(Enum):
    """What can be done with one tensor that meets others in a cat, stack or where."""

    SHARED = "shared"
    """The tensor and the join's output have one qparams."""
    UNFOLD = "unfold"
    """They have one qparams, at which saturation no longer is the activation folded into the tensor's block: it stays
    an op of its own behind the block, with the same qparams on both sides."""
    REQUANTIZE = "requantize"
    """The tensor keeps its own qparams and is rescaled at the join's edge."""
    FLOAT = "float"
    """The join itself runs in float (legal where no quantized op reads its output directly)."""


class TensorOutcome(Enum):
    """What can become of a tensor by itself."""

    FLOAT = "float"
    """No qparams describe it: it stays float."""


class Conflict(Enum):
    """What to do with differing branches under `HoistRule.ALWAYS`, which must never reach the pass."""

    FLOAT = "float"
    """Keep the cheapest conflicting consumer in float, so that the pass does not fire."""
    UNION = "union"
    """Share the covering range and report the loss."""


@dataclass(frozen=True, kw_only=True)
class BranchRules:
    """How the branches of one tensor may be quantized.

    Args:
        hoist: what the backend does with the quantize ops below the branches.
        outcomes: the legal outcomes, in the backend's order of preference.
        max_sharing_loss_db: budget within which branches of a float or wide root are put in one group, in dB.
        max_root_loss_db: what sharing may cost a branch, in dB, before a dearer outcome than `SHARED` is taken
            for a root that would be quantized. 6.02 dB is one bit.
        max_float_loss_db: where the root is float and no quantized op reads any branch: what sharing may cost a branch,
            in dB, before all branches are left float.
        partial_groups: group alike branches although another differs; False: all in one group, or none.
        hoist_through: ops (canonical names) that the backend's pass looks through on its way to a quantize.
        covering: those of them that read a part; where nothing else lies between, `min_coverage` applies.
        min_coverage: the part of the root's elements, 0 to 1, that covering ops must read before the backend's
            pass finds a hoist worth while.
        conflict: what to do with differing branches under `HoistRule.ALWAYS`.
    """

    hoist: HoistRule = HoistRule.NEVER
    outcomes: tuple[Outcome, ...] = (Outcome.SHARED, Outcome.INDEPENDENT)
    max_sharing_loss_db: float = 0.5
    max_root_loss_db: float = 6.02
    max_float_loss_db: float = 6.02
    partial_groups: bool = True
    hoist_through: frozenset[str] = frozenset()
    covering: frozenset[str] = frozenset({"slice", "select"})
    min_coverage: float = 0.5
    conflict: Conflict = Conflict.FLOAT

    def __post_init__(self) -> None:
        check_fields(self, "branches")
        if Outcome.SHARED not in self.outcomes:
            raise ConfigError("branches.outcomes must list SHARED: it is what remains where nothing else is legal")
        if len(set(self.outcomes)) != len(self.outcomes):
            raise ConfigError(f"branches.outcomes lists an outcome twice: {[o.name for o in self.outcomes]}")
        for name in ("max_sharing_loss_db", "max_root_loss_db", "max_float_loss_db"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"branches.{name} must be >= 0 dB, got {getattr(self, name)}")
        if not 0.0 <= self.min_coverage <= 1.0:
            raise ConfigError(f"branches.min_coverage must be between 0 and 1, got {self.min_coverage}")


@dataclass(frozen=True, kw_only=True)
class JoinRules:
    """How tensors that meet in a cat, stack or where may be quantized.

    Args:
        outcomes: the legal outcomes, in any order: ranges and budgets decide.
        max_sharing_loss_db: what sharing may cost a tensor that other ops read too, in dB; beyond it the tensor
            is requantized at the join's edge.
        max_float_loss_db: what the join may cost an operand, in dB, before the join is left float (where legal).
    """

    outcomes: tuple[JoinOutcome, ...] = (JoinOutcome.SHARED, JoinOutcome.REQUANTIZE, JoinOutcome.FLOAT)
    max_sharing_loss_db: float = 0.5
    max_float_loss_db: float = 24.1

    def __post_init__(self) -> None:
        check_fields(self, "joins")
        if JoinOutcome.SHARED not in self.outcomes:
            raise ConfigError("joins.outcomes must list SHARED: it is what remains where nothing else is legal")
        if len(set(self.outcomes)) != len(self.outcomes):
            raise ConfigError(f"joins.outcomes lists an outcome twice: {[o.name for o in self.outcomes]}")
        for name in ("max_sharing_loss_db", "max_float_loss_db"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"joins.{name} must be >= 0 dB, got {getattr(self, name)}")


@dataclass(frozen=True)
class Decision:
    """What was decided for one branch family or join, and why; report, checks and tests read this record.

    Args:
        kind: "branches", "join" or "tensor".
        where: node name of the root, the join or the tensor, with its module path.
        outcome: what was taken.
        groups: the qparam groups, each the ids of its members.
        ranges: (member id, range) as observed.
        losses_db: (member id, predicted sharing loss in dB) under the outcome taken.
        reason: one sentence.
        rejected: (outcome name, why not) for each better outcome that was not taken.
        finding: True where the decision costs more than its budget and the user should know.
        notes: what else came of it, one sentence each (a hoist that was kept from firing, say).
    """

    kind: str
    where: str
    outcome: Outcome | JoinOutcome | TensorOutcome
    groups: tuple[tuple[str, ...], ...]
    ranges: tuple[tuple[str, tuple[float, float]], ...]
    losses_db: tuple[tuple[str, float], ...]
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    finding: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def worst_loss_db(self) -> float:
        """The largest predicted sharing loss of a member, in dB."""
        return max((loss for _, loss in self.losses_db), default=0.0)
