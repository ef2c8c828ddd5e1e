from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from quantmark import BackendQuantizer, ConfigError, InputError, UncalibratedWarning, configs, quantize, sqnr_db
from quantmark.workflow import track

CONFIG = configs.xnnpack(estimator="minmax")


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.linear = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 3)

    def forward(self, image: Tensor, offset: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.relu(self.bn(self.conv(image))).flatten(1))
        return logits + offset


def batch(size: int = 2, *, width: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 2, 4, width), torch.randn(3)


@pytest.fixture
def model() -> TwoInputs:
    torch.manual_seed(0)
    return TwoInputs().eval()


def test_in_one_call(model: TwoInputs) -> None:
    batches = [batch() for _ in range(4)]
    result = quantize(model, iter(batches), CONFIG)
    assert isinstance(result.model, GraphModule)
    assert result.report.is_safe
    assert result.report.backend == "xnnpack"
    assert list(result.record.blocks) == ["relu", "linear"]
    assert sqnr_db(model(*batches[0]), result.model(*batches[0])) > 30


@pytest.mark.parametrize("mode", ["eval", "train", "mixed"])
def test_the_model_stays_as_it_is(model: TwoInputs, mode: str) -> None:
    model.train(mode != "eval")
    model.bn.train(mode == "train")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    quantize(model, [batch()], CONFIG)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("kind", ["program", "module", "traced"])
def test_an_exported_model_gives_the_same_and_stays_as_it_is(model: TwoInputs, kind: str) -> None:
    batches = [batch() for _ in range(2)]
    program = torch.export.export(model, batches[0])
    given: Any = {"program": program, "module": program.module(), "traced": symbolic_trace(model)}[kind]
    code = given.module().code if kind == "program" else given.code
    result = quantize(given, batches, CONFIG)
    assert torch.equal(result.model(*batches[0]), quantize(model, batches, CONFIG).model(*batches[0]))
    assert (given.module().code if kind == "program" else given.code) == code
    assert torch.equal((given.module() if kind == "program" else given)(*batches[0]), model(*batches[0]))


@pytest.mark.parametrize("place", [0, 1])
def test_an_empty_batch_is_named_wherever_it_comes(place: int) -> None:
    batches: list[tuple[Tensor, ...]] = [(torch.randn(2, 4),), (torch.randn(2, 4),)]
    batches.insert(place, ())
    program = torch.export.export(nn.Linear(4, 3), batches[-1])
    with pytest.raises(InputError, match=rf"batch {place} holds 0 tensor\(s\), but the model takes 1"):
        quantize(program, batches, CONFIG)


def test_a_tensor_is_a_batch_and_a_list_is_one_too() -> None:
    x = torch.randn(2, 4)
    results = [quantize(nn.Linear(4, 3), [each], CONFIG) for each in (x, (x,), [x])]
    assert [len(result.record.blocks) for result in results] == [1, 1, 1]


def test_sizes_that_vary_are_named(model: TwoInputs) -> None:
    dynamic = ({0: torch.export.Dim("batch")}, None)
    result = quantize(model, [batch(4), batch(3)], CONFIG, dynamic_shapes=dynamic)
    assert result.model(*batch(7)).shape == (7, 3)


def test_strict_export(model: TwoInputs) -> None:
    assert list(quantize(model, [batch()], CONFIG, strict=True).record.blocks) == ["relu", "linear"]


def test_a_quantizer_brings_its_rules(model: TwoInputs) -> None:
    quantizer = BackendQuantizer(CONFIG).set_module_name("linear", None)
    result = quantize(model, [batch()], quantizer)
    assert result.quantizer is quantizer
    assert list(result.record.blocks) == ["relu"]


def test_example_inputs_are_what_is_exported(model: TwoInputs) -> None:
    with pytest.raises(InputError, match=r"^batch 0, input image has shape \(3, 2, 4, 4\), expected \(2, 2, 4, 4\)"):
        quantize(model, [batch(3)], CONFIG, example_inputs=batch(2))


def bad(index: int, change: Callable[[tuple[Tensor, Tensor]], object]) -> list[Any]:
    batches: list[Any] = [batch() for _ in range(index + 1)]
    batches[index] = change(batches[index])
    return batches


def put(value: float) -> Callable[[tuple[Tensor, Tensor]], object]:
    def change(inputs: tuple[Tensor, Tensor]) -> object:
        inputs[1][1] = value
        return inputs

    return change


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "calibration holds no batches"),
        (iter([]), "calibration holds no batches"),
        (torch.randn(2, 2, 4, 4), r"iterable of batches, got Tensor; for one batch pass \[batch\]"),
        (None, "iterable of batches, got NoneType"),
        (bad(0, lambda b: b[:1]), r"^batch 0 holds 1 tensor\(s\), but TwoInputs.forward takes \(image"),
        (bad(0, lambda b: (*b, b[1])), r"^batch 0 holds 3 tensor\(s\), but .*without labels"),
        (bad(2, lambda b: b[:1]), r"^batch 2 holds 1 tensor\(s\), but the model takes 2 \(image, offset\)"),
        (bad(1, lambda _: batch(1)), r"^batch 1, input image has shape \(1, 2, 4, 4\), expected \(2, 2, 4, 4\)"),
        (bad(1, lambda b: (b[0], b[1][None])), r"^batch 1, input offset has shape \(1, 3\), expected \(3\)"),
        (bad(1, lambda b: (b[0].double(), b[1])), "^batch 1, input image has dtype torch.float64, expected"),
        (bad(1, lambda b: (b[0].to("meta"), b[1])), "^batch 1, input image is on device meta, expected cpu"),
        (bad(3, put(math.nan)), r"^batch 3, input offset holds 1 NaN or infinite value\(s\)"),
        (bad(0, put(-math.inf)), r"^batch 0, input offset holds 1 NaN or infinite value\(s\)"),
        (bad(1, lambda b: {"image": b[0]}), "^batch 1 is a dict; a batch is a tensor, or a tuple or list"),
        (bad(1, lambda b: (b[0], [b[1]])), "^batch 1, input 1 is a list; every input must be a tensor"),
        (bad(0, lambda b: (b[0], 1)), "^batch 0, input 1 is a int; every input must be a tensor"),
    ],
)
def test_a_bad_batch_is_named(model: TwoInputs, batches: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantize(model, batches, CONFIG)


def test_values_that_are_not_finite_can_be_passed_over(model: TwoInputs) -> None:
    config = replace(CONFIG, on_uncalibrated="warn")
    with pytest.warns(UncalibratedWarning, match="offset .* held NaN or infinity"):
        result = quantize(model, bad(1, put(math.inf)), config)
    assert result.report.counts["weighted ops"] == 2


def test_models_that_can_not_be_quantized(model: TwoInputs) -> None:
    with pytest.raises(InputError, match="or an ExportedProgram, got function"):
        quantize(lambda x: x, [batch()], CONFIG)  # type: ignore[arg-type]
    converted = quantize(model, [batch()], CONFIG).model
    with pytest.raises(InputError, match="quantized already"):
        quantize(converted, [batch()], CONFIG)


def test_configs_that_do_not_fit(model: TwoInputs) -> None:
    with pytest.raises(ConfigError, match="is_qat=True"):
        quantize(model, [batch()], configs.xnnpack(is_qat=True))
    with pytest.raises(ConfigError, match="no global config"):
        quantize(model, [batch()], BackendQuantizer(None))


def test_no_bar_where_stderr_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)

    assert list(track(numbers(), "Counting", 3)) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")
