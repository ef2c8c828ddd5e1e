"""What branch and join rules refuse, by name, and what a decision tells."""

from __future__ import annotations

from typing import Any

import pytest

from quantmark.observers.errors import ConfigError
from quantmark.observers.rules import BranchRules, Decision, JoinOutcome, JoinRules, Outcome


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (BranchRules, {"outcomes": (Outcome.INDEPENDENT,)}, "branches.outcomes must list SHARED"),
        (BranchRules, {"outcomes": (Outcome.SHARED, Outcome.SHARED)}, "twice"),
        (BranchRules, {"outcomes": ("shared",)}, "branches.outcomes"),
        (BranchRules, {"hoist": "always"}, "branches.hoist"),
        (BranchRules, {"max_sharing_loss_db": -0.1}, "max_sharing_loss_db must be >= 0"),
        (BranchRules, {"max_root_loss_db": float("nan")}, "max_root_loss_db must be >= 0"),
        (BranchRules, {"min_coverage": 1.5}, "min_coverage must be between 0 and 1"),
        (BranchRules, {"partial_groups": 1}, "branches.partial_groups"),
        (JoinRules, {"outcomes": (JoinOutcome.FLOAT,)}, "joins.outcomes must list SHARED"),
        (JoinRules, {"outcomes": (JoinOutcome.SHARED,) * 2}, "twice"),
        (JoinRules, {"max_float_loss_db": -1.0}, "max_float_loss_db must be >= 0"),
        (JoinRules, {"max_sharing_loss_db": "much"}, "joins.max_sharing_loss_db"),
    ],
)
def test_impossible_rules_are_refused_by_name(kind: type, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(**fields)


def test_a_budget_may_be_infinite() -> None:
    assert BranchRules(max_sharing_loss_db=float("inf")).max_sharing_loss_db == float("inf")


def test_the_worst_loss_of_a_decision() -> None:
    losses = (("a", 0.0), ("b", 3.5))
    assert Decision("branches", "x", Outcome.SHARED, (("a", "b"),), (), losses, "why").worst_loss_db == 3.5
    assert Decision("branches", "x", Outcome.SHARED, (), (), (), "why").worst_loss_db == 0.0
