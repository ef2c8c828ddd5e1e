"""Sensitivity, held against quantizing the parts one by one for real."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.fx import Node

from quantmark import BackendQuantizer, InputError, Sensitivity, configs, measure_sqnr, quantize, sensitivity, sqnr_db
from quantmark.configs.base import BlockRules
from support.flow import minmax_config
from support.models import whole_model
from support.packed import packed

CONFIG = minmax_config()


def found_in(model: nn.Module, calibration: Any, config: Any = CONFIG, **how: Any) -> Sensitivity:
    return sensitivity(model, calibration, config, progress=False, **how)


class Chain(nn.Module):
    """Three blocks in a row, each read by the next alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(F.relu(self.b(F.relu(self.a(x)))))
        return y


@pytest.fixture
def chain() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Chain().eval(), torch.randn(32, 6)


def test_one_block_alone_is_the_whole() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).eval(), torch.randn(32, 6)
    found = found_in(model, [x])
    (part,) = found.parts
    assert part.outputs_db == found.together_db
    done = quantize(model, [x], CONFIG, progress=False)
    assert found.together_db[0] == pytest.approx(sqnr_db(model(x), done.model(x)), rel=1e-5)
    assert (part.name, part.kind, part.title, part.nodes) == ("relu", "block", "linear + relu", ("linear", "relu"))


def test_with_nothing_quantized_the_outputs_are_exact() -> None:
    model, (x,) = packed()
    with pytest.warns(match="nothing will be quantized"):
        found = found_in(model, [x], BackendQuantizer(CONFIG).set_module_name("", None))
    assert found.parts == ()
    assert found.together_db == (math.inf,)
    assert json.loads(found.to_json())["together_db"] == ["inf"]


def other(op: str, name: str, node: Node) -> bool:
    return node.name.startswith(op) and node.name != name


@pytest.mark.parametrize("erase", [False, True])
def test_a_part_is_what_quantizing_it_alone_gives(chain: tuple[nn.Module, Tensor], erase: bool) -> None:
    model, x = chain
    config = replace(CONFIG, blocks=BlockRules(erase_activations=erase))
    found = found_in(model, [x], config)
    assert [part.worst_db for part in found.parts] == sorted(part.worst_db for part in found.parts)
    assert {part.module for part in found.parts} == {"a", "b", "c"}
    for part in found.parts:
        alone = BackendQuantizer(config)
        for name in {"a", "b", "c"} - {part.module}:
            alone.set_module_name(name, None)
        for op in {"relu"} if part.module != "c" else set[str]():
            alone.set_filter(partial(other, op, part.name), None)
        if part.module == "c":
            alone.set_operator_type("relu", None)
        done = quantize(model, [x], alone, progress=False)
        assert list(done.record.blocks) == [part.name]
        assert part.outputs_db[0] == pytest.approx(sqnr_db(model(x), done.model(x)), rel=1e-4), part.name


def test_all_together_is_what_is_measured_against_the_float_model() -> None:
    model, calibration, test = whole_model("detector")
    config = configs.arm_tosa(estimator="minmax")
    found = found_in(model, calibration[:1], config, batches=test[:2])
    measured = measure_sqnr(model, quantize(model, calibration[:1], config, progress=False), test[:2], progress=False)
    assert found.outputs == tuple(output.node for output in measured.outputs)
    assert found.together_db == pytest.approx([output.sqnr_db for output in measured.outputs], abs=0.01)
    assert found.batches == 2
    worst = min(found.together_db)
    assert worst <= found.parts[0].worst_db + 1.0


def test_families_are_their_roots_and_branches() -> None:
    model, (x,) = packed()
    found = found_in(model, [x], by="family")
    (part,) = found.parts
    assert (part.name, part.title, part.nodes) == ("x (placeholder)", "independent branches", ("slice_1", "slice_2"))

    def rounded(y: Tensor) -> Tensor:
        scale = float(y.max() - y.min()) / 255.0
        zero = -128 - round(float(y.min()) / scale)
        return torch.fake_quantize_per_tensor_affine(y, scale, zero, -128, 127)

    by_hand = torch.cat([rounded(x[:, :4]), rounded(x[:, 4:])], 1)
    assert part.outputs_db[0] == pytest.approx(sqnr_db(model(x), model(by_hand)), abs=0.01)


def test_modules_are_all_that_is_in_them(chain: tuple[nn.Module, Tensor]) -> None:
    model, x = chain
    blocks, modules = found_in(model, [x]), found_in(model, [x], by="module")
    assert {part.name: part.outputs_db for part in modules.parts} == {p.module: p.outputs_db for p in blocks.parts}
    whole = nn.Sequential(model).eval()
    (head, *_) = found_in(whole, [x], by="module").parts
    assert head.module.startswith("0.")


class Counting(nn.Module):
    """Writes into a buffer, and reads what it wrote."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.count.mul_(0.0).add_(1.0)
        y: Tensor = self.b(self.a(x) + self.count)
        return y


def test_a_model_that_writes_into_its_buffers_is_run_afresh_for_each_part() -> None:
    torch.manual_seed(0)
    model, x = Counting().eval(), torch.randn(32, 6)
    found = found_in(model, [x])
    assert {part.name for part in found.parts} >= {"linear", "linear_1"}
    assert all(25 < part.worst_db < math.inf for part in found.parts)
    assert min(found.together_db) > 25


class Noisy(nn.Module):
    """Draws random numbers in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(F.dropout(self.a(x), 0.5, training=True).clamp(-1.0, 1.0))
        return y


def test_every_run_draws_the_same_random_numbers() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    found = found_in(Noisy().eval(), [x] * 4)
    assert len(found.parts) >= 2
    assert min(found.together_db) > 20


def test_text_tables_and_json() -> None:
    model, (x,) = packed()
    found = found_in(model, [x])
    lines = str(found).splitlines()
    assert lines[0] == "custom: SQNR in dB with one block quantized at a time, 1 batch"
    assert lines[2].startswith("all together")
    assert [line.split()[0] for line in lines[3:]] == [part.name for part in found.parts]
    content = json.loads(found.to_json())
    assert content["schema"] == 1
    assert content["parts"][0]["outputs_db"] == list(found.parts[0].outputs_db)
    stream = io.StringIO()
    Console(file=stream, width=120, force_terminal=True).print(found)
    assert "all together" in stream.getvalue()
    assert found.part("cat").kind == "join"
    with pytest.raises(KeyError):
        found.part("no such part")


def test_calibration_that_can_be_read_once_is_enough(chain: tuple[nn.Module, Tensor]) -> None:
    model, x = chain

    def batches() -> Iterator[Tensor]:
        yield x
        yield x * 0.5

    assert found_in(model, batches()) == found_in(model, [x, x * 0.5])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"by": "layer"}, "by must be one of block, family, module, got 'layer'"),
        ({"batches": []}, "no batches to measure sensitivity on"),
        ({"batches": [torch.zeros(2, 5)]}, "has shape"),
    ],
)
def test_errors_say_what_is_wrong(chain: tuple[nn.Module, Tensor], how: Any, message: str) -> None:
    model, x = chain
    with pytest.raises(InputError, match=message):
        found_in(model, [x], **how)


def test_a_model_without_float_outputs_is_an_error(chain: tuple[nn.Module, Tensor]) -> None:
    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = chain[0]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y.argmax(1)

    with pytest.raises(InputError, match="no float output"):
        found_in(Best().eval(), [chain[1]])
