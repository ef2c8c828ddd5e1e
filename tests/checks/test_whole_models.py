"""Whole networks that were quantized well give no alarm; what peers' quantizers leave in them is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

import quantmark
from quantmark import configs
from quantmark.checks import Finding, Severity, check
from quantmark.configs import BackendConfig
from support.flow import quantize
from support.models import WHOLE, whole_model

XNNPACK, CADENCE, ARM = configs.xnnpack(estimator="minmax"), configs.cadence(estimator="minmax"), configs.arm_tosa()
GENERIC = BackendConfig()


def converted(name: str, quantizer: Quantizer | BackendConfig) -> GraphModule:
    model, calibration, _ = whole_model(name)
    return quantize(model, calibration[0], quantizer, batches=calibration[:2], guards=False).converted


def alarms(graph: GraphModule, config: BackendConfig | None) -> list[Finding]:
    return [f for f in check(graph, config).findings if f.severity is not Severity.INFO]


FAST = {("detector", "arm_tosa"), ("unet", "arm_tosa"), ("keywords", "cadence"), ("sequence", "xnnpack")} | {
    (name, config) for name in ("resnet", "shufflenet", "unet", "detector") for config in ("xnnpack", "cadence")
}


def cases() -> Iterator[Any]:
    for config in (XNNPACK, CADENCE, ARM):
        for name in WHOLE:
            marks = [pytest.mark.arm] if config is ARM else []
            marks += [] if (name, config.name) in FAST else [pytest.mark.slow]
            yield pytest.param(name, config, marks=marks, id=f"{name}-{config.name}")
    yield pytest.param("encoder", GENERIC, id="encoder-generic")


@pytest.mark.parametrize(("name", "config"), list(cases()))
def test_no_false_alarm(name: str, config: BackendConfig) -> None:
    """By what the observers saw, and by ranges that were measured apart, under the first export's names."""
    model, calibration, _ = whole_model(name)
    program = torch.export.export(model, calibration[0])
    result = quantmark.quantize(program, calibration[:2], config, progress=False)
    alarms = [f for f in result.report.findings if f.severity is not Severity.INFO]
    assert alarms == []
    assert result.report.raise_if_unsafe().counts["weighted ops"] >= 4
    ranges = quantmark.observe_ranges(program, calibration[:2])
    exported = torch.export.export(result.model, calibration[0])
    for form in (result.model, exported):
        alarms = [f for f in check(form, config, ranges).findings if f.severity is not Severity.INFO]
        assert alarms == []


def xnnpack_quantizer() -> Quantizer:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))


def test_xnnpack_quantizer_leaves_relu6_apart() -> None:
    """Its patterns know relu, not hardtanh: each relu6 of the detector is quantized on both sides."""
    found = alarms(converted("detector", xnnpack_quantizer()), XNNPACK)
    assert [(f.code, f.node) for f in found] == [("QM101", "hardtanh"), ("QM101", "hardtanh_1")]
    assert all(f.numbers["loss_db"] > 5.0 for f in found)
    assert alarms(converted("keywords", xnnpack_quantizer()), XNNPACK) == []


@pytest.mark.arm
def test_tosa_quantizer_breaks_the_contract_at_skips() -> None:
    """U-Net's skips share qparams with signed tensors at a cat, and TOSA's lowering then loses the relu."""
    from executorch.backends.arm.quantizer.arm_quantizer import TOSAQuantizer, get_symmetric_quantization_config
    from executorch.backends.arm.tosa.specification import TosaSpecification

    specification = TosaSpecification.create_from_string("TOSA-1.0+INT")
    quantizer = TOSAQuantizer(specification).set_global(get_symmetric_quantization_config())
    found = alarms(converted("unet", quantizer), None)
    assert [(f.code, f.node, f.severity) for f in found] == [
        ("QM201", "relu", Severity.ERROR),
        ("QM201", "relu_1", Severity.ERROR),
    ]
