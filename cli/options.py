"""The backends' options on the command line, `--set NAME=VALUE`: what the config factories say of themselves."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import tyro

from ..observers.errors import InputError, UnsupportedOptionError
from .files import step
from .quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..configs.base import BackendConfig

Options = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]],
    tyro.conf.arg(name="set", metavar="NAME=VALUE", help_behavior_hint="(may be given several times)"),
]
"""The type of a command's `options`."""

_DOCUMENTED: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)  # "Args:" of a docstring
_WORDS: Final = {"true": True, "false": False}


def backend_config(name: str, options: Sequence[str] = ()) -> BackendConfig:
    """Return the config of a backend, as its factory makes it with the options given.

    Raises:
        InputError: if there is no such backend; names the nearest.
        UnsupportedOptionError: if an option is none of the backend's, or its value can't be; lists what it has.
    """
    make = _factory(name)
    given: dict[str, object] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise InputError(f"--set takes NAME=VALUE, got {option!r}; {name} has {_listed(make)}")
        given[key] = _read(name, make, key, value)
    return make(**given)


def config_if_given(name: str | None, options: Sequence[str]) -> BackendConfig | None:
    """Return the config of a backend that need not be named.

    Raises:
        InputError, UnsupportedOptionError: as `backend_config`; and for options of no backend.
    """
    if options and name is None:
        raise InputError("--set sets options of a backend: give --backend too")
    return backend_config(name, options) if name else None


def backend_options(name: str) -> dict[str, str]:
    """Return the options of a backend that fit on a command line: "name=default" -> what the factory says of it."""
    make = _factory(name)
    said: dict[str, str] = {}
    for each in [*backend_names(), name]:  # its own word is the last; one that refers to another has none
        said |= dict(re.findall(_DOCUMENTED, inspect.getdoc(_factory(each)) or ""))
    parameters = inspect.signature(make).parameters
    return {f"{key}={_word(parameters[key].default)}": " ".join(said.get(key, "").split()) for key in _kinds(make)}


def backend_names() -> list[str]:
    """Return the names of the backends: the factories in `configs`."""
    with step("Loading the backends"), quiet():
        from .. import configs

    return [name for name in configs.__all__ if inspect.isfunction(getattr(configs, name))]


def _factory(name: str) -> Callable[..., BackendConfig]:
    known = backend_names()
    if name not in known:
        from ..observers.fields import nearest

        raise InputError(f"there is no backend {name!r}; there are {', '.join(known)}{nearest(name, known)}")
    from .. import configs

    make: Callable[..., BackendConfig] = getattr(configs, name)
    return make


def _kinds(make: Callable[..., BackendConfig]) -> dict[str, Any]:
    """Return the annotation of each option of which a value can be written as a word."""
    from torchao.quantization.pt2e.quantizer import Quantizer

    hints = get_type_hints(make, localns={"Quantizer": Quantizer})
    return {key: hints[key] for key in inspect.signature(make).parameters if _words(hints[key])}


def _read(backend: str, make: Callable[..., BackendConfig], key: str, text: str) -> object:
    from ..observers.fields import alternatives, nearest  # torch, which --help need not wait for

    kinds = _kinds(make)
    if key not in kinds:
        raise UnsupportedOptionError(f"{backend} has no option {key!r}; it has {_listed(make)}{nearest(key, kinds)}")
    for kind in alternatives(kinds[key]):
        found = _value(kind, text)
        if found is not _UNREAD:
            return found
    raise UnsupportedOptionError(f"{backend}: {key} is {_words(kinds[key])}, not {text!r}")


def _listed(make: Callable[..., BackendConfig]) -> str:
    return ", ".join(_kinds(make))


_UNREAD = object()


def _value(kind: Any, text: str) -> object:
    """Return a word as a value of an annotation, or _UNREAD if it is none."""
    if kind is NoneType:
        return None if text.lower() == "none" else _UNREAD
    if kind is bool:
        return _WORDS.get(text.lower(), _UNREAD)
    if get_origin(kind) is Literal:
        return text if text in get_args(kind) else _UNREAD
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next((each for each in kind if text.lower() == each.value), _UNREAD)
    try:
        return kind(text)
    except ValueError:
        return _UNREAD


def _words(kind: Any) -> str:
    """Return the words that an annotation takes, or "" if none of its values is a word."""
    from ..observers.fields import alternatives

    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(str(each.value) for each in kind)
    if len(parts := alternatives(kind)) > 1:
        words = [_words(part) for part in parts if part is not NoneType]
        return " or ".join([*words, "none"]) if all(words) else ""
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a name"}.get(kind, "")


def _word(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower()
