"""The NPUs' configs: TOSA's integer profile, less what each device lacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from quantmark import UnsupportedOptionError, configs
from quantmark.configs.arm import ActivationName
from quantmark.configs.base import BackendConfig
from quantmark.configs.rewrites import _PROFILES
from quantmark.observers.rules import Outcome

NPUS: dict[str, Callable[..., BackendConfig]] = {
    "ethos_u55": configs.ethos_u55,
    "ethos_u65": configs.ethos_u65,
    "ethos_u85": configs.ethos_u85,
}


def ops(config: BackendConfig) -> frozenset[str]:
    """Return every op that a config quantizes."""
    return config.blocks.heads | config.ops.own | config.ops.shared | config.ops.selects | config.ops.joins


@pytest.mark.parametrize("name", NPUS)
@pytest.mark.parametrize(
    "options", [{"activation": "uint8"}, {"weight_bits": 2}, {"per_chanel": True}, {"int16": None}]
)
def test_options_that_a_device_lacks(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOptionError, match=name):
        NPUS[name](**options)


@pytest.mark.parametrize("name", NPUS)
def test_options_have_the_names_of_every_backend(name: str) -> None:
    assert set(inspect.signature(configs.arm_tosa).parameters) == set(inspect.signature(NPUS[name]).parameters)


@pytest.mark.parametrize("activation", ["int8", "sym8", "int16"])
def test_what_a_device_lacks_is_all_that_differs(activation: ActivationName) -> None:
    profile = ops(configs.arm_tosa(activation=activation))
    lacks = {"conv3d", "gather", "index", "index_select", "upsample_bilinear2d", "where"}
    lacks |= {"mm", "bmm", "matmul", "conv_transpose2d"} if activation == "int16" else set()
    assert profile - ops(configs.ethos_u55(activation=activation)) == lacks
    assert profile - ops(configs.ethos_u65(activation=activation)) == lacks
    assert profile == ops(configs.ethos_u85(activation=activation))


def test_a_table_of_16_bit_codes_has_no_steps() -> None:
    assert {"floor", "ceil"} <= ops(configs.arm_tosa())
    assert not {"floor", "ceil"} & ops(configs.arm_tosa(activation="int16"))


@pytest.mark.parametrize("name", NPUS)
def test_every_device_has_int16(name: str) -> None:
    assert Outcome.WIDE_ROOT in NPUS[name]().branches.outcomes
    assert Outcome.WIDE_ROOT not in NPUS[name](int16=False).branches.outcomes
    assert Outcome.WIDE_ROOT not in NPUS[name](activation="int16").branches.outcomes


@pytest.mark.parametrize("name", NPUS)
@pytest.mark.parametrize("options", [{}, {"activation": "int16"}, {"weight_bits": 4, "per_channel": False}])
def test_json_round_trip(name: str, options: dict[str, Any]) -> None:
    config = NPUS[name](**options)
    assert config.name == name
    assert BackendConfig.from_json(config.to_json()) == config


@pytest.mark.arm
@pytest.mark.parametrize("target", ["ethos-u55-128", "ethos-u65-256", "ethos-u85-256"])
def test_the_profile_is_that_of_executorchs_compile_spec(target: str) -> None:
    from executorch.backends.arm.ethosu import EthosUCompileSpec

    rewrite = NPUS[target.rpartition("-")[0].replace("-", "_")]().rewrite
    assert rewrite is not None
    assert set(str(EthosUCompileSpec(target).tosa_spec).split("+")) == set(
        _PROFILES[rewrite].replace("1.0", str(EthosUCompileSpec(target).tosa_spec.version)).split("+")
    )
