"""The laws of `partition`: cover, budget, maximality, minimality, order; and what a loss means in SQNR."""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmark.observers.errors import ConfigError, RangeError
from quantmark.observers.grouping import QParamGroup, partition
from quantmark.observers.qparams import (
    INT8_AFFINE,
    INT8_SYMMETRIC,
    INT16_SYMMETRIC,
    QParams,
    Scheme,
    choose_qparams,
    scale_of,
    sharing_loss_db,
)
from quantmark.observers.ranges import Range, union

TOLERANCE_DB = 1e-8
SCHEMES = {
    "int8 affine": INT8_AFFINE,
    "int8 symmetric": INT8_SYMMETRIC,
    "int16 symmetric": INT16_SYMMETRIC,
    "uint8": Scheme(dtype=torch.uint8, quant_min=0, quant_max=255),
    "uint8 symmetric": Scheme(dtype=torch.uint8, quant_min=0, quant_max=255, symmetric=True),
    "restricted": Scheme(quant_min=-100, quant_max=27),
    "uneven symmetric": Scheme(quant_min=-128, quant_max=27, symmetric=True),
    "floor": Scheme(eps=2.0**-10),
    "headroom": Scheme(headroom=1.25),
    "int16 with headroom": replace(INT16_SYMMETRIC, headroom=2.0),
}
any_scheme = st.sampled_from(list(SCHEMES.values()))
affine_scheme = st.sampled_from([scheme for scheme in SCHEMES.values() if not scheme.symmetric])
any_budget = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0, 3.0, 6.02, 20.0]) | st.floats(0.0, 30.0)


def spread(share: float, width: float) -> Range:
    """A range that reaches `share` of its width below 0."""
    return Range(-share * width, (1 - share) * width)


wild_range = st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)).map(lambda ends: Range(min(ends), max(ends)))
alike_range = st.builds(spread, st.floats(0.0, 1.0), st.floats(0.8, 1.3))
lattice_range = st.builds(lambda low, high: Range(-float(low), float(high)), st.integers(0, 6), st.integers(0, 6))
tiny_range = st.builds(spread, st.floats(0.0, 1.0), st.sampled_from([1e-3, 0.1, 0.2, 0.25, 0.26]))
any_range = wild_range | alike_range | lattice_range | tiny_range


def named(ranges: Sequence[Range]) -> dict[str, Range]:
    return {f"member{i}": range_ for i, range_ in enumerate(ranges)}


def families(ranges: st.SearchStrategy[Range], most: int = 12) -> st.SearchStrategy[dict[str, Range]]:
    one_kind = st.sampled_from([ranges, alike_range, lattice_range])
    return one_kind.flatmap(lambda kind: st.lists(kind, min_size=1, max_size=most)).map(named)


def is_zero(range_: Range) -> bool:
    return range_ == Range(0.0, 0.0)


def losses(members: Sequence[Range], scheme: Scheme) -> list[float]:
    """What sharing costs each, straight from the definition."""
    shared = choose_qparams(union(members), scheme).scale
    return [0.0 if is_zero(r) else sharing_loss_db(scale_of(r, scheme), shared) for r in members]


def feasible(members: Sequence[Range], scheme: Scheme, budget: float) -> bool:
    return max(losses(members, scheme)) <= budget + TOLERANCE_DB


def as_sets(groups: Sequence[QParamGroup]) -> set[frozenset[str]]:
    return {frozenset(group.members) for group in groups}


def fewest_groups(ranges: Sequence[Range], scheme: Scheme, budget: float) -> int:
    """The least number of groups, by trying every subset: shares nothing with the solver under test."""
    full = (1 << len(ranges)) - 1
    allowed = [
        mask > 0 and feasible([r for i, r in enumerate(ranges) if mask >> i & 1], scheme, budget)
        for mask in range(full + 1)
    ]

    @cache
    def solve(left: int) -> int:
        if not left:
            return 0
        first, best, rest = left & -left, len(ranges), left & (left - 1)
        subset = rest
        while True:
            if allowed[subset | first]:
                best = min(best, 1 + solve(rest & ~subset))
            if not subset:
                return best
            subset = (subset - 1) & rest

    return solve(full)


def independent_members(ranges: Sequence[Range], scheme: Scheme, budget: float) -> int:
    """A lower bound of the number of groups: members of which no two could share."""
    chosen: list[Range] = []
    for range_ in sorted(ranges, key=lambda r: (scale_of(r, scheme), r.min, r.max)):
        if not any(feasible([range_, other], scheme, budget) for other in chosen):
            chosen.append(range_)
    return len(chosen)


# --- laws ---


@given(families(any_range), any_scheme, any_budget, st.booleans())
def test_every_member_is_in_one_group_that_covers_it(
    ranges: dict[str, Range], scheme: Scheme, budget: float, partial: bool
) -> None:
    groups = partition(ranges, scheme, budget, partial=partial)
    assert sorted(name for group in groups for name in group.members) == sorted(ranges)
    for group in groups:
        assert group.range == union(ranges[name] for name in group.members)
        for name in group.members:
            assert group.range.covers(ranges[name])
            assert group.qparams.covers(ranges[name])


@given(families(any_range), any_scheme, any_budget, st.booleans())
def test_every_member_is_within_budget(ranges: dict[str, Range], scheme: Scheme, budget: float, partial: bool) -> None:
    for group in partition(ranges, scheme, budget, partial=partial):
        assert len(group.losses_db) == len(group.members)
        assert 0.0 <= group.worst_loss_db == max(group.losses_db) <= budget + TOLERANCE_DB


@given(families(any_range), any_scheme, any_budget)
def test_qparams_and_losses_are_those_of_the_union(ranges: dict[str, Range], scheme: Scheme, budget: float) -> None:
    for group in partition(ranges, scheme, budget):
        assert group.qparams == choose_qparams(group.range, scheme)
        assert list(group.losses_db) == losses([ranges[name] for name in group.members], scheme)


@given(families(any_range), any_scheme, any_budget)
def test_no_two_groups_could_be_merged(ranges: dict[str, Range], scheme: Scheme, budget: float) -> None:
    for one, other in combinations(partition(ranges, scheme, budget), 2):
        merged = [ranges[name] for name in (*one.members, *other.members)]
        assert not feasible(merged, scheme, budget)


@given(families(any_range), any_scheme, any_budget, st.booleans(), st.randoms(use_true_random=False))
def test_order_of_the_mapping_changes_no_group(
    ranges: dict[str, Range], scheme: Scheme, budget: float, partial: bool, rng: random.Random
) -> None:
    shuffled = list(ranges.items())
    rng.shuffle(shuffled)
    groups = partition(ranges, scheme, budget, partial=partial)
    others = partition(dict(shuffled), scheme, budget, partial=partial)
    assert as_sets(groups) == as_sets(others)
    assert {g.qparams for g in groups} == {g.qparams for g in others}
    assert groups == partition(dict(ranges), scheme, budget, partial=partial)


@given(families(any_range), any_scheme, any_budget, st.booleans())
def test_output_follows_the_given_order(ranges: dict[str, Range], scheme: Scheme, budget: float, partial: bool) -> None:
    groups = partition(ranges, scheme, budget, partial=partial)
    place = {name: i for i, name in enumerate(ranges)}
    firsts = [place[group.members[0]] for group in groups]
    assert firsts == sorted(firsts)
    for group in groups:
        assert list(group.members) == sorted(group.members, key=place.__getitem__)


@given(families(any_range), any_scheme, any_budget, st.booleans())
def test_equal_ranges_are_never_parted(ranges: dict[str, Range], scheme: Scheme, budget: float, partial: bool) -> None:
    doubled = {**ranges, **{f"{name} again": range_ for name, range_ in ranges.items()}}
    for group in partition(doubled, scheme, budget, partial=partial):
        for name in group.members:
            twin = name.removesuffix(" again") if name.endswith(" again") else f"{name} again"
            assert twin in group.members or is_zero(doubled[name])


@settings(max_examples=60)
@given(families(any_range, most=8), any_scheme, any_budget)
def test_number_of_groups_is_the_least_possible(ranges: dict[str, Range], scheme: Scheme, budget: float) -> None:
    assert len(partition(ranges, scheme, budget)) == fewest_groups(list(ranges.values()), scheme, budget)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("budget", [0.1, 0.5, 2.0])
def test_ten_members_are_grouped_in_the_least_number(name: str, budget: float) -> None:
    rng = random.Random(f"{name} {budget}")
    for _ in range(3):
        ranges = [spread(rng.random(), rng.uniform(1.0, 1.0 + budget / 6)) for _ in range(10)]
        groups = partition(named(ranges), SCHEMES[name], budget)
        assert len(groups) == fewest_groups(ranges, SCHEMES[name], budget)


@given(families(any_range, most=40), st.sampled_from([INT8_SYMMETRIC, INT16_SYMMETRIC]), any_budget)
def test_symmetric_groups_are_the_least_number_for_any_number_of_members(
    ranges: dict[str, Range], scheme: Scheme, budget: float
) -> None:
    """In one dimension, opening a group only where the last one ends is known to be exact."""
    limit, count = 0.0, 0
    for scale in sorted(scale_of(r, scheme) for r in ranges.values() if not is_zero(r)):
        if scale > limit:
            limit, count = scale * 10 ** (budget / 20) * (1 + 1e-9), count + 1
    assert len(partition(ranges, scheme, budget)) == max(count, 1)


# --- many members: the greedy road ---


def ring(rng: random.Random) -> Range:
    return spread(rng.random(), 1.0)


def slab(rng: random.Random) -> Range:
    return spread(rng.random(), 10 ** rng.uniform(0.0, 0.03))


def cluster(rng: random.Random) -> Range:
    return spread(rng.gauss(0.5, 0.02), 10 ** rng.uniform(0.0, 0.05))


def decades(rng: random.Random) -> Range:
    return spread(rng.random(), 10 ** rng.uniform(-3, 3))


def floored(rng: random.Random) -> Range:
    return spread(rng.random(), rng.uniform(0.0, 0.3))


def lattice(rng: random.Random) -> Range:
    return Range(-float(rng.randrange(20)), float(rng.randrange(20)))


SHAPES: list[Callable[[random.Random], Range]] = [ring, slab, cluster, decades, floored, lattice]


def family(shape: Callable[[random.Random], Range], size: int, seed: int = 0) -> dict[str, Range]:
    rng = random.Random(seed)
    return named([shape(rng) for _ in range(size)])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [0.0, 0.05, 0.5, 6.02])
@pytest.mark.parametrize("name", ["int8 affine", "restricted", "floor", "uneven symmetric"])
def test_laws_hold_for_many_members(shape: Callable[[random.Random], Range], budget: float, name: str) -> None:
    scheme, ranges = SCHEMES[name], family(shape, 120)
    groups = partition(ranges, scheme, budget)
    assert sorted(n for group in groups for n in group.members) == sorted(ranges)
    assert all(group.worst_loss_db <= budget + TOLERANCE_DB for group in groups)
    assert all(group.qparams.covers(ranges[n]) for group in groups for n in group.members)
    for one, other in combinations(groups, 2):
        assert not feasible(
            [one.range, other.range, *(ranges[n] for n in (*one.members, *other.members))], scheme, budget
        )
    assert as_sets(groups) == as_sets(partition(dict(reversed(ranges.items())), scheme, budget))
    assert len(groups) <= 2 * independent_members(list(ranges.values()), scheme, budget) + 1


def test_greedy_is_seldom_more_than_one_above_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    excess = []
    for case in range(60):
        shape, budget = SHAPES[case % len(SHAPES)], rng.choice([0.1, 0.5, 2.0, 6.02])
        ranges = family(shape, 24, seed=case)
        monkeypatch.setattr("quantmark.observers.grouping._EXACT_MAX", 24)
        least = len(partition(ranges, INT8_AFFINE, budget))
        monkeypatch.setattr("quantmark.observers.grouping._EXACT_MAX", 0)
        excess.append(len(partition(ranges, INT8_AFFINE, budget)) - least)
    assert min(excess) >= 0
    assert max(excess) <= 2
    assert sum(extra > 1 for extra in excess) <= len(excess) // 20


@settings(max_examples=60)
@given(families(any_range, most=8), affine_scheme, any_budget)
def test_greedy_alone_keeps_the_laws(ranges: dict[str, Range], scheme: Scheme, budget: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantmark.observers.grouping._EXACT_MAX", 0)
        groups = partition(ranges, scheme, budget)
    assert sorted(n for group in groups for n in group.members) == sorted(ranges)
    assert all(group.worst_loss_db <= budget + TOLERANCE_DB for group in groups)
    for one, other in combinations(groups, 2):
        assert not feasible([ranges[n] for n in (*one.members, *other.members)], scheme, budget)
    assert len(groups) <= 1.5 * fewest_groups(list(ranges.values()), scheme, budget)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("size", "budget", "seconds"),
    [
        *((1_000, budget, 0.05) for budget in (0.0, 1e-6, 0.01, 0.5, 6.02, math.inf)),
        (10_000, 0.0, 1.0),
        (10_000, 0.5, 1.0),
    ],
)
def test_time(shape: Callable[[random.Random], Range], size: int, budget: float, seconds: float) -> None:
    ranges = family(shape, size)
    for _ in range(5):
        start = time.process_time()
        partition(ranges, INT8_AFFINE, budget)
        if time.process_time() - start < seconds:
            return
    pytest.fail(f"{size} members took more than {seconds} s, five times in a row")


# --- edges ---


def test_nothing_makes_no_groups() -> None:
    assert partition({}, INT8_AFFINE, 0.5) == ()
    assert partition({}, INT8_AFFINE, 0.5, partial=False) == ()


@pytest.mark.parametrize("budget", [-1e-9, -math.inf, math.nan])
def test_a_budget_that_is_negative_or_nan_is_an_error(budget: float) -> None:
    with pytest.raises(ConfigError, match="max_sharing_loss_db must be >= 0 dB"):
        partition({"a": Range(0.0, 1.0)}, INT8_AFFINE, budget)


@given(families(any_range), any_scheme, st.booleans())
def test_an_infinite_budget_makes_one_group(ranges: dict[str, Range], scheme: Scheme, partial: bool) -> None:
    assert len(partition(ranges, scheme, math.inf, partial=partial)) == 1
    assert len(partition(ranges, scheme, 1e300, partial=partial)) == 1


@given(families(any_range), any_scheme)
def test_budget_0_groups_only_identical_scales(ranges: dict[str, Range], scheme: Scheme) -> None:
    for group in partition(ranges, scheme, 0.0):
        own = {scale_of(ranges[name], scheme) for name in group.members if not is_zero(ranges[name])}
        assert own <= {group.qparams.scale}


def test_budget_0_tells_neighbouring_float32_scales_apart() -> None:
    """Equal sums with opposite signs have equal scales, but their union needs twice the scale."""
    one, next_one = 255.0, 255.0 * (1 + 2.0**-23)
    assert len(partition({"a": Range(0.0, one), "b": Range(0.0, next_one)}, INT8_AFFINE, 0.0)) == 2
    assert len(partition({"a": Range(0.0, one), "b": Range(0.0, one)}, INT8_AFFINE, 0.0)) == 1
    assert len(partition({"a": Range(0.0, one), "b": Range(-one, 0.0)}, INT8_AFFINE, 0.0)) == 2
    assert len(partition({"a": Range(0.0, one), "b": Range(-one, 0.0)}, INT8_SYMMETRIC, 0.0)) == 1


@given(families(any_range), any_scheme, any_budget, st.booleans(), st.integers(1, 3))
def test_zero_tensors_join_any_group_and_lose_nothing(
    ranges: dict[str, Range], scheme: Scheme, budget: float, partial: bool, zeros: int
) -> None:
    alive = {name: range_ for name, range_ in ranges.items() if not is_zero(range_)}
    padded = {**{f"zero{i}": Range(0.0, -0.0) for i in range(zeros)}, **alive}
    groups = partition(padded, scheme, budget, partial=partial)
    without = partition(alive, scheme, budget, partial=partial)
    if partial or len(without) == 1:
        assert len(groups) == max(len(without), 1)
        assert {g.qparams for g in without} <= {g.qparams for g in groups}
        (host,) = (g for g in groups if "zero0" in g.members)
        assert len(host.members) == zeros + max((len(g.members) for g in without), default=0)
    for group in groups:
        loss = dict(zip(group.members, group.losses_db, strict=True))
        assert all(loss[name] == 0.0 for name in loss if name.startswith("zero"))


@given(families(any_range), any_scheme, any_budget)
def test_all_or_none(ranges: dict[str, Range], scheme: Scheme, budget: float) -> None:
    groups = partition(ranges, scheme, budget, partial=False)
    if feasible(list(ranges.values()), scheme, budget):
        assert len(groups) == 1
        assert groups[0].qparams == choose_qparams(groups[0].range, scheme)
        return
    own: dict[QParams, set[str]] = {}
    for name, range_ in ranges.items():
        own.setdefault(choose_qparams(range_, scheme), set()).add(name)
    assert {g.qparams: set(g.members) for g in groups} == own
    assert all(g.worst_loss_db == 0.0 for g in groups)


def test_the_seed_case_three_alike_and_one_wide() -> None:
    ranges = {
        "a": Range(-1.0, 1.70),
        "wide": Range(-3.0, 100.0),
        "b": Range(-1.02, 1.69),
        "c": Range(-0.99, 1.72),
    }
    alike, wide = partition(ranges, INT8_AFFINE, 0.5)
    assert alike.members == ("a", "b", "c")
    assert wide.members == ("wide",)
    assert alike.worst_loss_db < 0.5
    assert [g.members for g in partition(ranges, INT8_AFFINE, 0.5, partial=False)] == [
        ("a",),
        ("wide",),
        ("b",),
        ("c",),
    ]
    (everything,) = partition(ranges, INT8_AFFINE, 40.0)
    assert everything.worst_loss_db == pytest.approx(20 * math.log10(103 / 2.70), abs=1e-5)


def test_ranges_whose_union_has_no_float32_scale_are_not_grouped() -> None:
    huge = 3e38 * 255
    ranges = {"a": Range(-huge, 0.0), "b": Range(0.0, huge)}
    assert len(partition(ranges, INT8_AFFINE, math.inf)) == 2
    with pytest.raises(RangeError, match="too wide"):
        partition({"a": Range(0.0, 10 * huge)}, INT8_AFFINE, 0.5)


# --- what a loss means ---


def sqnr_db(values: torch.Tensor, qparams: QParams) -> float:
    scheme = qparams.scheme
    quantized = torch.fake_quantize_per_tensor_affine(
        values, qparams.scale, qparams.zero_point, scheme.quant_min, scheme.quant_max
    )
    noise = (quantized.double() - values.double()).square().mean()
    return float(10 * torch.log10(values.double().square().mean() / noise))


DISTRIBUTIONS: Mapping[str, Callable[[torch.Generator], torch.Tensor]] = {
    "uniform": lambda generator: torch.rand(40_000, generator=generator) * 2 - 1,
    "one-sided": lambda generator: torch.rand(40_000, generator=generator),
    "normal": lambda generator: torch.randn(40_000, generator=generator),
}


@pytest.mark.parametrize("scheme", [INT8_AFFINE, INT8_SYMMETRIC, INT16_SYMMETRIC], ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("ratio", [1.0, 1.05, 1.5, 2.0, 4.0, 11.0, 32.0, 64.0])
def test_predicted_loss_agrees_with_measured_sqnr(scheme: Scheme, distribution: str, ratio: float) -> None:
    """Where quantization noise dominates: at int8, the shared step stays below the values' deviation."""
    values = DISTRIBUTIONS[distribution](torch.Generator().manual_seed(7))
    own = Range.of(values)
    wide = Range(own.min * ratio, own.max * ratio)
    (group,) = partition({"narrow": own, "wide": wide}, scheme, math.inf)
    measured = sqnr_db(values, choose_qparams(own, scheme)) - sqnr_db(values, group.qparams)
    assert group.losses_db[0] == pytest.approx(measured, abs=1.5)
    assert group.losses_db[1] == 0.0
