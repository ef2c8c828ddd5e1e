"""Configs as JSON: exact round trips, and every wrong file named by path."""

import difflib
import json
import math
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from enum import Enum
from inspect import isfunction
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchao.quantization.pt2e.quantizer import Quantizer

import quantmark
from quantmark import BackendQuantizer, ConfigError, configs
from quantmark.configs import BackendConfig
from quantmark.observers.fields import allowed_names, alternatives, field_types
from quantmark.observers.qparams import DTYPES

FACTORIES: list[Callable[..., BackendConfig]] = [
    getattr(configs, name) for name in configs.__all__ if isfunction(getattr(configs, name))
]
BASES = [
    BackendConfig(),
    *(factory() for factory in FACTORIES),
    *(factory(is_qat=True, eps=2.0**-20) for factory in FACTORIES),
]


def values(kind: Any, allowed: frozenset[str] | None, now: Any) -> st.SearchStrategy[Any]:
    """What a field may hold; what it holds now is changed a little, where it is a dataclass."""
    kinds = alternatives(kind)
    if len(kinds) > 1:
        (kind,) = (each for each in kinds if each is not type(None))
        return st.none() if kind is Quantizer else st.none() | values(kind, allowed, now)
    if is_dataclass(kind):
        return st.just(now) if now is None else modified(now)
    if kind is str:
        return st.sampled_from(sorted(allowed)) if allowed else st.text(min_size=1)
    if get_origin(kind) is frozenset:
        return st.frozensets(st.sampled_from(sorted(allowed)), max_size=5) if allowed else st.just(now)
    if get_origin(kind) is tuple:
        return st.just(now) if not now else st.permutations(now).map(tuple)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-128, 127),
        float: st.floats(0.0) | st.floats(0.0, 1.0) | st.floats(2.0**-40, 2.0**-8) | st.integers(0, 9),
        torch.dtype: st.sampled_from(DTYPES),
    }
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    return st.sampled_from(list(kind)) if issubclass(kind, Enum) else plain[kind]


@st.composite
def modified(draw: st.DrawFn, base: Any) -> Any:
    """`base` with some of its fields replaced, those that make a config that can be."""
    kind: Any = type(base)
    types, allowed = field_types(kind), allowed_names(kind)
    for name in draw(st.lists(st.sampled_from(sorted(types)), max_size=3, unique=True)):
        value = draw(values(types[name], allowed.get(name), getattr(base, name)))
        try:
            base = replace(base, **{name: value})
        except ConfigError:
            continue
    return base


@given(config=st.sampled_from(BASES).flatmap(modified))
def test_a_round_trip_is_exact(config: BackendConfig) -> None:
    text = config.to_json()
    found = BackendConfig.from_json(text)
    assert found == config
    assert hash(found) == hash(config)
    assert found.to_json() == text


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_file_can_be_compared_line_by_line(factory: Callable[..., BackendConfig]) -> None:
    config = factory()
    blocks = replace(config.blocks, heads=config.blocks.heads - {"conv1d"})
    lines, other = config.to_json().splitlines(), replace(config, blocks=blocks).to_json().splitlines()
    changes = [line for line in difflib.ndiff(lines, other) if line[0] in "+-"]
    assert changes == ['-       "conv1d",']
    raw = json.loads(config.to_json())
    assert list(raw) == sorted(raw)
    assert raw["blocks"]["heads"] == sorted(config.blocks.heads)
    assert config.to_json().endswith("}\n")


def test_a_file_says_what_wrote_it() -> None:
    raw = json.loads(BackendConfig().to_json())
    assert (raw["schema"], raw["quantmark"]) == (1, quantmark.__version__)


def test_values_are_written_as_people_write_them() -> None:
    config = configs.xnnpack()
    config = replace(config, branches=replace(config.branches, max_root_loss_db=math.inf, max_sharing_loss_db=1))
    raw = json.loads(config.to_json())
    assert raw["activation"]["scheme"]["dtype"] == "int8"
    assert raw["blocks"]["symmetric_activation"] == "one_sided"
    assert raw["branches"]["outcomes"] == ["shared", "independent", "float_root"]
    assert raw["branches"]["max_root_loss_db"] == "inf"
    assert '"max_sharing_loss_db": 1.0,' in config.to_json()
    assert raw["rest"] is None


def test_another_quantizer_can_not_be_written() -> None:
    config = configs.xnnpack(rest=BackendQuantizer(configs.xnnpack()))
    with pytest.raises(
        ConfigError, match=r"^\$\.rest holds a BackendQuantizer, an object that JSON can't say: .*rest=None"
    ):
        config.to_json()


def broken(change: Callable[[Any], object], base: BackendConfig | None = None) -> str:
    raw = json.loads((base or configs.xnnpack()).to_json())
    change(raw)
    return json.dumps(raw)


def put(path: str, value: Any) -> Callable[[Any], object]:
    """A change of the value at a path of keys and indices."""
    *way, last = (int(part) if part.isdigit() else part for part in path.split("."))

    def change(raw: Any) -> None:
        for part in way:
            raw = raw[part]
        raw[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("is_qta", True, r"^\$ has no field 'is_qta'; allowed: activation, bias, .*; nearest: is_qat$"),
        ("blocks.head", [], r"^\$\.blocks has no field 'head'; allowed: .*; nearest: heads$"),
        ("blocks.heads.3", "con2d", r'^\$\.blocks\.heads\[3\] is "con2d"; allowed: "addmm", .*; nearest: conv2d$'),
        ("blocks.heads.3", 3, r"^\$\.blocks\.heads\[3\] must be a string, got 3$"),
        ("blocks.heads.3", "conv1d", r"^\$\.blocks\.heads\[3\] is 'conv1d' again; keep one$"),
        ("blocks.heads", "conv2d", r'^\$\.blocks\.heads must be an array, got "conv2d"$'),
        ("blocks.heads", None, r"^\$\.blocks\.heads must be an array, got null$"),
        ("blocks.activation_heads", ["cnv1d"], r'^\$\.blocks\.activation_heads\[0\] is "cnv1d".*nearest: conv1d$'),
        ("blocks", [], r"^\$\.blocks must be an object, got an array$"),
        ("blocks.symmetric_activation", "one-sided", r'is "one-sided"; allowed: "one_sided", "separate"; nearest'),
        ("blocks.symmetric_activation", 1, r'must be one of "one_sided", "separate", got 1$'),
        ("branches.outcomes.1", "float", r'^\$\.branches\.outcomes\[1\] is "float"; .*; nearest: float_root$'),
        ("branches.outcomes", ["independent"], r"^\$\.branches: branches.outcomes must list SHARED"),
        ("branches.partial_groups", 1, r"^\$\.branches\.partial_groups must be true or false, got 1$"),
        ("branches.max_root_loss_db", True, r'max_root_loss_db must be a number, or "inf", got true$'),
        ("branches.max_root_loss_db", "6", r'must be a number, or "inf", got "6"$'),
        ("branches.max_root_loss_db", -1, r"^\$\.branches: branches.max_root_loss_db must be >= 0 dB, got -1.0$"),
        ("branches.max_root_loss_db", 10**400, r"must be a number that a double holds"),
        ("branches.hoist_through", ["slcie"], r"^\$: branches.hoist_through lists slcie; allowed: .*; nearest: slice$"),
        ("activation.scheme.dtype", "int7", r'^\$\.activation\.scheme\.dtype is "int7"; allowed: "int16", .*nearest'),
        ("activation.scheme.dtype", "float32", r'is "float32"; allowed: "int16", "int32", "int8", "uint16", "uint8"'),
        ("activation.scheme.quant_min", -128.0, r"^\$\.activation\.scheme\.quant_min must be an int, got -128.0$"),
        ("activation.scheme.quant_min", -129, r"^\$\.activation\.scheme: torch.int8 holds codes -128..127"),
        ("activation.scheme.eps", -1.0, r"^\$\.activation\.scheme: eps must be a normal float32"),
        ("activation.estimator", "histogramm", r'is "histogramm"; allowed: .*; nearest: histogram$'),
        ("weight.scheme.symmetric", False, r"^\$\.weight: weight.scheme is affine"),
        ("weight.conv_scheme", 1, r"^\$\.weight\.conv_scheme must be an object, got 1$"),
        ("ops.fixed", [{"op": "tanh"}], r"^\$\.ops\.fixed\[0\] lacks scale, zero_point: a config file says every"),
        ("ops.fixed", [{"op": "tahn", "scale": 1, "zero_point": 0}], r'fixed\[0\]\.op is "tahn".*nearest: tan'),
        (
            "limits.activation_dtypes",
            ["int8", "int9"],
            r'^\$\.limits\.activation_dtypes\[1\] is "int9"; allowed: .*; nearest: int8$',
        ),
        ("limits.equal_sides", ["cats"], r'^\$\.limits\.equal_sides\[0\] is "cats"; .*; nearest: cat$'),
        ("on_uncalibrated", "ignore", r'^\$\.on_uncalibrated is "ignore"; allowed: "error", "warn"$'),
        ("name", None, r"^\$\.name must be a string, got null$"),
        ("rest", {}, r"^\$\.rest must be null: a Quantizer is an object that JSON can't say$"),
        ("schema", 2, r"^\$\.schema is 2, written by quantmark 0.*; this version reads up to 1"),
        ("schema", "1", r'^\$\.schema must be an int from 1 to 1, got "1"$'),
        ("schema", True, r"^\$\.schema must be an int from 1 to 1, got true$"),
        ("schema", 0, r"^\$\.schema must be an int from 1 to 1, got 0$"),
        ("quantmark", 0.1, r"^\$\.quantmark must be a string, got 0.1$"),
    ],
)
def test_a_wrong_value_is_named_by_path(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BackendConfig.from_json(broken(put(path, value)))


def test_a_newer_schema_is_named_before_its_unknown_fields() -> None:
    def change(raw: Any) -> None:
        raw |= {"schema": 7, "quantmark": "9.9", "flavour": "new"}

    with pytest.raises(ConfigError, match=r"schema is 7, written by quantmark 9\.9"):
        BackendConfig.from_json(broken(change))


@pytest.mark.parametrize("key", ["schema", "quantmark", "name", "weight", "rest", "is_qat"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf'^\$ lacks (the key "{key}"|{key}: )'):
        BackendConfig.from_json(broken(lambda raw: raw.pop(key)))


def test_a_missing_key_of_a_part_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^\$\.activation\.scheme lacks eps, quant_min: a config file says every field"
    ):
        BackendConfig.from_json(
            broken(lambda raw: [raw["activation"]["scheme"].pop(key) for key in ("eps", "quant_min")])
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "^not a config in JSON: Expecting value: line 1 column 1"),
        ("{", "^not a config in JSON: .*line 1 column 2"),
        ("[1]", r"^\$ must be an object, got an array$"),
        ("null", r"^\$ must be an object, got null$"),
        ("{}", r'^\$ lacks the key "schema"; this version of quantmark reads schema 1$'),
        ('{"schema": 1, "schema": 1}', r"^\$\.schema stands there twice; keep one$"),
        ('{"schema": NaN}', "^not a config in JSON: NaN is no JSON number"),
        ("[" * 100_000, "^not a config in JSON: "),
        ('{"schema": ' + "1" * 5000 + "}", r"^(not a config in JSON|\$\.schema is )"),
    ],
)
def test_what_is_no_config_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BackendConfig.from_json(text)


def test_a_key_given_twice_is_named_in_any_object() -> None:
    text = configs.xnnpack().to_json().replace('"symmetric": false', '"symmetric": false, "symmetric": true')
    with pytest.raises(ConfigError, match=r"^\$\.activation\.scheme\.symmetric stands there twice"):
        BackendConfig.from_json(text)


def test_whole_numbers_may_stand_for_floats() -> None:
    found = BackendConfig.from_json(broken(put("branches.max_root_loss_db", 6)))
    assert found.branches.max_root_loss_db == 6.0
    assert type(found.branches.max_root_loss_db) is float
