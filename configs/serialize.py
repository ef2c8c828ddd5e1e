"""Configs as JSON: one key per field, sorted, so that two files can be compared line by line.

    {"schema": 1, "quantmark": "0.1.0", "activation": {...}, "blocks": {"heads": [...], ...}, ...}

Generic over frozen dataclasses: enums are written by value, dtypes by name, frozensets as sorted arrays, an infinite
number as "inf". Reading is strict: a file says every field, and nothing else, or names the JSON path that is wrong.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar, get_args, get_origin

import torch

from ..observers.errors import ConfigError
from ..observers.fields import allowed_names, alternatives, describe, field_types, named, nearest
from ..observers.qparams import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEMA: Final = 1
_HEADER: Final = frozenset({"schema", "quantmark"})
_DTYPES: Final = {str(each).removeprefix("torch."): each for each in DTYPES}
T = TypeVar("T")


def dumps(config: object) -> str:
    """Return a frozen dataclass as JSON text, with the schema's and quantmark's version.

    Raises:
        ConfigError: if it holds an object that is no data, as another quantizer in `rest`.
    """
    package = sys.modules[__name__.partition(".")[0]]  # loaded by now; the root is not for its parts to import
    header = {"schema": SCHEMA, "quantmark": package.__version__}
    return json.dumps(header | _encode_fields(config, "$"), indent=2, sort_keys=True, allow_nan=False) + "\n"


def loads(kind: type[T], text: str) -> T:
    """Return the dataclass that `dumps` wrote.

    Raises:
        ConfigError: naming the JSON path of the first thing that is wrong, and what may stand there.
    """
    try:
        found = json.loads(text, object_pairs_hook=_Object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a config in JSON: {error}") from None
    if not isinstance(found, _Object):
        _fail("$", "an object", found)
    found.check_keys("$", None)
    schema = found.get("schema")
    if "schema" not in found:
        raise ConfigError(f'$ lacks the key "schema"; this version of quantmark reads schema {SCHEMA}')
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        _fail("$.schema", f"an int from 1 to {SCHEMA}", schema)
    if schema > SCHEMA:
        raise ConfigError(
            f"$.schema is {schema}, written by quantmark {found.get('quantmark', 'of unknown version')}; this version "
            f"reads up to {SCHEMA}: use the newer quantmark, or write the file with this one"
        )
    if not isinstance(found.get("quantmark", ""), str):
        _fail("$.quantmark", "a string", found["quantmark"])
    return _decode_fields(kind, found, "$", header=_HEADER)


# -- writing ------------------------------------------------------------------------------------------------


def _encode_fields(value: object, path: str) -> dict[str, Any]:
    shape: Any = type(value)
    return {name: _encode(kind, getattr(value, name), f"{path}.{name}") for name, kind in field_types(shape).items()}


def _encode(kind: Any, value: Any, path: str) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (int, float)):
        number = float(value) if float in alternatives(kind) else value
        return str(number) if math.isinf(number) else number
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (tuple, frozenset)):
        items = sorted(value) if isinstance(value, frozenset) else value
        (inner, *_), *_ = (get_args(each) for each in alternatives(kind) if get_origin(each) is type(value))
        return [_encode(inner, item, f"{path}[{index}]") for index, item in enumerate(items)]
    if type(value) in alternatives(kind) and is_dataclass(value):
        return _encode_fields(value, path)
    raise ConfigError(
        f"{path} holds a {type(value).__name__}, an object that JSON can't say: write the config without it "
        f"(dataclasses.replace(config, {path.rpartition('.')[2]}=None)), and set it again after reading"
    )


# -- reading ------------------------------------------------------------------------------------------------


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys it was given twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.twice = sorted({key for key in keys if keys.count(key) > 1}) if len(self) < len(keys) else []

    def check_keys(self, path: str, wanted: Iterable[str] | None) -> None:
        """Raise unless each of the keys `wanted` is there once and no other is (None: any will do)."""
        if self.twice:
            raise ConfigError(f"{path}.{self.twice[0]} stands there twice; keep one")
        if wanted is None:
            return
        wanted = sorted(wanted)
        unknown = sorted(set(self) - set(wanted))
        if unknown:
            listed = f"allowed: {', '.join(wanted)}{nearest(unknown[0], wanted)}"
            raise ConfigError(f"{path} has no field {unknown[0]!r}; {listed}")
        missing = [key for key in wanted if key not in self]
        if missing:
            raise ConfigError(f"{path} lacks {', '.join(missing)}: a config file says every field")


def _decode_fields(kind: type[T], found: _Object, path: str, header: frozenset[str] = frozenset()) -> T:
    shape: Any = kind
    types, allowed = field_types(shape), allowed_names(shape)
    found.check_keys(path, header | set(types))
    values = {}
    for name, wanted in types.items():
        values[name] = _decode(wanted, found[name], f"{path}.{name}")
        if name in allowed:
            for index, item in enumerate(named(found[name])):
                if item not in allowed[name]:
                    place = "" if isinstance(found[name], str) else f"[{index}]"
                    _unknown(f"{path}.{name}{place}", item, allowed[name])
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _decode(kind: Any, found: Any, path: str) -> Any:
    kinds = alternatives(kind)
    if len(kinds) > 1:  # optional: no field has other unions
        if found is None:
            return None
        (kind,) = (each for each in kinds if each is not type(None))
    origin = get_origin(kind)
    if origin in {frozenset, tuple}:
        return _decode_items(kind, found, path)
    if is_dataclass(kind) and isinstance(kind, type):
        return _decode_fields(kind, found, path) if isinstance(found, _Object) else _fail(path, "an object", found)
    if kind in {int, float, bool, str}:
        return _decode_plain(kind, found, path)
    named = _named_values(kind)
    if named is None:
        raise ConfigError(f"{path} must be null: {describe(kind)} is an object that JSON can't say")
    if not isinstance(found, str):
        _fail(path, f"one of {_quoted(named)}", found)
    return named[found] if found in named else _unknown(path, found, named)


def _decode_items(kind: Any, found: Any, path: str) -> frozenset[Any] | tuple[Any, ...]:
    if not isinstance(found, list):
        _fail(path, "an array", found)
    items = [_decode(get_args(kind)[0], item, f"{path}[{index}]") for index, item in enumerate(found)]
    if get_origin(kind) is tuple:
        return tuple(items)
    for index, item in enumerate(items):
        if item in items[:index]:
            raise ConfigError(f"{path}[{index}] is {item!r} again; keep one")
    return frozenset(items)


def _decode_plain(kind: type, found: Any, path: str) -> Any:
    if kind is float and found in ("inf", "-inf"):
        return float(found)
    if kind is float and isinstance(found, (int, float)) and not isinstance(found, bool):
        try:
            number = float(found)
        except OverflowError:
            number = math.inf
        return number if math.isfinite(number) else _fail(path, 'a number that a double holds, or "inf"', found)
    if type(found) is not kind:
        _fail(path, {bool: "true or false", int: "an int", float: 'a number, or "inf"', str: "a string"}[kind], found)
    return found


def _named_values(kind: Any) -> dict[str, Any] | None:
    """Return name -> value of an annotation whose values have names, or None."""
    if kind is torch.dtype:
        return _DTYPES
    if get_origin(kind) is Literal:
        return {each: each for each in get_args(kind)}
    return {each.value: each for each in kind} if isinstance(kind, type) and issubclass(kind, Enum) else None


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(json.dumps(name) for name in sorted(names))


def _unknown(path: str, found: str, names: Iterable[str]) -> NoReturn:
    raise ConfigError(f"{path} is {json.dumps(found)}; allowed: {_quoted(names)}{nearest(found, names)}")


def _fail(path: str, wanted: str, found: object) -> NoReturn:
    shown = "an object" if isinstance(found, dict) else "an array" if isinstance(found, list) else json.dumps(found)
    raise ConfigError(f"{path} must be {wanted}, got {shown if len(shown) <= 60 else shown[:57] + '...'}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is no JSON number (write "inf" for no limit)')
