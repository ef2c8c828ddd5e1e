"""Fused blocks, head by head and tail by tail: one model holds a head with every tail behind its own copy of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quantmark import configs
from quantmark.annotators.graph import op_name
from quantmark.configs.base import BackendConfig, BlockRules, SymmetricActivation, WeightConfig
from quantmark.configs.ops import HEADS as RULES
from quantmark.observers.qparams import INT16_SYMMETRIC
from support.flow import (
    Inputs,
    Pair,
    constant,
    export,
    is_dequantize,
    minmax_config,
    outputs,
    pair_of,
    quantize,
    quantized_value,
    sqnr_db,
)

INF = float("inf")
PER_CHANNEL = torch.ops.quantized_decomposed.dequantize_per_channel.default


class Called(nn.Module):
    """A function as a module, so that a weight can come with it."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape) / 4) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


@dataclass(frozen=True)
class Head:
    """How a head is made, what it takes, how a batch norm follows, and its weight's channel axis."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    norm: type[nn.Module] | None = None
    axis: int = 0
    channels: int = 6


HEADS: dict[str, Head] = {
    "conv1d": Head(lambda: nn.Conv1d(4, 6, 3), (2, 4, 9), nn.BatchNorm1d),
    "conv1d_same": Head(lambda: nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9), nn.BatchNorm1d),
    "conv2d": Head(lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 6, 6), nn.BatchNorm2d),
    "conv2d_no_bias": Head(lambda: nn.Conv2d(4, 6, 3, bias=False), (2, 4, 6, 6), nn.BatchNorm2d),
    "conv2d_same": Head(lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 6, 6), nn.BatchNorm2d),
    "conv2d_valid": Head(lambda: nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 6, 6), nn.BatchNorm2d),
    "conv2d_keywords": Head(
        lambda: Called(lambda x, w, b: F.conv2d(x, bias=b, weight=w, padding=1), (6, 4, 3, 3), (6,)),
        (2, 4, 6, 6),
    ),
    "conv2d_unbatched": Head(lambda: nn.Conv2d(4, 6, 3), (4, 6, 6)),
    "conv3d": Head(lambda: nn.Conv3d(2, 6, 3, padding=1), (2, 2, 4, 4, 4), nn.BatchNorm3d),
    "depthwise": Head(lambda: nn.Conv2d(6, 6, 3, groups=6), (2, 6, 6, 6), nn.BatchNorm2d),
    "grouped": Head(lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2), (2, 4, 6, 6), nn.BatchNorm2d),
    "conv_transpose1d": Head(lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 5), nn.BatchNorm1d, 1),
    "conv_transpose2d": Head(lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 4, 4), nn.BatchNorm2d, 1),
    "conv_transpose3d": Head(lambda: nn.ConvTranspose3d(2, 6, 2), (2, 2, 3, 3, 3), nn.BatchNorm3d, 1),
    "grouped_transposed": Head(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 4, 4), None, 1, 3),
    "linear": Head(lambda: nn.Linear(5, 6), (7, 5), nn.BatchNorm1d),
    "linear_3d": Head(lambda: nn.Linear(5, 6, bias=False), (2, 7, 5)),
    "addmm": Head(lambda: Called(lambda x, w, b: torch.addmm(b, x, w), (5, 6), (6,)), (7, 5), None, 1),
    "mm": Head(lambda: Called(torch.mm, (5, 6)), (7, 5), None, 1),
    "matmul": Head(lambda: Called(operator.matmul, (5, 6)), (2, 7, 5), None, 1),
}


@dataclass(frozen=True)
class Tail:
    """An activation and the bounds that it clamps to."""

    make: Callable[[], nn.Module]
    lower: float = -INF
    upper: float = INF
    fusable: bool = True
    jumps: float = 0.0  # dB less to ask for, because the function has a jump


def _tail(function: Callable[[Tensor], Tensor], lower: float = -INF, upper: float = INF, fusable: bool = True) -> Tail:
    return Tail(lambda: Called(function), lower, upper, fusable)


ATEN = torch.ops.aten
TAILS: dict[str, Tail] = {
    "none": Tail(nn.Identity),
    "relu": _tail(torch.relu, 0),
    "relu_": _tail(torch.relu_, 0),
    "F.relu": _tail(F.relu, 0),
    "nn.ReLU(inplace)": Tail(lambda: nn.ReLU(inplace=True), 0),
    "F.relu6": _tail(F.relu6, 0, 6),
    "nn.ReLU6": Tail(nn.ReLU6, 0, 6),
    "hardtanh(0,6)": _tail(lambda y: F.hardtanh(y, 0.0, 6.0), 0, 6),
    "hardtanh keywords": _tail(lambda y: F.hardtanh(y, max_val=0.5, min_val=0.0), 0, 0.5),
    "hardtanh": Tail(nn.Hardtanh, -1, 1),
    "hardtanh_(-.5,.25)": _tail(lambda y: F.hardtanh_(y, -0.5, 0.25), -0.5, 0.25),
    "clamp(0,6)": _tail(lambda y: torch.clamp(y, 0, 6), 0, 6),
    "clamp(min=0)": _tail(lambda y: y.clamp(min=0), 0),
    "clamp_(max=.75)": _tail(lambda y: y.clamp_(max=0.75), upper=0.75),
    "clamp_min": _tail(lambda y: torch.clamp_min(y, 0.0), 0),
    "clamp_max_": _tail(lambda y: y.clamp_max_(0.5), upper=0.5),
    "clip keywords": _tail(lambda y: torch.clip(y, max=0.5, min=-0.25), -0.25, 0.5),
    "threshold": _tail(lambda y: F.threshold(y, 0.0, 0.0), 0),
    "nn.Threshold(inplace)": Tail(lambda: nn.Threshold(0.0, 0.0, inplace=True), 0),
    "relu, clamp(max)": _tail(lambda y: y.relu().clamp(max=0.4), 0, 0.4),
    "clamp(max), relu": _tail(lambda y: y.clamp(max=0.4).relu(), 0, 0.4),
    "relu6, relu": _tail(lambda y: F.relu6(y).relu(), 0, 6),
    "hardtanh, relu": _tail(lambda y: F.hardtanh(y).relu_(), 0, 1),
    "dropout, relu": Tail(lambda: nn.Sequential(nn.Dropout(), nn.ReLU()), 0),
    "identity, relu": Tail(lambda: nn.Sequential(nn.Identity(), nn.ReLU()), 0),
    "alias, relu": _tail(lambda y: ATEN.alias(y).relu(), 0),
    "clone, relu_": _tail(lambda y: y.clone().relu_(), 0),
    "contiguous, dropout, relu6": _tail(lambda y: F.relu6(F.dropout(y.contiguous(), training=False)), 0, 6),
    # A block all the same, but the activation stays outside.
    "clamp(.5,6)": _tail(lambda y: y.clamp(0.5, 6), 0.5, 6, fusable=False),
    "clamp(max=-.1)": _tail(lambda y: y.clamp(max=-0.1), upper=-0.1, fusable=False),
    "threshold(.1,0)": Tail(lambda: nn.Threshold(0.1, 0.0), fusable=False, jumps=10.0),
    "sigmoid": _tail(torch.sigmoid, fusable=False),
}


class Towers(nn.Module):
    """One copy of the head for each tail, all reading one input."""

    def __init__(self, head: Head, norm: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList([head.make() for _ in TAILS])
        self.norms = nn.ModuleList([head.norm(6) if norm and head.norm else nn.Identity() for _ in TAILS])
        self.tails = nn.ModuleList([tail.make() for tail in TAILS.values()])
        for module in self.norms.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                for values, low, high in (
                    (module.running_mean, -0.3, 0.3),
                    (module.running_var, 0.5, 2),
                    (module.weight, 0.5, 1.5),
                    (module.bias, -0.3, 0.3),
                ):
                    assert isinstance(values, Tensor)
                    nn.init.uniform_(values, low, high)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t(n(h(x))) for h, n, t in zip(self.heads, self.norms, self.tails, strict=True))


@functools.lru_cache(maxsize=1)
def towers(name: str, norm: bool) -> tuple[GraphModule, Inputs, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    head = HEADS[name]
    model = Towers(head, norm).eval()
    inputs = (torch.randn(head.shape),)
    with torch.no_grad():
        return export(model, inputs), inputs, model(*inputs)


EXACT = WeightConfig(search=False)
FINE = WeightConfig(scheme=INT16_SYMMETRIC)
SEPARATE = BlockRules(symmetric_activation=SymmetricActivation.SEPARATE)

# The config, and the least SQNR of any tail in dB. What int8 weights leave hides what int16 activations can do.
CONFIGS: dict[str, tuple[BackendConfig, float]] = {
    "int8": (minmax_config(weight=EXACT), 34.0),
    "int16": (minmax_config(INT16_SYMMETRIC, weight=EXACT), 38.0),
    "int16_separate": (minmax_config(INT16_SYMMETRIC, weight=FINE, blocks=SEPARATE), 75.0),
    "xnnpack": (configs.xnnpack(estimator="minmax"), 34.0),
}
CASES = [
    (name, norm, config)
    for name, head in HEADS.items()
    for norm in ((False, True) if head.norm else (False,))
    for config in CONFIGS
    if config != "int16_separate" or not norm
    if config != "xnnpack" or not name.endswith(("3d", "matmul")) or name == "linear_3d"
]


@pytest.mark.parametrize(
    ("head", "norm", "config"), CASES, ids=[f"{name}{'-bn' * norm}-{config}" for name, norm, config in CASES]
)
def test_every_tail_behind(head: str, norm: bool, config: str) -> None:
    graph, inputs, expected = towers(head, norm)
    rules, floor = CONFIGS[config]
    converted = quantize(graph, inputs, rules).converted
    with torch.no_grad():
        actual = converted(*inputs)
    wrong = {}
    for name, value, want, got in zip(TAILS, outputs(converted), expected, actual, strict=True):
        problems = troubles(Chain.above(value), HEADS[head], TAILS[name], rules)
        if got.dtype != want.dtype or got.shape != want.shape:
            problems.append(f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}")
        sqnr = sqnr_db(want, got)
        if sqnr < floor - TAILS[name].jumps:
            problems.append(f"{sqnr:.1f} dB, floor {floor} dB")
        if problems:
            wrong[name] = problems
    assert wrong == {}


@dataclass
class Chain:
    """What stands above an output, cut where it is quantized; from the output upwards."""

    pairs: list[Pair | None]
    segments: list[list[Node]]

    @classmethod
    def above(cls, node: Node) -> Chain:
        chain = cls([], [])
        while True:
            if is_dequantize(node):
                chain.pairs.append(pair_of(node))
                chain.segments.append([])
                node = quantized_value(node)
            elif not chain.segments:
                chain.pairs.append(None)
                chain.segments.append([])
            chain.segments[-1].append(node)
            rule = RULES.get(op_name(node))
            if rule is not None:
                return chain
            (node,) = (n for n in node.args if isinstance(n, Node))

    @property
    def head(self) -> Node:
        return self.segments[-1][-1]


def is_fused(head: str, tail: Tail, rules: BackendConfig) -> bool:
    """Whether saturation of the head's output may stand for the tail, by the config's rules."""
    if not tail.fusable or (tail.lower, tail.upper) == (-INF, INF):
        return tail.fusable
    if rules.name == "xnnpack" and (tail.lower == -INF or head in {"addmm", "mm"}):
        return False  # an upper bound alone is spelled clamp, which is not fused there; nothing is into these heads
    if not rules.activation.scheme.symmetric:
        return True
    if tail.lower == 0.0:
        return rules.blocks.symmetric_activation is SymmetricActivation.ONE_SIDED
    return tail.lower == -tail.upper


def troubles(chain: Chain, head: Head, tail: Tail, rules: BackendConfig) -> list[str]:
    """What is wrong with a block and its tail."""
    found = []
    pair = chain.pairs[0]
    fused = is_fused(op_name(chain.head), tail, rules)
    whole = len(chain.segments) == 1 if fused else len(chain.segments) > 1 and len(chain.segments[-1]) == 1
    if not whole or chain.pairs[-1] is None or (fused and pair is None):
        return [f"cut into {chain.segments} by {chain.pairs}, want {'one block' if fused else 'the head alone'}"]
    rule = RULES[op_name(chain.head)]
    source: Any = chain.head.args[rule.input]
    weight: Any = chain.head.args[rule.weight]
    if not is_dequantize(source) or not is_dequantize(weight):
        found.append(f"input {source} and weight {weight} should be quantized")
    elif not (isinstance(weight.args[0], Node) and weight.args[0].op == "get_attr"):
        found.append("the quantized weight is not folded to a constant")
    elif rules.weight.per_channel and weight.target is PER_CHANNEL:
        shape = list(constant(weight.args[1]).shape)
        if weight.args[3] != head.axis or shape != [head.channels]:
            found.append(f"weight axis {weight.args[3]}, scales {shape}, want {head.axis}, [{head.channels}]")
    elif not (rules.name == "xnnpack" and (op_name(chain.head) == "mm" or head.channels != 6)):
        found.append(f"the weight is quantized by {weight.target}")
    for each in (p for p in chain.pairs if p is not None):
        scheme = rules.activation.scheme
        if each.dtype != scheme.dtype or each.quant_max != scheme.quant_max:
            found.append(f"qparams {each} are not of {scheme}")
    if fused and pair is not None:
        slack = pair.scale * 0.51
        if tail.lower == 0.0 and pair.zero_point != pair.quant_min:
            found.append(f"zero_point {pair.zero_point} is not quant_min {pair.quant_min}")
        if pair.largest > tail.upper + slack or pair.smallest < tail.lower - slack:
            found.append(f"representable [{pair.smallest}, {pair.largest}] leaves [{tail.lower}, {tail.upper}]")
    return found
