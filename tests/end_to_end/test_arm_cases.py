"""Arm: activations in every position and spelling, through the partitioner onto TOSA's reference model.

Each is one delegate with no float op in it, and on single blocks within one step of the converted graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantmark import BackendQuantizer, check, configs
from quantmark.annotators.blocks import clamp_bounds
from quantmark.configs.arm import ActivationName
from quantmark.configs.base import BackendConfig
from quantmark.configs.ops import CLAMPS
from support.flow import calls, is_dequantize, is_quantize, outputs, pair_of, quantize, sqnr_db
from support.tosa import OnReference, run_on_reference

pytestmark = [pytest.mark.arm, pytest.mark.timeout(600)]
WIDE = "TOSA-1.0+INT+int16"
Layers = nn.ModuleList


class Net(nn.Module):
    """A function over layers."""

    def __init__(self, forward: Callable[[Layers, Tensor], Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = Layers(layers), forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layers, x)


def conv() -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1)


IMAGE, SIGNAL, ROWS = (2, 4, 8, 8), (2, 4, 12), (2, 4)


def permuted(m: Layers, x: Tensor) -> Any:
    return F.relu(m[0](x)).permute(0, 2, 1) + m[1](x).permute(0, 2, 1)


BLOCKS: dict[tuple[int, ...], dict[str, Callable[[], nn.Module]]] = {
    IMAGE: {
        "relu6 meets a signed branch": lambda: Net(
            lambda m, x: torch.cat([F.relu6(m[0](x)), m[1](x)], 1), conv(), conv()
        ),
        "in-place relu": lambda: nn.Sequential(conv(), nn.ReLU(inplace=True)),
        "relu behind a residual add": lambda: Net(lambda m, x: F.relu(m[0](x) + x), conv()),
        "relu6 behind sub": lambda: Net(lambda m, x: F.relu6(x - m[0](x)), conv()),
        "relu behind mul": lambda: Net(lambda m, x: F.relu(x * m[0](x)), conv()),
        "hardtanh": lambda: nn.Sequential(conv(), nn.Hardtanh(0.0, 0.5)),
        "signed hardtanh": lambda: nn.Sequential(conv(), nn.Hardtanh(-0.25, 0.5)),
        "clamp": lambda: Net(lambda m, x: m[0](x).clamp(0.0, 0.5), conv()),
        "clamp at the top": lambda: Net(lambda m, x: m[0](x).clamp(max=0.25), conv()),
        "clamp_min": lambda: Net(lambda m, x: m[0](x).clamp_min(0.0), conv()),
        "dropout between": lambda: nn.Sequential(conv(), nn.Dropout(), nn.ReLU()),
    },
    ROWS: {
        "F.relu6": lambda: Net(lambda m, x: F.relu6(m[0](x)), nn.Linear(4, 4)),
        "relu, then relu6": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU6()),
    },
    SIGNAL: {"conv1d, permute, add": lambda: Net(permuted, nn.Conv1d(4, 6, 3), nn.Conv1d(4, 6, 3))},
}
FEW = ["in-place relu", "relu behind a residual add"]


class Side(nn.Module):
    """Blocks that read the same input, each an output."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(block(x) for block in self.blocks)


def ran(names: list[str], shape: tuple[int, ...], config: BackendConfig, least_db: float) -> OnReference:
    """Run blocks on the reference model: each output within one step of the converted graph's."""
    torch.manual_seed(0)
    model = Side([BLOCKS[shape][name]() for name in names]).eval()
    batches = [(torch.randn(shape),) for _ in range(6)]
    flow = quantize(model, batches[0], config, batches=batches, guards=False)
    found = run_on_reference(flow.converted, batches[:2], "TOSA-1.0+INT" if config.rewrite == "tosa" else WIDE)
    assert (found.delegates, found.outside) == (1, set())
    steps = [pair_of(out).scale for out in outputs(flow.converted)]
    for batch, eager, reference in zip(batches, found.eager, found.reference, strict=False):
        for name, step, exact, one, other in zip(names, steps, model(*batch), eager, reference, strict=True):
            assert (one - other).abs().max() <= 1.01 * step, name
            assert sqnr_db(exact, other) >= least_db, name
    return found


@pytest.mark.parametrize("shape", BLOCKS, ids=["images", "rows", "signals"])
def test_every_spelling_is_folded_in_one_delegate_within_one_step(shape: tuple[int, ...]) -> None:
    found = ran(list(BLOCKS[shape]), shape, configs.arm_tosa(), 28)
    assert found.ops["CLAMP"] == 0


@pytest.mark.parametrize(("activation", "least_db"), [("sym8", 28), ("int16", 45)])
def test_a_symmetric_relu_is_no_saturation_and_stays_a_clamp(activation: ActivationName, least_db: float) -> None:
    found = ran(FEW, IMAGE, configs.arm_tosa(activation=activation), least_db)
    assert found.ops["CLAMP"] == len(FEW)


@pytest.mark.parametrize("clamps", [False, True])
def test_an_activation_that_meets_signed_values_is_not_lost(clamps: bool) -> None:
    config = configs.arm_tosa(clamp_at_joins=clamps)
    torch.manual_seed(0)
    nets = [
        Net(lambda m, x: torch.cat([F.relu(m[0](x)), m[1](x)], 1), conv(), conv()),
        Net(lambda m, x: torch.cat([F.hardtanh(m[0](x), 0.0, 6.0), m[1](x)], 1), conv(), conv()),
        Net(lambda m, x: torch.cat([F.relu(m[0](x)), x], 1), conv()),
    ]
    model = Side(list(nets)).eval()
    batches = [(torch.randn(32, *IMAGE[1:]),) for _ in range(6)]
    flow = quantize(model, batches[0], config, batches=batches, guards=False)
    assert check(flow.converted, config).is_safe
    found = run_on_reference(flow.converted, batches[:1])
    assert (found.delegates, found.outside) == (1, set())
    # One RESCALE behind each of five convolutions; those at the edges of the joins are what the CLAMPs replace.
    assert (found.ops["CLAMP"], found.ops["RESCALE"]) == ((3, 5) if clamps else (0, 8))
    for exact, got in zip(model(*batches[0]), found.reference[0], strict=True):
        assert sqnr_db(exact, got) >= 36  # 4.5 to 7 dB with TOSAQuantizer
        assert got[:, :4].min() == 0.0


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("shape", BLOCKS, ids=["images", "rows", "signals"])
def test_both_generations_of_arms_fusing_pass_leave_what_is_right(shape: tuple[int, ...], erase: bool) -> None:
    """The pass looks for head, relu or hardtanh, quantize.

    The older fuses where zero_point == quant_min and the upper bound is the last code, the newer (executorch 1.5.1)
    whatever the zero point is. Both are right where those hold, or where nothing is left for them to find.
    """
    torch.manual_seed(0)
    model = Side([make() for make in BLOCKS[shape].values()]).eval()
    batches = [(torch.randn(shape),) for _ in range(6)]
    config = configs.arm_tosa()
    config = replace(config, blocks=replace(config.blocks, erase_activations=erase))
    converted = quantize(model, batches[0], config, batches=batches, guards=False).converted
    met = 0
    for node in calls(converted, *CLAMPS):
        (source,), (reader,) = node.all_input_nodes, node.users
        if is_dequantize(source):
            assert pair_of(source) == pair_of(reader)
            continue
        assert not erase, "an activation was left behind its head"
        bounds = clamp_bounds(node)
        if bounds is not None and bounds.lower == 0.0 and is_quantize(reader):
            met += 1
            found = pair_of(reader)
            assert found.zero_point == found.quant_min
            if bounds.upper is not None:
                assert round(bounds.upper / found.scale) + found.zero_point >= found.quant_max
    assert erase or met


def test_pools_of_parts_are_not_rounded_once_more_where_they_are_joined() -> None:
    torch.manual_seed(0)
    model = Side([nn.AdaptiveAvgPool2d((1, 6)), nn.AdaptiveAvgPool2d((3, 5))]).eval()  # lowered: pools of slices, cat
    batch = (torch.rand(1, 3, 15, 20),)
    flow = quantize(model, batch, configs.arm_tosa())
    found = run_on_reference(flow.converted, [batch])
    assert (found.delegates, found.outside, found.ops["RESCALE"]) == (1, set(), 0)
    steps = [pair_of(out).scale for out in outputs(flow.converted)]
    for step, eager, reference in zip(steps, found.eager[0], found.reference[0], strict=True):
        assert (eager - reference).abs().max() <= 1.01 * step


def test_packed_inputs_keep_each_branch() -> None:
    torch.manual_seed(0)
    towers = [nn.Linear(8, 6) for _ in range(5)]
    net = Net(lambda m, x: tuple(F.relu(m[i](x[:, 8 * i : 8 * i + 8])) for i in range(5)), *towers).eval()
    batches = [(torch.rand(64, 40) * 2.7 - 1,) for _ in range(6)]
    for (batch,) in batches:
        batch[:, 16:24] = torch.rand(64, 8) * 100
    flow = quantize(net, batches[0], configs.arm_tosa(), batches=batches, guards=False)
    found = run_on_reference(flow.converted, batches[:1])
    assert found.delegates == 1
    for exact, got in zip(net(*batches[0]), found.reference[0], strict=True):
        assert sqnr_db(exact, got) >= 40  # 11 to 17 dB on the narrow ones where one quantize serves all


def test_arms_own_quantizer_takes_the_rest() -> None:
    from executorch.backends.arm.quantizer.arm_quantizer import TOSAQuantizer, get_symmetric_quantization_config
    from executorch.backends.arm.tosa import TosaSpecification

    torch.manual_seed(0)
    theirs = TOSAQuantizer(TosaSpecification.create_from_string("TOSA-1.0+INT"))
    theirs.set_global(get_symmetric_quantization_config())
    net = Net(lambda m, x: m[1](F.relu(m[0](x)).round() * 0.5), conv(), conv()).eval()
    batches = [(4 * torch.randn(IMAGE),) for _ in range(6)]
    alone, both = (
        quantize(net, batches[0], BackendQuantizer(configs.arm_tosa(rest=rest)), batches=batches, guards=False)
        for rest in (None, theirs)
    )
    assert run_on_reference(alone.converted, batches[:1]).outside  # round is in no table of ours
    found = run_on_reference(both.converted, batches[:1])
    assert (found.delegates, found.outside) == (1, set())
    assert sqnr_db(found.eager[0][0], found.reference[0][0]) > 40
    assert sqnr_db(net(*batches[0]), found.reference[0][0]) > 15
