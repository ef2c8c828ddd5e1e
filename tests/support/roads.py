"""Models whose plans have something to decide, and the three roads from data to qparams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from quantmark import configs
from quantmark.annotators.measure import fill_ranges, observe_ranges
from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.configs.base import BackendConfig, BlockRules, EstimatorName
from quantmark.observers.qparams import INT16_SYMMETRIC
from quantmark.observers.rules import BranchRules, Conflict, HoistRule, JoinOutcome, JoinRules, Outcome
from quantmark.observers.table import RangeTable
from support.flow import minmax_config

Batches = list[tuple[Tensor, ...]]
_LIB = torch.ops.quantized_decomposed


class Packed(nn.Module):
    """Slices of an input with a linear + relu each; the parts are joined, and a pool reads the join."""

    def __init__(self, parts: int = 4) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True)) for _ in range(parts))
        self.last = nn.Linear(5 * parts, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = [tower(x[:, 4 * i : 4 * i + 4]) for i, tower in enumerate(self.towers)]
        y: Tensor = self.last(torch.cat(found, 1))
        return y


class Uneven(nn.Module):
    """A conv with narrow and wide channels, cut in two; one part also meets a relu6 in a cat."""

    def __init__(self) -> None:
        super().__init__()
        self.producer, self.side = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(2, 4, 1)
        self.narrow, self.wide = nn.Conv2d(4, 3, 1), nn.Conv2d(4, 3, 1)
        self.mixed = nn.Conv2d(8, 2, 1)
        with torch.no_grad():
            self.producer.weight[4:] *= 62

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        narrow, wide = self.producer(x).split(4, 1)
        side = F.relu6(self.side(x))
        return self.narrow(narrow), self.wide(wide), self.mixed(torch.cat([narrow, side], 1))


class Residual(nn.Module):
    """conv-bn-relu, residual add with a constant, pool, a module that is called twice, a mean, a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer("offset", torch.rand(4, 1, 1) - 0.2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(self.stem(x), 2)
        y = F.relu(y + self.twice(F.hardtanh(self.twice(y), 0.0, 3.0)) + self.offset) * 0.5
        z: Tensor = torch.sigmoid(self.head(y.mean((2, 3))))
        return z


@dataclass(frozen=True)
class Case:
    """A model with batches that it is calibrated on, and the config that it is quantized with."""

    make: Callable[[], nn.Module]
    batches: Callable[[], Batches]
    config: BackendConfig

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval()


def columns(*scales: float) -> Callable[[], Batches]:
    """Batches of [8, 4 * n], four columns to a scale, whose ends are the same for all but for the scale."""

    def batches() -> Batches:
        torch.manual_seed(1)
        factor = torch.tensor(scales).repeat_interleave(4)
        found: Batches = []
        for i in range(3):
            values = (torch.randn(8, len(factor)) + 0.3 * i).clamp(-2.0, 2.5)
            values[0], values[1] = -2.0 - i, 2.5
            found.append((values * factor,))
        return found

    return batches


def images() -> Batches:
    torch.manual_seed(2)
    return [(torch.randn(2, 2, 8, 8) * (1 + i),) for i in range(3)]


def _with_rules(**fields: Any) -> BackendConfig:
    return minmax_config(branches=BranchRules(**fields))


_ALL = (Outcome.SHARED, Outcome.INDEPENDENT, Outcome.WIDE_ROOT, Outcome.FLOAT_ROOT)
_FLOAT = (Outcome.SHARED, Outcome.INDEPENDENT, Outcome.FLOAT_ROOT)
_MIXED = columns(1.0, 1.0, 60.0, 1.01)
_UNFOLDING = minmax_config(
    blocks=BlockRules(erase_activations=True), joins=JoinRules(outcomes=(JoinOutcome.SHARED, JoinOutcome.UNFOLD))
)
CASES: dict[str, Case] = {
    "alike": Case(Packed, columns(1.0, 1.0, 1.0, 1.0), minmax_config()),
    "independent": Case(Packed, _MIXED, minmax_config()),
    "int16": Case(Packed, _MIXED, minmax_config(INT16_SYMMETRIC)),
    "xnnpack": Case(Residual, images, configs.xnnpack()),
    "residual": Case(Residual, images, minmax_config()),
    "shared root": Case(Uneven, images, _with_rules()),
    "wide root": Case(Uneven, images, _with_rules(outcomes=_ALL)),
    "unfolded": Case(Uneven, images, _UNFOLDING),
    "float root": Case(Uneven, images, _with_rules(outcomes=_FLOAT)),
    "cadence float": Case(Packed, _MIXED, configs.cadence(hoist=HoistRule.ALWAYS)),
    "cadence union": Case(Packed, _MIXED, configs.cadence(hoist=HoistRule.ALWAYS, conflict=Conflict.UNION)),
    "cadence identical": Case(Packed, _MIXED, configs.cadence(hoist=HoistRule.IDENTICAL)),
    "cadence conv": Case(Uneven, images, configs.cadence()),
}


def with_estimator(config: BackendConfig, estimator: EstimatorName) -> BackendConfig:
    return replace(config, activation=replace(config.activation, estimator=estimator))


def calibrate(prepared: GraphModule, batches: Batches) -> GraphModule:
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    return prepared


def prepare(
    program: torch.export.ExportedProgram, config: BackendConfig, table: RangeTable | None = None
) -> GraphModule:
    found = prepare_pt2e(program.module(), BackendQuantizer(config, ranges=table))
    assert isinstance(found, GraphModule)
    return found


def one_pass(program: torch.export.ExportedProgram, config: BackendConfig, batches: Batches) -> GraphModule:
    return convert_pt2e(calibrate(prepare(program, config), batches))


def ranges_first(program: torch.export.ExportedProgram, config: BackendConfig, table: RangeTable) -> GraphModule:
    return convert_pt2e(prepare(program, config, table))


def filled(program: torch.export.ExportedProgram, config: BackendConfig, table: RangeTable) -> GraphModule:
    prepared = prepare(program, config)
    fill_ranges(prepared, table)
    return convert_pt2e(prepared)


def measured(
    program: torch.export.ExportedProgram, batches: Batches, estimator: Literal["minmax", "histogram"]
) -> RangeTable:
    """The table as it comes back from a file."""
    return RangeTable.from_json(observe_ranges(program, batches, estimator=estimator).to_json())


def qparams(converted: GraphModule) -> Counter[tuple[object, ...]]:
    """How often each set of qparams is quantized with, per channel and per tensor."""
    found: Counter[tuple[object, ...]] = Counter()
    for node in converted.graph.nodes:
        if node.target is _LIB.quantize_per_tensor.default:
            found[node.args[1:6]] += 1
        elif node.target is _LIB.quantize_per_channel.default:
            tensors = [getattr(converted, str(arg.target)) for arg in node.args[1:3]]
            found[tuple(tuple(t.tolist()) for t in tensors)] += 1
    return found


def same(one: GraphModule, other: GraphModule, batches: Batches) -> bool:
    """Tell whether two converted graphs have the same qparams and give bit-identical outputs."""
    flat = [torch.utils._pytree.tree_leaves(graph(*batch)) for batch in batches for graph in (one, other)]
    equal = all(
        torch.equal(a, b) for a, b in zip(flat[::2], flat[1::2], strict=True) for a, b in zip(a, b, strict=True)
    )
    return equal and set(qparams(one)) == set(qparams(other))
