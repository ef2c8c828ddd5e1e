"""Plans made by hand, and drawn at random: nothing in them need be possible in a graph."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from quantmark.observers.plan import Cell, Family, Hoist, Join, JoinInput, Leaf, Plan
from quantmark.observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, INT16_SYMMETRIC, QParams, Scheme
from quantmark.observers.ranges import Bounds, Range
from quantmark.observers.rules import BranchRules, Conflict, HoistRule, JoinOutcome, JoinRules, Outcome

RELU, RELU6 = Bounds(0.0, None), Bounds(0.0, 6.0)
SIGMOID = QParams(1 / 256, -128, INT8_AFFINE)
RULES = BranchRules()


def cell(name: str, scheme: Scheme = INT8_AFFINE, **fields: Any) -> Cell:
    return Cell(name=name, where=f"{name} (op)", scheme=scheme, values=(name,), **fields)


def cells(*names: str, **special: Cell) -> dict[str, Cell]:
    return {name: special.get(name, cell(name)) for name in (*names, *(n for n in special if n not in names))}


def family(root: str | None, *leaves: str | Leaf, root_is_float: bool | None = None, **fields: Any) -> Family:
    return Family(
        where=fields.pop("where", f"{root} (root)"),
        root=root,
        root_is_float=root is None if root_is_float is None else root_is_float,
        leaves=tuple(leaf if isinstance(leaf, Leaf) else Leaf(cell=leaf) for leaf in leaves),
        rules=fields.pop("rules", RULES),
        **fields,
    )


def join(
    output: str,
    *inputs: str,
    exclusive: bool = True,
    may_float: bool = False,
    all_have_steps: bool = False,
    **rules: Any,
) -> Join:
    return Join(
        where=f"{output} (cat)",
        output=output,
        inputs=tuple(JoinInput(cell=name, exclusive=exclusive) for name in inputs),
        may_float=may_float,
        all_have_steps=all_have_steps,
        rules=JoinRules(**rules),
    )


def hoist(*names: str, where: str = "None (root)", **fields: Any) -> Hoist:
    rules = fields.pop("rules", None) or BranchRules(hoist=fields.pop("hoist", HoistRule.ALWAYS), **fields)
    return Hoist(where=where, costs={name: 10 * (i + 1) for i, name in enumerate(names)}, rules=rules)


def ranges(**ends: tuple[float, float] | float) -> dict[str, Range]:
    """Ranges by name; a number stands for [-number, number]."""
    return {n: Range(*e) if isinstance(e, tuple) else Range(-abs(e), abs(e)) for n, e in ends.items()}


def shuffled(plan: Plan, seed: int) -> Plan:
    """The same plan with all of its lists in another order."""
    order = random.Random(seed)

    def mixed(items: Any) -> list[Any]:
        found = list(items)
        order.shuffle(found)
        return found

    return Plan(
        cells=dict(mixed(plan.cells.items())),
        families=tuple(replace(f, leaves=tuple(mixed(f.leaves))) for f in mixed(plan.families)),
        joins=tuple(replace(j, inputs=tuple(mixed(j.inputs))) for j in mixed(plan.joins)),
        hoists=tuple(replace(h, costs=dict(mixed(h.costs.items()))) for h in mixed(plan.hoists)),
    )


_ENDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.03, 1.7, 5.0, 6.0, 60.0, 100.0, 1e-9]) | st.floats(0.0, 1e3)
_BUDGETS = st.sampled_from([0.0, 0.5, 6.02, 30.0])


@st.composite
def _cell_and_range(draw: st.DrawFn, name: str) -> tuple[Cell, Range]:
    low, high = -draw(_ENDS), draw(_ENDS)
    kind = draw(st.sampled_from(["plain"] * 6 + ["relu", "relu6", "symmetric", "one_sided", "roomy", "fixed"]))
    if kind in {"relu", "relu6"}:
        contract = RELU if kind == "relu" else RELU6
        return cell(name, contract=contract, may_unfold=draw(st.booleans())), Range(low, high).clamp(contract)
    if kind == "symmetric":
        return cell(name, INT8_SYMMETRIC), Range(low, high)
    if kind == "one_sided":
        return cell(name, INT8_SYMMETRIC.one_sided(), contract=RELU), Range(0.0, high)
    if kind == "roomy":
        headroom = draw(st.sampled_from([None, 1.25]))
        return cell(name, replace(INT8_SYMMETRIC, headroom=2.0), headroom=headroom), Range(low, high)
    if kind == "fixed":
        return cell(name, fixed=SIGMOID), Range(0.0, min(high, 1.0))
    return cell(name, INT8_AFFINE), Range(low, high)


@st.composite
def _branch_rules(draw: st.DrawFn) -> BranchRules:
    others = [Outcome.INDEPENDENT, Outcome.SPLIT_PRODUCER, Outcome.WIDE_ROOT, Outcome.FLOAT_ROOT]
    outcomes = draw(st.permutations([Outcome.SHARED, *draw(st.lists(st.sampled_from(others), unique=True))]))
    return BranchRules(
        hoist=draw(st.sampled_from(HoistRule)),
        outcomes=tuple(outcomes),
        max_sharing_loss_db=draw(_BUDGETS),
        max_root_loss_db=draw(_BUDGETS),
        max_float_loss_db=draw(_BUDGETS),
        partial_groups=draw(st.booleans()),
        conflict=draw(st.sampled_from(Conflict)),
    )


@st.composite
def plans(draw: st.DrawFn, *, related: bool = True) -> tuple[Plan, dict[str, Range], dict[str, Range]]:
    """A plan, the ranges of most of its cells, and their exact ranges.

    `related`: with joins and hoists, and families that may have cells in common.
    """
    names = [f"n{i}" for i in range(draw(st.integers(2, 9)))]
    drawn = {name: draw(_cell_and_range(name)) for name in names}
    left = list(names)
    families = []
    for index in range(draw(st.integers(0 if related else 1, 2))):
        some = draw(st.lists(st.sampled_from(names if related else left), min_size=2, unique=True)) if left[1:] else []
        if not some:
            continue
        left = [name for name in left if name not in some]
        root = some.pop(0) if draw(st.booleans()) else None
        leaves = [Leaf(cell=n, consumer_cost=draw(st.integers(0, 3)), read_in_float=draw(_SELDOM)) for n in some]
        wide = INT16_SYMMETRIC if draw(st.booleans()) else None
        rules = draw(_branch_rules())
        is_float = root is None or draw(_SELDOM)
        families.append(family(root, *leaves, root_is_float=is_float, wide=wide, rules=rules, where=f"root{index}"))
    joins, hoists = [], []
    for output in draw(st.lists(st.sampled_from(names), max_size=3, unique=True)) if related else ():
        inputs = draw(st.lists(st.sampled_from([n for n in names if n != output]), min_size=1, unique=True))
        outcomes = draw(st.permutations(list(JoinOutcome)))[: draw(st.integers(1, 3))]
        rules_ = JoinRules(
            outcomes=tuple(dict.fromkeys([*outcomes, JoinOutcome.SHARED])),
            max_sharing_loss_db=draw(_BUDGETS),
            max_float_loss_db=draw(_BUDGETS),
        )
        operands = tuple(JoinInput(cell=n, exclusive=draw(st.booleans())) for n in inputs)
        joins.append(
            Join(
                where=f"{output}.cat",
                output=output,
                inputs=operands,
                may_float=draw(st.booleans()),
                rules=rules_,
                all_have_steps=draw(st.booleans()),
            )
        )
    for index in range(draw(st.integers(0, 3)) if related else 0):
        some = draw(st.lists(st.sampled_from(names), min_size=2, unique=True))
        costs = {name: draw(st.integers(0, 3)) for name in some}
        hoists.append(Hoist(where=f"root{index}", costs=costs, rules=draw(_branch_rules())))
    found = {name: each._replace(follows=_follows(draw, names, name)) for name, (each, _) in drawn.items()}
    exact = {name: range_ for name, (_, range_) in drawn.items()}
    silent = draw(st.sets(st.sampled_from(names), max_size=1)) if draw(_SELDOM) else set()
    seen = {name: _cut(draw, range_) for name, range_ in exact.items() if name not in silent}
    return Plan(cells=found, families=tuple(families), joins=tuple(joins), hoists=tuple(hoists)), seen, exact


_SELDOM = st.sampled_from([False, False, False, True])


def _follows(draw: st.DrawFn, names: list[str], name: str) -> frozenset[str]:
    return frozenset({draw(st.sampled_from(names))} - {name}) if draw(_SELDOM) else frozenset()


def _cut(draw: st.DrawFn, exact: Range) -> Range:
    """What an estimator that clips would say of the same data."""
    part = draw(st.sampled_from([1.0, 1.0, 0.9]))
    return Range(exact.min * part, exact.max * part)
