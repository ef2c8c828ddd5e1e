"""Where a command's model comes from: a .pt2 file, or a function of the user's that is called."""

from __future__ import annotations

import importlib
import logging
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..observers.errors import InputError
from .files import load_program, step
from .quiet import quiet

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Model = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL.pt2")]
Function = Annotated[str | None, tyro.conf.arg(name="model", metavar="PACKAGE.MODULE:FUNCTION")]
"""The types of a command's `model` and `function`."""


def read_model(model: Path | None, function: str | None) -> tuple[ExportedProgram, str]:
    """Return the program of a file or of a function, and what it is called.

    Raises:
        InputError: if neither or both are given, or the one that is yields no program.
    """
    if (model is None) == (function is None):
        what = "both are" if model is not None else "neither is"
        raise InputError(f"give a MODEL.pt2 or --model PACKAGE.MODULE:FUNCTION; {what} given")
    return (load_program(model), model.name) if model is not None else (_called(str(function)), str(function))


def _called(target: str) -> ExportedProgram:
    """Import a module, which runs it, and call its function."""
    where = f"--model {target}"
    module_name, colon, name = target.partition(":")
    if not (colon and module_name and name):
        raise InputError(f"{where}: takes PACKAGE.MODULE:FUNCTION")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:  # as `python -m` has it
        sys.path.insert(0, str(Path.cwd()))
    with step(f"Calling {target}"):
        try:
            with quiet():
                module = importlib.import_module(module_name)
        except Exception as error:  # noqa: BLE001  (whatever the user's module raises)
            raise InputError(f"{where}: importing {module_name} failed: {_first_line(error)}") from None
        made = getattr(module, name, None)
        if not callable(made):
            from ..observers.fields import nearest

            raise InputError(f"{where}: {module_name} has no function {name}{nearest(name, dir(module))}")
        try:
            found = made()
        except Exception as error:  # noqa: BLE001  (whatever the user's function raises)
            raise InputError(f"{where}: the function raised {_first_line(error)}") from None
        return _exported(where, found)


def _exported(where: str, found: object) -> ExportedProgram:
    with quiet(logging.ERROR), redirect_stderr(StringIO()):  # torch prints the graph as far as it came
        import torch
        from torch.export import ExportedProgram

        if isinstance(found, ExportedProgram):
            return found
        pair = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
        module, inputs = pair
        if not isinstance(module, torch.nn.Module) or not isinstance(inputs, tuple):
            raise InputError(
                f"{where}: the function must return an ExportedProgram, or a module and a tuple of example inputs; "
                f"it returned a {type(found).__name__}"
            )
        try:
            return torch.export.export(module.eval(), inputs)
        except Exception as error:  # noqa: BLE001  (whatever torch stumbles over in a user's model)
            raise InputError(f"{where}: the model can't be exported: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
