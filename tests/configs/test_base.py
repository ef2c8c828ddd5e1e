"""Configs are checked when they are made: every type, every name, every combination."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from inspect import isfunction
from typing import Any

import pytest
import torch

from quantmark import BackendQuantizer, ConfigError, UnsupportedOptionError, configs
from quantmark.configs.base import (
    ActivationConfig,
    BackendConfig,
    BiasConfig,
    BlockRules,
    FixedQParams,
    OpRules,
    WeightConfig,
)
from quantmark.configs.limits import Limits
from quantmark.observers.fields import field_types
from quantmark.observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, INT16_SYMMETRIC, Scheme
from quantmark.observers.rules import BranchRules, HoistRule, JoinOutcome, JoinRules, Outcome

FACTORIES: list[Callable[..., BackendConfig]] = [
    getattr(configs, name) for name in configs.__all__ if isfunction(getattr(configs, name))
]
TANH = FixedQParams(op="tanh", scale=1 / 128, zero_point=0)
PARTS: list[Any] = [
    ActivationConfig(),
    WeightConfig(),
    BiasConfig(),
    BlockRules(),
    TANH,
    OpRules(),
    BackendConfig(),
    BranchRules(),
    JoinRules(),
    Limits(),
    Scheme(),
]
by_part = pytest.mark.parametrize("part", PARTS, ids=[type(part).__name__ for part in PARTS])


@by_part
def test_parts_are_frozen_keyword_only_and_hashable(part: Any) -> None:
    first = fields(part)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(part, first, getattr(part, first))
    with pytest.raises(TypeError):
        type(part)(getattr(part, first))
    twin = replace(part)
    assert twin == part
    assert twin is not part
    assert len({twin, part}) == 1


@by_part
def test_every_field_refuses_another_type(part: Any) -> None:
    class Strange:
        pass

    kind: Any = type(part)
    for name in field_types(kind):
        now = getattr(part, name)
        wrong = [Strange(), b"int8", 1j]
        if isinstance(now, frozenset):
            wrong += [set(now), tuple(now), list(now), "conv2d", frozenset({1}), None]
        if isinstance(now, tuple):
            wrong += [list(now), frozenset(now), (Strange(),), None]
        if isinstance(now, bool):
            wrong += [1, 0, "yes", None]
        elif isinstance(now, (int, float)):
            wrong += [True, "1", None]
        if not isinstance(now, str) and now is not None:
            wrong += [str(now)]
        if is_dataclass(now):
            wrong += [type(now), None, {}]
        for value in wrong:
            with pytest.raises(ConfigError, match=rf"(^|\.){name} must be .*, got "):
                replace(part, **{name: value})


def late(part: Any, **values: Any) -> Callable[[], object]:
    return lambda: part(**values)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        late(ActivationConfig, estimator="entropy"),
        "estimator must be one of 'minmax', 'moving_average', 'histogram'",
    ),
    (late(ActivationConfig, averaging_constant=0.0), r"averaging_constant must be in \(0, 1\], got 0"),
    (late(ActivationConfig, averaging_constant=1.5), r"averaging_constant must be in \(0, 1\], got 1.5"),
    (late(ActivationConfig, averaging_constant=math.nan), r"averaging_constant must be in \(0, 1\], got nan"),
    (late(ActivationConfig, scheme="int8"), r"activation.scheme must be a Scheme, got 'int8' \(str\)"),
    (late(ActivationConfig, scheme=torch.int8), r"activation.scheme must be a Scheme, got torch.int8 \(dtype\)"),
    (late(WeightConfig, scheme=INT8_AFFINE), "takes symmetric weights only"),
    (late(WeightConfig, conv_scheme=INT8_AFFINE), "takes symmetric weights only"),
    (
        late(WeightConfig, scheme=Scheme(dtype=torch.int32, symmetric=True)),
        "torch.int8, torch.uint8, torch.int16, got a scheme of torch.int32",
    ),
    (
        late(BiasConfig, kind="float"),
        r"bias.kind must be one of BiasKind.FLOAT, BiasKind.INT32_DERIVED, got 'float'",
    ),
    (
        late(BlockRules, heads=frozenset({"conv2d", "conv4d"})),
        "blocks.heads lists conv4d; allowed: addmm, .*; nearest: conv1d|conv3d|conv2d",
    ),
    (late(BlockRules, heads={"conv2d"}), "blocks.heads must be a frozenset of strings, got {'conv2d'}"),
    (late(BlockRules, activations=frozenset({"gelu"})), "blocks.activations lists gelu; allowed: clamp, "),
    (late(BlockRules, residual_heads=frozenset({"conv2d"})), "blocks.residual_heads lists conv2d; allowed: "),
    (late(BlockRules, residual_activations=frozenset({"tanh"})), "blocks.residual_activations lists tanh"),
    (late(BlockRules, activation_heads=frozenset({"add"})), "blocks.activation_heads lists add; allowed: addmm"),
    (late(BlockRules, per_tensor_heads=frozenset({"grouped_transpose"})), "nearest: grouped_transposed"),
    (late(BlockRules, through=frozenset({"relu"})), "blocks.through lists relu"),
    (late(BlockRules, symmetric_activation="separate"), "SymmetricActivation.SEPARATE, .*got 'separate'"),
    (late(FixedQParams, op="tanhh", scale=1.0, zero_point=0), "fixed.op lists tanhh; allowed: .*; nearest: tanh"),
    (late(FixedQParams, op="tanh", scale=0.0, zero_point=0), "fixed.scale of tanh must be positive and finite"),
    (late(FixedQParams, op="tanh", scale=math.inf, zero_point=0), "must be positive and finite, got inf"),
    (late(FixedQParams, op="tanh", scale=math.nan, zero_point=0), "must be positive and finite, got nan"),
    (late(OpRules, own=frozenset({"adds"})), "ops.own lists adds; allowed: .*; nearest: add"),
    (late(OpRules, shared=frozenset({"rehsape"})), "ops.shared lists rehsape; .*; nearest: reshape"),
    (late(OpRules, selects=frozenset({"view"})), "ops.selects lists view; allowed: chunk, "),
    (late(OpRules, joins=frozenset({"view"})), "ops.joins lists view; allowed: "),
    (late(OpRules, own=frozenset({"add"}), fixed=(TANH,)), "ops.fixed lists tanh; allowed: add"),
    (late(OpRules, fixed=(TANH, replace(TANH, scale=0.5))), "ops lists tanh under two rules, or one twice"),
    (late(OpRules, shared=frozenset({"add"})), "ops lists add under two rules"),
    (late(OpRules, joins=frozenset({"add"})), "ops lists add under two rules"),
    (late(OpRules, shared=frozenset({"slice"})), "ops lists slice under two rules"),
    (late(OpRules, own=frozenset({"slice"})), "ops lists slice under two rules"),
    (late(OpRules, shared=frozenset({"cat"})), "ops lists cat under two rules"),
    (late(BackendConfig, name=""), "a config needs a name"),
    (late(Limits, bias_bits=1), "limits.bias_bits must be 2 to 64, got 1"),
    (late(Limits, max_requantize_ratio=math.nan), "limits.max_requantize_ratio must be > 0, got nan"),
    (late(Limits, equal_sides=frozenset({"cats"})), "limits.equal_sides lists cats; .*; nearest: cat"),
    (late(ActivationConfig, percent=50.0), r"activation.percent must be in \(50, 100\], got 50"),
    (
        late(BackendConfig, on_uncalibrated="ignore"),
        "on_uncalibrated must be one of 'error', 'warn', got 'ignore'",
    ),
    (late(BackendConfig, activation="int8"), "^activation must be an ActivationConfig, got 'int8'"),
    (late(BackendConfig, rest=BackendQuantizer), "^rest must be a Quantizer or None, got a type|<class"),
    (
        late(BackendConfig, ops=OpRules(joins=frozenset({"cat", "matmul"}), own=frozenset())),
        "blocks.heads and ops both claim matmul",
    ),
    (
        late(
            BackendConfig,
            activation=ActivationConfig(scheme=Scheme(dtype=torch.uint8, quant_min=0, quant_max=255)),
            ops=OpRules(fixed=(replace(TANH, zero_point=-1),)),
        ),
        r"ops.fixed gives tanh the zero point -1, but the codes of activation.scheme are 0..255",
    ),
    (
        late(BackendConfig, branches=BranchRules(hoist_through=frozenset({"conv2d"}))),
        "branches.hoist_through lists conv2d",
    ),
    (late(BackendConfig, branches=BranchRules(covering=frozenset({"slices"}))), "nearest: slice"),
    (late(BranchRules, hoist="never"), "branches.hoist must be one of HoistRule.NEVER, .*, got 'never'"),
    (late(BranchRules, outcomes=()), "branches.outcomes must list SHARED"),
    (late(BranchRules, outcomes=[Outcome.SHARED]), "branches.outcomes must be a tuple of Outcome, got "),
    (late(BranchRules, outcomes=(Outcome.SHARED, "independent")), "branches.outcomes must be a tuple of Outcome"),
    (late(BranchRules, outcomes=(Outcome.SHARED, JoinOutcome.FLOAT)), "must be a tuple of Outcome"),
    (late(BranchRules, outcomes=(Outcome.SHARED,) * 2), "branches.outcomes lists an outcome twice"),
    (late(BranchRules, max_sharing_loss_db=-0.1), "branches.max_sharing_loss_db must be >= 0 dB, got -0.1"),
    (late(BranchRules, max_root_loss_db=math.nan), "branches.max_root_loss_db must be >= 0 dB, got nan"),
    (late(BranchRules, min_coverage=1.01), "branches.min_coverage must be between 0 and 1, got 1.01"),
    (late(BranchRules, min_coverage=math.nan), "branches.min_coverage must be between 0 and 1, got nan"),
    (late(JoinRules, outcomes=(JoinOutcome.REQUANTIZE,)), "joins.outcomes must list SHARED"),
    (late(JoinRules, outcomes=(JoinOutcome.SHARED,) * 2), "joins.outcomes lists an outcome twice"),
    (late(JoinRules, max_sharing_loss_db=-1), "joins.max_sharing_loss_db must be >= 0 dB"),
    (late(JoinRules, max_float_loss_db=math.nan), "joins.max_float_loss_db must be >= 0 dB"),
    (late(Scheme, dtype=torch.float16), "integer dtype that torch quantizes to .*, got torch.float16"),
    (late(Scheme, dtype=torch.int64), r"\(torch.int8, torch.uint8, .*\), got torch.int64"),
    (late(Scheme, dtype="int8"), r"scheme.dtype must be a torch.dtype, got 'int8'"),
    (
        late(Scheme, dtype=torch.uint8),
        r"torch.uint8 holds codes 0..255 with quant_min < quant_max, got -128..127",
    ),
    (late(Scheme, quant_min=3, quant_max=3), "quant_min < quant_max, got 3..3"),
    (late(Scheme, quant_max=127.0), r"scheme.quant_max must be an int, got 127.0 \(float\)"),
    (late(Scheme, quant_min=1, symmetric=True), "needs its zero point 0 among the codes 1..127"),
    (late(Scheme, eps=-(2.0**-12)), "eps must be a normal float32"),
    (late(Scheme, eps=0.0), "eps must be a normal float32"),
    (late(Scheme, eps=1e-40), "eps must be a normal float32"),
    (late(Scheme, eps=math.inf), "eps must be a normal float32"),
    (late(Scheme, eps=math.nan), "eps must be a normal float32"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_what_can_not_be_is_refused_with_what_can(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("factory", FACTORIES)
def test_replace_checks_anew(factory: Callable[..., BackendConfig]) -> None:
    config = factory()
    changed = replace(config, branches=replace(config.branches, max_root_loss_db=1.0))
    assert changed.branches.max_root_loss_db == 1.0
    assert changed.ops is config.ops
    assert changed != config
    with pytest.raises(ConfigError, match=r"branches\.max_root_loss_db"):
        replace(config, branches=replace(config.branches, max_root_loss_db=-1.0))
    with pytest.raises(ConfigError, match="on_uncalibrated"):
        replace(config, on_uncalibrated="never")  # type: ignore[arg-type]


def test_an_activation_that_the_backend_has_no_kernels_for_is_no_config() -> None:
    with pytest.raises(ConfigError, match=r"^xnnpack runs activations of torch\.int8, but .* is of torch\.int16$"):
        configs.xnnpack().with_scheme(INT16_SYMMETRIC)


def test_no_activation_unfolds_where_none_is_erased() -> None:
    config = configs.ethos_u55()
    with pytest.raises(ConfigError, match=r"UNFOLD, which needs blocks\.erase_activations"):
        replace(config, blocks=replace(config.blocks, erase_activations=False))


def test_with_scheme_changes_the_activation_scheme_alone() -> None:
    config = configs.cadence()
    wide = config.with_scheme(INT16_SYMMETRIC)
    assert wide.activation == replace(config.activation, scheme=INT16_SYMMETRIC)
    assert replace(wide, activation=config.activation) == config
    with pytest.raises(ConfigError, match=r"scheme must be a Scheme"):
        config.with_scheme("int16")  # type: ignore[arg-type]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "int4"}, r"activation must be one of 'int8', .*, got 'int4'"),
        ({"activation": ["int8"]}, r"activation must be one of 'int8', .*, got \['int8'\]"),
        ({"estimator": "entropy"}, "estimator must be one of 'minmax', 'moving_average', 'histogram'"),
        ({"eps": "tiny"}, "eps must be a number, got 'tiny'"),
        ({"is_qat": 1}, "is_qat must be True or False, got 1"),
        ({"rest": "xnnpack"}, "rest must be a Quantizer or None, got 'xnnpack'"),
        ({"per_chanel": True}, "has no option 'per_chanel'; it has activation, per_channel, .*"),
        ({"weights": "int4"}, "has no option 'weights'; it has activation, "),
    ],
)
def test_an_option_that_a_backend_lacks_is_named(
    factory: Callable[..., BackendConfig], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"^{factory.__name__}:? {message}"):
        factory(**options)


@pytest.mark.parametrize("factory", FACTORIES)
def test_options_are_the_same_in_every_backend(factory: Callable[..., BackendConfig]) -> None:
    config = factory(activation="int8", is_qat=True, eps=2.0**-10, estimator="minmax", rest=None)
    assert config.name == factory.__name__
    assert config.is_qat
    assert config.activation.estimator == "minmax"
    assert {config.activation.scheme.eps, config.weight.scheme.eps} == {2.0**-10}
    assert factory(estimator=None).activation.estimator == "histogram"
    assert factory(is_qat=True).activation.estimator == "moving_average"
    with pytest.raises(ConfigError, match="eps must be a normal float32"):
        factory(eps=-1.0)
    with pytest.raises(TypeError):
        factory("int8")


def test_xnnpack_says_what_it_has() -> None:
    with pytest.raises(
        UnsupportedOptionError, match=r"^xnnpack: activation must be one of 'int8', 'sym8', got 'int16'$"
    ):
        configs.xnnpack(activation="int16")  # type: ignore[arg-type]
    assert configs.xnnpack(activation="sym8").activation.scheme.symmetric
    assert not configs.xnnpack(per_channel=False).weight.per_channel
    assert configs.xnnpack().weight.scheme == replace(INT8_SYMMETRIC, eps=2.0**-24)


def test_cadence_says_what_it_has() -> None:
    with pytest.raises(
        UnsupportedOptionError, match=r"^cadence: activation must be one of 'int8', 'int16', got 'sym8'$"
    ):
        configs.cadence(activation="sym8")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOptionError, match="cadence has per_channel=False only"):
        configs.cadence(per_channel=True)
    assert configs.cadence(hoist=HoistRule.IDENTICAL).branches.hoist is HoistRule.IDENTICAL
