"""One pass: what a prepared model decided survives copies, checkpoints and files, whatever the order of batches."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import disable_observer
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.composable_quantizer import ComposableQuantizer

from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.configs.base import BackendConfig, EstimatorName
from quantmark.observers.observer import RangeObserver
from support.roads import CASES, Batches, calibrate, one_pass, prepare, qparams, same, with_estimator

NAMES = ["independent", "wide root", "float root", "cadence union", "residual"]


@functools.cache
def exported(name: str) -> tuple[torch.export.ExportedProgram, Batches]:
    batches = CASES[name].batches()
    return torch.export.export(CASES[name].model(), batches[0]), batches


def config_of(name: str, estimator: EstimatorName = "minmax") -> BackendConfig:
    return with_estimator(CASES[name].config, estimator)


@functools.cache
def wanted(name: str, estimator: EstimatorName = "minmax") -> GraphModule:
    program, batches = exported(name)
    return one_pass(program, config_of(name, estimator), batches)


def calibrated(name: str, estimator: EstimatorName = "minmax") -> GraphModule:
    program, batches = exported(name)
    return calibrate(prepare(program, config_of(name, estimator)), batches)


WAYS: dict[str, Callable[[GraphModule], GraphModule]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy twice": lambda prepared: copy.deepcopy(copy.deepcopy(prepared)),
    "to": lambda prepared: prepared.to("cpu"),
    "to and back": lambda prepared: prepared.to(torch.float64).to(torch.float32),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_model_may_travel(name: str, way: str) -> None:
    found = WAYS[way](calibrated(name, "histogram"))
    assert same(convert_pt2e(found), wanted(name, "histogram"), exported(name)[1])


@pytest.mark.parametrize("estimator", ["minmax", "histogram", "moving_average"])
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_goes_into_a_freshly_prepared_model(name: str, estimator: EstimatorName) -> None:
    program, batches = exported(name)
    file = io.BytesIO()
    torch.save(calibrated(name, estimator).state_dict(), file)
    file.seek(0)
    fresh = prepare(program, config_of(name, estimator))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert same(convert_pt2e(fresh), wanted(name, estimator), batches)


@pytest.mark.parametrize("qat", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_observers_go_through_a_file_together(name: str, qat: bool) -> None:
    """torch itself can't save a prepared graph, whatever the quantizer (torch 2.13); it can save its observers."""
    program, batches = exported(name)
    quantizer = BackendQuantizer(replace(config_of(name, "histogram"), is_qat=qat))
    graph = copy.deepcopy(program.module())  # in training its batch norms move
    prepared = calibrate((prepare_qat_pt2e if qat else prepare_pt2e)(graph, quantizer), batches)
    observers = nn.ModuleList({id(m): m for m in prepared.modules() if isinstance(m, RangeObserver)}.values())
    file = io.BytesIO()
    torch.save(observers, file)
    file.seek(0)
    for mine, loaded in zip(observers, torch.load(file, weights_only=False), strict=True):
        assert loaded.assignment() == mine.assignment()  # type: ignore[operator]
        for a, b in zip(loaded.calculate_qparams(), mine.calculate_qparams(), strict=True):  # type: ignore[operator]
            assert torch.equal(a, b)


def test_copies_go_their_own_ways() -> None:
    first = calibrated("independent")
    second = copy.deepcopy(first)
    calibrate(second, [(100 * batch[0],) for batch in exported("independent")[1]])
    assert same(convert_pt2e(first), wanted("independent"), exported("independent")[1])
    assert qparams(convert_pt2e(second)) != qparams(wanted("independent"))


@pytest.mark.parametrize("estimator", ["minmax", "histogram"])
@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_batches_does_not_matter(name: str, estimator: EstimatorName) -> None:
    program, batches = exported(name)
    found = one_pass(program, config_of(name, estimator), batches[::-1])
    assert same(found, wanted(name, estimator), batches)


@pytest.mark.parametrize("name", NAMES)
def test_inside_a_composable_quantizer(name: str) -> None:
    program, batches = exported(name)
    quantizer = ComposableQuantizer([BackendQuantizer(config_of(name))])
    found = convert_pt2e(calibrate(prepare_pt2e(program.module(), quantizer), batches))
    assert same(found, wanted(name), batches)


@pytest.mark.parametrize("name", ["independent", "wide root", "float root", "cadence union"])
def test_fake_quantize_decides_alike(name: str) -> None:
    """What training simulates is what comes out: the model is calibrated as it is, without a step."""
    program, batches = exported(name)
    prepared = prepare_qat_pt2e(program.module(), BackendQuantizer(replace(config_of(name), is_qat=True)))
    calibrate(prepared, batches)
    prepared.apply(disable_observer)
    simulated = [prepared(*batch) for batch in batches]
    copied = copy.deepcopy(prepared)
    converted = convert_pt2e(prepared)
    for batch, expected in zip(batches, simulated, strict=True):
        for a, b in zip(leaves(expected), leaves(converted(*batch)), strict=True):
            differs = (a - b).abs() > 1e-5 * a.abs().max()
            assert differs.float().mean() < 0.05  # where a value lies between two codes, training rounds another way
    assert same(convert_pt2e(copied), converted, batches)


def leaves(value: object) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
