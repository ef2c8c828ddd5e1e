"""What is foreseen of Cadence's hoist against what executorch's pass does, over many ways of cutting a tensor."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Node

from quantmark import BackendQuantizer, configs
from quantmark.observers.rules import Conflict, HoistRule
from support.flow import Flow, quantize
from support.hoist import HoistAlways, Lowered, dequantizes, identical, lower, quantizes, transformed
from support.topologies import FLOAT, KEPT_OUT_ON_PURPOSE, STRUCTURES, TOPOLOGIES, Cut, Many, Q, spread

NAMES = list(TOPOLOGIES)
CHUNKS = [NAMES[start : start + 16] for start in range(0, len(NAMES), 16)]
QUICK = len(STRUCTURES) // 16  # chunks of structures alone


def cadence(**options: object) -> configs.BackendConfig:
    return configs.cadence(estimator="minmax", **options)  # type: ignore[arg-type]


def below(input_: Node) -> set[Node]:
    found: set[Node] = set()
    front = [input_]
    while front:
        node = front.pop()
        if node not in found:
            found.add(node)
            front += node.users
    return found


def requantizes(lowered: Lowered, index: int) -> int:
    """The quantize ops below an input that stand directly under a dequantize: what a hoist leaves behind."""
    inputs = [n for n in lowered.graph.nodes if n.op == "placeholder" and n.name.startswith("x_")]
    return sum(quantizes(n) and dequantizes(n.args[0]) for n in below(inputs[index]))


def foreseen(flow: Flow, index: int) -> bool:
    """Whether a hoist among differing qparams was foreseen anywhere below an input."""
    assert isinstance(flow.quantizer, BackendQuantizer)
    starts = {h.where.split()[0] for part in flow.quantizer.record.components for h in part.plan.hoists}
    inputs = [n for n in flow.prepared.graph.nodes if n.op == "placeholder"]
    return any(node.name in starts for node in below(inputs[index]))


def run(cuts: list[Cut], config: configs.BackendConfig) -> tuple[Flow, Lowered, Lowered]:
    inputs = tuple(spread(seed) for seed in range(len(cuts)))
    flow = quantize(Many(cuts).eval(), inputs, config, keep=True)
    before = lower(flow.converted, inputs)
    return flow, before, transformed(before.edge, inputs, HoistAlways)


def by_cut(cuts: list[Cut], before: Lowered, after: Lowered) -> list[bool]:
    """For each cut, whether its outputs are bit-identical."""
    same = iter([torch.equal(a, b) for a, b in zip(before.outputs, after.outputs, strict=True)])
    return [all(list(islice(same, len(cut(spread(0)))))) for cut in cuts]


@pytest.mark.parametrize("names", CHUNKS, ids=lambda names: f"{names[0]}..{names[-1]}")
def test_the_pass_fires_exactly_where_foreseen(names: list[str]) -> None:
    """Nothing is done about the hoist here: where it was not foreseen, the real pass must change no value."""
    cuts = [TOPOLOGIES[name] for name in names]
    flow, before, after = run(cuts, cadence(hoist=HoistRule.IDENTICAL, max_sharing_loss_db=0.0))
    same = by_cut(cuts, before, after)
    for index, name in enumerate(names):
        fired = requantizes(after, index) > requantizes(before, index)
        if foreseen(flow, index):
            assert fired or name in KEPT_OUT_ON_PURPOSE, f"{name}: a hoist was foreseen, but the pass does not fire"
        else:
            assert same[index], f"{name}: the pass hoists, and it was not foreseen"


@pytest.mark.parametrize(
    ("names", "conflict"),
    [
        pytest.param(names, conflict, marks=[] if index < QUICK and conflict is Conflict.FLOAT else pytest.mark.slow)
        for index, names in enumerate(CHUNKS)
        for conflict in Conflict
    ],
    ids=lambda value: value.name if isinstance(value, Conflict) else f"{value[0]}..{value[-1]}",
)
def test_the_pass_changes_no_value(names: list[str], conflict: Conflict) -> None:
    cuts = [TOPOLOGIES[name] for name in names]
    _, before, after = run(cuts, cadence(hoist=HoistRule.ALWAYS, conflict=conflict))
    changed = [name for name, same in zip(names, by_cut(cuts, before, after), strict=True) if not same]
    assert not changed


class Left(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :8]


class Halves(nn.Module):
    """Two halves, the left one cut by a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Left()
        self.relu = nn.ReLU()

    def forward(self, x_0: Tensor) -> list[Tensor]:
        return [self.relu(self.left(x_0)), Q(x_0[:, 8:])]


@pytest.mark.parametrize(
    ("name", "config"),
    [("left", None), ("relu", cadence(activation="int16")), ("relu", None)],
    ids=["movement kept out", "one branch int16", "one branch float"],
)
def test_rules_by_module_don_t_hide_a_branch_from_the_pass(name: str, config: configs.BackendConfig | None) -> None:
    """The pass knows nothing of modules: it looks through a slice that a rule keeps out of quantization."""
    quantizer = BackendQuantizer(cadence(hoist=HoistRule.ALWAYS)).set_module_name(name, config)
    x = (spread(0),)
    before = lower(quantize(Halves().eval(), x, quantizer).converted, x)
    assert identical(before.outputs, transformed(before.edge, x, HoistAlways).outputs)
    assert len(before.below(before.root(0))) == 1, "the other one stays float"


# -- topologies that nobody thought of -------------------------------------------------------------------------

MOVES: dict[str, Cut] = {
    "left": lambda x: [x[:, : (x.shape[1] + 1) // 2]],
    "right": lambda x: [x[:, x.shape[1] // 2 :]],
    "top": lambda x: [x[: (x.shape[0] + 1) // 2]],
    "split": lambda x: list(x.split((x.shape[1] + 1) // 2, 1)),
    "tensor_split": lambda x: list(x.tensor_split(2, 1) if x.shape[1] > 1 else [x]),
    "rows": lambda x: [row.unsqueeze(0) for row in x.unbind(0)[:2]],
    "transpose": lambda x: [x.T],
    "fold": lambda x: [x.reshape(-1, 1)],
    "clone": lambda x: [x.clone()],
    "cast": lambda x: [x.to(torch.float32)],
    "flip": lambda x: [x.flip(0)],
}
READERS: dict[str, Cut] = {
    "quantized": lambda x: [Q(x)],
    "sum": lambda x: [x + x],
    "join": lambda x: [Q(torch.cat([x, x], 1))],
    "float": lambda x: [FLOAT(x)],
}
Tree = tuple[str, list["Tree"]]
READ: st.SearchStrategy[Tree] = st.sampled_from(["quantized"] * 6 + ["sum", "join", "float"]).map(
    lambda name: (name, [])
)
TREES: st.SearchStrategy[Tree] = st.recursive(
    READ, lambda below: st.tuples(st.sampled_from(sorted(MOVES)), st.lists(below, min_size=1, max_size=2))
)
FAMILIES = st.lists(TREES, min_size=2, max_size=2)


def grown(trees: list[Tree]) -> Cut:
    def cut(x: Tensor) -> list[Tensor]:
        found = []
        for name, children in trees:
            if name in READERS:
                found += READERS[name](x)
            else:
                found += [y for part in MOVES[name](x) for y in grown(children)(part)]
        return found

    return cut


@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(FAMILIES, min_size=3, max_size=3), st.sampled_from(Conflict))
def test_the_pass_changes_no_value_of_grown_topologies(families: list[list[Tree]], conflict: Conflict) -> None:
    _, before, after = run([grown(trees) for trees in families], cadence(hoist=HoistRule.ALWAYS, conflict=conflict))
    assert identical(before.outputs, after.outputs)
