"""Joins in real exports: which operands share the join's qparams, which keep their own, when the join stays float."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from quantmark import AnnotationWarning, SharingConflictError, check, configs
from quantmark.annotators.measure import observe_ranges
from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.configs.base import BackendConfig, BlockRules
from quantmark.observers.plan import Join
from quantmark.observers.rules import BranchRules, Decision, JoinOutcome, JoinRules, Outcome
from support.flow import (
    Flow,
    Pair,
    calls,
    export,
    is_dequantize,
    is_quantize,
    minmax_config,
    pair_of,
    quantize,
    sqnr_db,
)

BATCH = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)),)


class Net(nn.Module):
    """Some linears of 6 to 6, `a`, `b`, `c`, `d`, and a function of x and of the net."""

    def __init__(self, function: Callable[..., Any], scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(12, 3)
        with torch.no_grad():
            for linear, scale in zip((self.a, self.b, self.c, self.d), scales, strict=True):
                linear.weight.mul_(scale)
                linear.bias.mul_(scale)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self)


@dataclass
class Found:
    flow: Flow
    joins: list[Join]
    decisions: list[Decision]
    db: list[float]

    def pair_at(self, index: int) -> Pair | None:
        """The qparams of the join's output."""
        cat = calls(self.flow.converted, "cat", "stack")[index]
        found = [pair_of(n) for n in cat.users if is_quantize(n)]
        assert len(found) <= 1
        return found[0] if found else None

    def edges(self, index: int) -> list[Pair | None]:
        """The qparams at the join's input edges."""
        operands = calls(self.flow.converted, "cat", "stack")[index].args[0]
        assert isinstance(operands, (list, tuple))
        return [pair_of(n) if isinstance(n, Node) and is_dequantize(n) else None for n in operands]

    def written(self, index: int) -> Pair | None:
        """The qparams that the linear `index` writes."""
        linear = calls(self.flow.converted, "linear")[index]
        tail = linear
        while len(tail.users) == 1 and not is_quantize(next(iter(tail.users))):
            tail = next(iter(tail.users))
        found = [n for n in tail.users if is_quantize(n)]
        return pair_of(found[0]) if found else None


def run(model: nn.Module, config: BackendConfig | None = None) -> Found:
    model = model.eval()
    flow = quantize(model, BATCH, config or minmax_config())
    assert isinstance(flow.quantizer, BackendQuantizer)
    record = flow.quantizer.record
    wanted, found = model(*BATCH), flow.converted(*BATCH)
    wanted, found = ((y if isinstance(y, (tuple, list)) else [y]) for y in (wanted, found))
    return Found(
        flow,
        [join for component in record.components for join in component.plan.joins],
        [d for d in record.decisions if d.kind == "join"],
        [sqnr_db(a, b) for a, b in zip(wanted, found, strict=True)],
    )


def both_last(x: Tensor, n: Any) -> Tensor:
    found: Tensor = n.last(torch.cat([n.a(x), n.b(x)], 1))
    return found


def test_operands_of_one_reader_share() -> None:
    found = run(Net(both_last))
    (decision,) = found.decisions
    assert decision.outcome is JoinOutcome.SHARED
    assert len({found.written(0), found.written(1), found.pair_at(0), *found.edges(0)}) == 1
    assert all(operand.exclusive for operand in found.joins[0].inputs)
    assert found.db[0] > 35


def test_an_activation_keeps_its_contract_beside_a_signed_operand() -> None:
    def function(x: Tensor, n: Any) -> Any:
        return n.last(torch.cat([torch.relu(n.a(x)), n.b(x)], 1))

    found = run(Net(function))
    (decision,) = found.decisions
    assert decision.outcome is JoinOutcome.REQUANTIZE
    assert "relu keeps its own qparams: no qparams serve both contracts" in decision.reason
    relu, signed = found.written(0), found.written(1)
    assert relu is not None
    assert relu.zero_point == relu.quant_min
    assert found.edges(0) == [signed, signed]
    assert found.pair_at(0) == signed
    assert found.db[0] > 35


@pytest.mark.parametrize("ranges_first", [False, True])
@pytest.mark.parametrize("spelled", [torch.relu, lambda y: nn.functional.relu6(torch.relu(y))])
def test_an_activation_beside_a_signed_operand_becomes_an_op_of_its_own_where_that_is_legal(
    spelled: Callable[[Tensor], Tensor], ranges_first: bool
) -> None:
    net = Net(lambda x, n: n.last(torch.cat([spelled(n.a(x)), n.b(x)], 1))).eval()
    outcomes = (JoinOutcome.SHARED, JoinOutcome.UNFOLD, JoinOutcome.REQUANTIZE)
    config = minmax_config(blocks=BlockRules(erase_activations=True), joins=JoinRules(outcomes=outcomes))
    table = observe_ranges(torch.export.export(net, BATCH), [BATCH], estimator="minmax") if ranges_first else None
    quantizer = BackendQuantizer(config, ranges=table)
    flow = quantize(net, BATCH, quantizer)
    (decision,) = [d for d in quantizer.record.decisions if d.kind == "join"]
    assert decision.outcome is JoinOutcome.UNFOLD
    (cat,) = calls(flow.converted, "cat")
    (shared,) = {pair_of(n) for n in cat.args[0] if isinstance(n, Node)}  # type: ignore[union-attr]
    for clamp in calls(flow.converted, "relu", "relu6"):
        assert [pair_of(n) for n in (*clamp.all_input_nodes, *clamp.users)] == [shared, shared]
    assert sqnr_db(net(*BATCH), flow.converted(*BATCH)) > 35
    assert check(flow.converted, config).is_safe


def test_two_activations_share() -> None:
    def function(x: Tensor, n: Any) -> Any:
        return n.last(torch.cat([torch.relu(n.a(x)), nn.functional.relu6(n.b(x))], 1))

    found = run(Net(function))
    assert found.decisions[0].outcome is JoinOutcome.SHARED
    shared = found.pair_at(0)
    assert shared is not None
    assert shared.zero_point == shared.quant_min
    assert shared.largest <= 6 + shared.scale / 2


def test_an_operand_that_others_read_keeps_its_own_unless_sharing_is_cheap() -> None:
    def function(x: Tensor, n: Any) -> Any:
        y = n.a(x)
        return n.last(torch.cat([y, n.b(x)], 1)), n.c(y)

    apart = run(Net(function, (0.1, 1.0, 1.0, 1.0)))
    assert apart.decisions[0].outcome is JoinOutcome.REQUANTIZE
    assert "a keeps" not in apart.decisions[0].reason
    assert apart.written(0) != apart.pair_at(0)
    assert apart.edges(0)[0] == apart.pair_at(0)
    assert [operand.exclusive for operand in apart.joins[0].inputs] == [False, True]
    generous = minmax_config(joins=JoinRules(max_sharing_loss_db=30.0))
    assert run(Net(function, (0.1, 1.0, 1.0, 1.0)), generous).decisions[0].outcome is JoinOutcome.SHARED
    forced = minmax_config(joins=JoinRules(outcomes=(JoinOutcome.SHARED,)))
    assert run(Net(function, (0.1, 1.0, 1.0, 1.0)), forced).decisions[0].outcome is JoinOutcome.SHARED


@pytest.mark.parametrize("reader", ["float", "linear"])
def test_a_join_that_would_ruin_an_operand_stays_float_where_no_quantized_op_reads_it(reader: str) -> None:
    def function(x: Tensor, n: Any) -> Any:
        joined = torch.cat([n.a(x), n.b(x)], 1)
        return n.last(joined) if reader == "linear" else (joined.cumsum(0)[:, :6], joined)

    found = run(Net(function, (0.01, 1.0, 1.0, 1.0)))
    (decision,) = found.decisions
    assert found.joins[0].may_float is (reader == "float")
    if reader == "float":
        assert decision.outcome is JoinOutcome.FLOAT
        assert found.pair_at(0) is None
        assert min(found.db) > 35
        assert found.written(0) != found.written(1)
    else:
        assert decision.outcome is JoinOutcome.SHARED
        assert decision.finding


def test_a_float_operand_is_quantized_at_the_edge() -> None:
    def function(x: Tensor, n: Any) -> Any:
        return n.last(torch.cat([n.a(x), x], 1))

    found = run(Net(function))
    assert found.edges(0) == [found.pair_at(0)] * 2
    entry = calls(found.flow.converted, "linear")[0].args[0]
    assert is_dequantize(entry)


def test_an_operand_read_twice_by_the_join_counts_once() -> None:
    def function(x: Tensor, n: Any) -> Any:
        y = n.a(x)
        return n.last(torch.cat([y, y], 1))

    found = run(Net(function))
    (join,) = found.joins
    assert len(join.inputs) == 1
    assert join.inputs[0].exclusive
    assert found.decisions[0].outcome is JoinOutcome.SHARED


def test_pools_are_joined_at_the_scale_that_they_have() -> None:
    def function(x: Tensor, n: Any) -> Any:
        y = n.a(x)
        pools = [nn.functional.max_pool1d(y.unsqueeze(1), size).squeeze(1) for size in (2, 3)]
        return torch.cat(pools, 1), n.b(y)  # y's range is wider than what is left of it, which has y's steps already

    found = run(Net(function))
    (decision,) = found.decisions
    assert decision.outcome is JoinOutcome.SHARED
    assert len({*found.edges(0), found.pair_at(0)}) == 1
    y, joined = (dict(decision.ranges)[name] for name in ("linear", "cat"))
    assert joined[1] - min(joined[0], 0.0) < 0.9 * (y[1] - y[0])


@pytest.mark.arm
def test_a_clamp_at_its_inputs_scale_is_put_right_where_it_is_joined() -> None:
    def function(x: Tensor, n: Any) -> Any:
        y = n.a(x)
        ends = [y.clamp(-0.2, 0.2).flip(1), y.clamp(-0.1, 0.1).unsqueeze(1).squeeze(1)]
        return torch.cat(ends, 1), n.b(y)

    found = run(Net(function), configs.arm_tosa(estimator="minmax"))
    assert [join.all_have_steps for join in found.joins] == [False]
    assert found.decisions[0].outcome is JoinOutcome.REQUANTIZE


def test_what_its_readers_quantize_has_no_steps_yet() -> None:
    def function(x: Tensor, n: Any) -> Any:
        y = torch.cat([x, x], 1).cumsum(1)  # float
        left, right = y[:, :6], y[:, 6:]
        return n.last(torch.cat([left, right], 1)), n.c(left), n.d(right)

    for config, cut_as_integers in ((minmax_config(), True), (configs.cadence(estimator="minmax"), False)):
        (join,) = run(Net(function), config).joins
        assert len(join.inputs) == 2
        assert join.all_have_steps is cut_as_integers


def test_joins_in_a_row() -> None:
    def function(x: Tensor, n: Any) -> Any:
        first = torch.stack([n.a(x), n.b(x)], 1)
        return n.last(torch.cat([first.flatten(1)[:, :6], n.c(x)], 1)), n.d(first[:, 0])

    found = run(Net(function))
    assert len(found.decisions) == 2
    assert min(found.db) > 35


def test_a_slice_that_only_a_join_reads_and_one_that_an_op_reads() -> None:
    def function(x: Tensor, n: Any) -> Any:
        wide = torch.cat([x, 40 * x], 1)
        return n.last(torch.cat([wide[:, :6], n.a(wide[:, 6:])], 1)), n.b(wide[:, :6])

    for config in (minmax_config(), configs.xnnpack(estimator="minmax"), configs.cadence(estimator="minmax")):
        assert min(run(Net(function), config).db) > 25


def test_parts_of_a_float_tensor_joined_again() -> None:
    """Leaves that are read in float are dropped; the join must not look for them."""

    def function(x: Tensor, n: Any) -> Any:
        y = x.cumsum(1)
        return n.last(torch.cat([y[:, :4], n.a(y), y[:, 4:]], 1)[:, :12])

    found = run(Net(function))
    assert found.db[0] > 35
    assert len(found.decisions) == 1


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 1.0)])
def test_join_then_split(scales: tuple[float, float]) -> None:
    def function(x: Tensor, n: Any) -> Any:
        first, second = torch.cat([n.a(x), n.b(x)], 1).split(6, 1)
        return n.c(first), n.d(second)

    rules = BranchRules(outcomes=(Outcome.SHARED, Outcome.FLOAT_ROOT))
    found = run(Net(function, (*scales, 1.0, 1.0)), minmax_config(branches=rules))
    assert min(found.db) > 34
    taken = found.decisions[0].outcome
    if scales[0] == 1.0:
        assert taken is JoinOutcome.SHARED
        assert len({found.written(0), found.written(1), found.pair_at(0)}) == 1
    else:
        assert taken is JoinOutcome.FLOAT
        assert "for the sake of its branches" in found.decisions[0].reason
        assert found.pair_at(0) is None
        narrow, wide = found.written(0), found.written(1)
        assert narrow is not None
        assert wide is not None
        assert wide.scale > 10 * narrow.scale  # neither has widened for a join that is not quantized


def test_split_join_split() -> None:
    def function(x: Tensor, n: Any) -> Any:
        first, second = n.a(x)[:, :3], n.a(x)[:, 3:]
        third, fourth = torch.cat([second, first], 1).split(3, 1)
        return n.b(torch.cat([third, fourth], 1)), n.c(torch.cat([first, third], 1))

    found = run(Net(function))
    assert min(found.db) > 33
    assert len({found.pair_at(i) for i in range(3)} | {found.written(0)}) == 1


def test_a_wide_root_is_requantized_at_the_join() -> None:
    def function(x: Tensor, n: Any) -> Any:
        y = n.a(x)
        parts = torch.cat([y[:, :3], y[:, :3]], 1), torch.cat([y[:, 3:], y[:, 3:]], 1)
        return n.b(parts[0]), n.c(parts[1]), n.last(torch.cat([y, y], 1))

    model = Net(function)
    with torch.no_grad():
        model.a.weight[3:] *= 90
    rules = BranchRules(outcomes=(Outcome.SHARED, Outcome.WIDE_ROOT, Outcome.FLOAT_ROOT))
    found = run(model, minmax_config(branches=rules))
    assert found.db[0] > 33
    root = found.written(0)
    assert root is not None
    assert root.dtype is torch.int16
    assert {pair.dtype for i in range(3) for pair in found.edges(i) if pair} == {torch.int8}


def test_a_pool_with_one_operand_is_a_join_where_movement_is_not_quantized() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(nn.functional.max_pool2d(torch.relu(self.conv(x)), 2))
            return y

    torch.manual_seed(0)
    flow = quantize(Pool().eval(), (torch.randn(1, 1, 8, 8),), configs.cadence(estimator="minmax"))
    (pool,) = calls(flow.converted, "max_pool2d")
    source = pool.args[0]
    assert is_dequantize(source)
    (after,) = pool.users
    assert is_quantize(after)
    assert pair_of(after) == pair_of(source)


def _linked(function: Callable[..., Any], *links: tuple[str, ...], unlinked: str = "", minimum: float = 20.0) -> Flow:
    quantizer = BackendQuantizer(minmax_config())
    for link in links:
        quantizer.link(*link)
    if unlinked:
        quantizer.unlink(unlinked)
    net = Net(function, (0.1, 1.0, 1.0, 1.0)).eval()
    flow = quantize(net, BATCH, quantizer)
    outputs_of = flow.converted(*BATCH)
    assert all(sqnr_db(a, b) > minimum for a, b in zip(net(*BATCH), outputs_of, strict=True))
    return flow


def apart(x: Tensor, n: Any) -> Any:
    y, z = n.a(x), n.b(x)
    return n.c(y), n.d(z)


def test_tensors_that_the_user_links_share() -> None:
    def written(flow: Flow) -> list[Pair]:
        return [pair_of(user) for linear in calls(flow.converted, "linear")[:2] for user in linear.users]

    small, large = written(_linked(apart))
    assert small.scale < 0.5 * large.scale
    one, other = written(_linked(apart, ("linear", "linear_1"), minimum=10.0))
    assert one == other == large


def test_a_link_that_no_qparams_serve_is_an_error() -> None:
    def function(x: Tensor, n: Any) -> Any:
        return n.c(torch.relu(n.a(x))), n.d(n.b(x))

    with pytest.raises(SharingConflictError, match=r"no qparams serve all that was linked: relu .*unlink one of them"):
        _linked(function, ("relu", "linear_2"))


def test_a_tensor_that_the_user_unlinks_is_requantized_where_it_is_joined() -> None:
    def function(x: Tensor, n: Any) -> Any:
        return n.last(torch.cat([n.a(x), n.b(x)], 1)), n.c(x)

    def operands(flow: Flow) -> list[Pair]:
        return [pair_of(user) for linear in calls(flow.converted, "linear")[:2] for user in linear.users]

    assert len(set(operands(_linked(function)))) == 1
    small, large = operands(_linked(function, unlinked="linear"))
    assert small.scale < 0.5 * large.scale


def test_a_link_to_what_is_not_there_or_float_is_said() -> None:
    quantizer = BackendQuantizer(minmax_config()).link("linear", "linaer_1").unlink("cumsum")
    graph = export(Net(lambda x, n: (n.c(n.a(x)), x.cumsum(1))).eval(), BATCH)
    with pytest.warns(AnnotationWarning) as found:
        quantizer.annotate(quantizer.transform_for_annotation(graph))
    messages = [str(each.message) for each in found]
    assert any("no quantized tensor is called 'linaer_1'; nearest: linear_1" in each for each in messages)
    assert any("cumsum (cumsum) stays float: only quantized tensors" in each for each in messages)
