"""Arm's config: its options, what it says of ops, and what needs Arm's own passes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmark import AnnotationError, ConfigError, UnsupportedOptionError, configs, quantize, sqnr_db
from quantmark.configs.arm import arm_tosa
from quantmark.configs.passes import arm_pass_manager
from quantmark.configs.rewrites import rewrite
from quantmark.observers.qparams import INT16_SYMMETRIC
from quantmark.observers.rules import JoinOutcome, Outcome
from support.flow import export


@pytest.mark.parametrize(
    "options", [{"activation": "uint8"}, {"weight_bits": 2}, {"per_chanel": True}, {"eps": "small"}, {"int16": 1}]
)
def test_options_that_arm_lacks(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"arm_tosa"):
        arm_tosa(**options)


def test_options_reach_the_config() -> None:
    config = arm_tosa(activation="int16", per_channel=False, eps=2.0**-12, weight_bits=4, estimator="minmax")
    assert config.activation.scheme == replace(INT16_SYMMETRIC, eps=2.0**-12, headroom=2.0)
    assert config.activation.estimator == "minmax"
    assert (config.weight.scheme.quant_min, config.weight.scheme.quant_max) == (-7, 7)
    assert not config.weight.per_channel
    assert arm_tosa(is_qat=True).activation.estimator == "moving_average"


@pytest.mark.parametrize(
    ("options", "widens", "profile"),
    [
        ({}, False, "tosa"),
        ({"int16": True}, True, "tosa_int16"),
        ({"activation": "int16"}, False, "tosa_int16"),
    ],
)
def test_only_a_narrow_root_is_widened(options: dict[str, Any], widens: bool, profile: str) -> None:
    config = arm_tosa(**options)
    assert (Outcome.WIDE_ROOT in config.branches.outcomes) is widens
    assert config.rewrite == profile


def test_what_does_not_rescale_shares_its_input() -> None:
    config = arm_tosa()
    assert {"relu", "hardtanh", "clamp", "mean", "avg_pool2d", "pad", "slice"} <= config.ops.shared | config.ops.selects
    assert config.blocks.erase_activations
    assert JoinOutcome.FLOAT not in config.joins.outcomes


@pytest.mark.parametrize("options", [{}, {"int16": True}, {"activation": "int16", "weight_bits": 4}])
def test_json_round_trip(options: dict[str, Any]) -> None:
    config = arm_tosa(**options)
    assert configs.BackendConfig.from_json(config.to_json()) == config


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "executorch.backends.arm._passes.arm_pass_manager", None)
    graph = export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    with pytest.raises(ConfigError, match="rewrite=None"):
        rewrite(graph, "tosa", set())


@pytest.mark.arm
def test_what_stops_arms_passes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from executorch.backends.arm._passes.arm_pass_manager import ArmPassManager

    def stop(*_: object, **__: object) -> None:
        raise RuntimeError("no rule for aten.gru")

    monkeypatch.setattr(ArmPassManager, "transform_for_annotation_pipeline", stop)
    with pytest.raises(AnnotationError, match=r'rewrite="tosa".*RuntimeError: no rule for aten\.gru.*rewrite=None'):
        rewrite(export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), "tosa", set())


@pytest.mark.arm
def test_the_guards_of_an_exported_module_do_not_stop_arms_passes() -> None:
    batch, model = torch.linspace(-3, 3, 32).view(4, 8), torch.nn.Softmax(1)
    assert "_guards_fn" in {node.target for node in export(model, (batch,)).graph.nodes}
    assert sqnr_db(model(batch), quantize(model, [batch], arm_tosa()).model(batch)) > 30


@pytest.mark.arm
@pytest.mark.parametrize("module", ["arm", "ethos"])
def test_rules_name_files_of_executorch_that_exist(module: str) -> None:
    import executorch.backends.arm

    (root,) = executorch.backends.arm.__path__
    text = Path(configs.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    named = {path.removeprefix("backends/arm/") for path in re.findall(r"[\w/]+/\w+\.py", text)}
    assert len(named) >= 2
    assert [path for path in named if not (Path(root) / path).is_file()] == []
    assert "executorch 1.5.1" in text


@pytest.mark.arm
def test_the_pass_that_stops_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise RuntimeError("no rule for aten.gru")

    monkeypatch.setattr("executorch.backends.arm._passes.DecomposeMatmulPass.__call__", stop)
    with pytest.raises(AnnotationError, match=r"RuntimeError: no rule for aten\.gru \(DecomposeMatmulPass\)\. Leave"):
        rewrite(export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), "tosa", set())


@pytest.mark.arm
def test_running_arms_passes_in_a_row_changes_nothing() -> None:
    from executorch.backends.arm._passes.arm_pass_manager import ArmPassManager
    from executorch.backends.arm.tosa import TosaSpecification
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            masked = torch.where(x > 0, x.mean((2, 3), keepdim=True), 2.0 / (x.abs() + 1))
            return torch.softmax(masked.flatten(2).matmul(masked.flatten(2).transpose(1, 2)), -1)

    def spelled(manager: ArmPassManager) -> tuple[str, torch.Tensor]:
        graph = manager.transform_for_annotation_pipeline(export(Net(), (batch,), guards=False))
        return graph.code, graph(batch)

    batch = torch.linspace(-3, 3, 2 * 3 * 16).view(2, 3, 4, 4)
    row = arm_pass_manager("TOSA-1.0+INT")
    code, value = spelled(row)
    assert len(row.passes) == 1
    plain, wanted = spelled(ArmPassManager(TosaCompileSpec(TosaSpecification.create_from_string("TOSA-1.0+INT"))))
    assert code == plain
    assert torch.equal(value, wanted)
