"""What every config factory does with its options before it looks at them."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, get_type_hints

from torchao.quantization.pt2e.quantizer import Quantizer

from ..observers.errors import UnsupportedOptionError
from ..observers.fields import describe, holds, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import BackendConfig

P = ParamSpec("P")


def factory(make: Callable[P, BackendConfig]) -> Callable[P, BackendConfig]:
    """Return a config factory that names an option that it lacks, or a value of the wrong type, as such.

    The wrapped factory raises UnsupportedOptionError, which says what the backend has, where Python would raise a
    TypeError about a function, or the factory some error about a part of the config.
    """
    backend = make.__name__
    options = list(inspect.signature(make).parameters)

    @wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> BackendConfig:
        types = get_type_hints(make, localns={"Quantizer": Quantizer})  # which factories import for typing alone
        for name, value in kwargs.items():
            if name not in options:
                raise UnsupportedOptionError(
                    f"{backend} has no option {name!r}; it has {', '.join(options)}{nearest(name, options)}"
                )
            if not holds(types[name], value):
                raise UnsupportedOptionError(f"{backend}: {name} must be {describe(types[name])}, got {value!r}")
        return make(*args, **kwargs)

    return checked
