"""The fields of frozen dataclasses: what each may hold, by its annotation, and whether it does.

A config is made by hand, by `dataclasses.replace` and from JSON; all three go by what is said here. A field of names
lists those that it may hold in its metadata, under `ALLOWED`.
"""

from __future__ import annotations

import difflib
import inspect
import types
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import torch

from .errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

ALLOWED: Final = "allowed"
_PLAIN: Final = {
    bool: "True or False",
    int: "an int",
    float: "a number",
    str: "a string",
    torch.dtype: "a torch.dtype",
    type(None): "None",
}


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Return name -> resolved annotation of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


@cache
def allowed_names(kind: type) -> dict[str, frozenset[str]]:
    """Return name -> the names that it may hold, for those fields of a dataclass that say so."""
    return {f.name: f.metadata[ALLOWED] for f in fields(kind) if ALLOWED in f.metadata}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself if it is none."""
    return get_args(kind) if get_origin(kind) in {Union, types.UnionType} else (kind,)


def holds(kind: Any, value: object) -> bool:
    """Tell whether the value is of the annotation's type; a float may be given as an int, a bool is no number."""
    origin = get_origin(kind)
    if origin in {Union, types.UnionType}:
        return any(holds(each, value) for each in get_args(kind))
    if origin is Literal:
        return type(value) is str and value in get_args(kind)
    if origin is frozenset:
        return isinstance(value, frozenset) and all(holds(get_args(kind)[0], each) for each in value)
    if origin is tuple:  # tuple[X, ...]
        return isinstance(value, tuple) and all(holds(get_args(kind)[0], each) for each in value)
    if kind in {int, float}:
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def describe(kind: Any) -> str:
    """Return the values that an annotation takes, in words.

    >>> describe(frozenset[str])
    'a frozenset of strings'
    """
    origin = get_origin(kind)
    if origin in {Union, types.UnionType}:
        return " or ".join(describe(each) for each in get_args(kind))
    if origin is Literal:
        return "one of " + ", ".join(repr(each) for each in get_args(kind))
    if origin in {frozenset, tuple}:
        inner = get_args(kind)[0]
        return f"a {origin.__name__} of {'strings' if inner is str else inner.__name__}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(str(each) for each in kind)
    return _PLAIN.get(kind) or _with_article(kind.__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def check_fields(value: object, where: str) -> None:
    """Raise where a field of a dataclass is of another type than its annotation, or holds a name not allowed.

    Args:
        value: the dataclass, from its `__post_init__`.
        where: the part of the config that it is, for messages ("blocks"), or "".

    Raises:
        ConfigError: naming the field, what it was given and what it takes.
    """
    kind: Any = type(value)
    allowed = allowed_names(kind)
    for name, wanted in field_types(kind).items():
        given, path = getattr(value, name), f"{where}.{name}".lstrip(".")
        if not holds(wanted, given):
            raise ConfigError(f"{path} must be {describe(wanted)}, got {_shown(given)}")
        if name in allowed:
            require_names(path, named(given), allowed[name])


def named(value: Any) -> Iterable[str]:
    """Return the names in a field of names: a set of them, a single one, or None."""
    return (value,) if isinstance(value, str) else value or ()


def require_names(path: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise if a name is not allowed, saying which are and which comes nearest."""
    allowed = frozenset(allowed)
    unknown = sorted(set(names) - allowed)
    if unknown:
        listed = ", ".join(sorted(allowed)) or "none"
        hints = nearest(unknown[0], allowed)
        raise ConfigError(f"{path} lists {', '.join(unknown)}; allowed: {listed}{hints}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return "; nearest: x" for the name that is spelled most like the one given, or "" if none is."""
    found = difflib.get_close_matches(name, sorted(names), n=1)
    return f"; nearest: {found[0]}" if found else ""


def require(holds: bool, takes: str, value: object) -> None:
    """Raise unless a value that a user gave is what a function takes.

    Raises:
        InputError: "<takes>; got 3 (int)".
    """
    if not holds:
        raise InputError(f"{takes}; {got(value)}")


def got(value: object) -> str:
    """Return what was given in place of something else, for a message: "got 3 (int)", and how to mend what is common.

    >>> got("xnnpack")
    "got 'xnnpack' (str)"
    """
    if inspect.isroutine(value):
        return f"got the function {value.__name__} itself: call it, {value.__name__}()"
    if isinstance(value, type):
        return f"got the class {value.__name__} itself: make one, {value.__name__}(...)"
    return f"got {_shown(value)}"


def _shown(value: object) -> str:
    """Return a value as messages show it: its type, and the value itself unless it is long."""
    text = "" if isinstance(value, torch.nn.Module) else repr(value)
    if not text or is_dataclass(value) or len(text) > 60 or "\n" in text:
        return _with_article(type(value).__name__)
    return f"{text} ({type(value).__name__})"
