"""What commands read and write: exported programs, range tables, and files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
import zipfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from ..observers.errors import InputError
from .quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.export import ExportedProgram

    from ..observers.table import RangeTable


def note(text: str) -> None:
    """Tell the user something that is no result, on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(text, markup=False)


def load_program(path: Path) -> ExportedProgram:
    """Read what `torch.export.save` wrote.

    Raises:
        InputError: if there is no such file, or it holds no exported program.
    """
    require_file(path, "model")
    wrong = f"{path} is no exported program; a .pt2 is what torch.export.save writes"
    if not zipfile.is_zipfile(path):
        raise InputError(wrong)
    with step(f"Loading {path.name}"), quiet():
        import torch
        from torchao.quantization import pt2e  # noqa: F401  (registers the ops of quantized programs)

        try:
            return torch.export.load(path)
        except (KeyboardInterrupt, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  (whatever torch stumbles over in a file of another kind)
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(f"{wrong} ({first[:200]})") from None


def load_ranges(path: Path) -> RangeTable:
    """Read a range table.

    Raises:
        InputError: if there is no such file, or it is no range table.
    """
    require_file(path, "range table")
    from ..observers.table import RangeTable

    try:
        return RangeTable.from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise InputError(f"{path} is no range table: it holds no text") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def require_file(path: Path, what: str) -> None:
    """Raise unless the path is a file that can be read."""
    if not path.exists():
        raise InputError(f"there is no {what} {path}")
    if not path.is_file():
        raise InputError(f"the {what} {path} is no file")
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"the {what} {path} can't be read: {error.strerror}") from None


class Shown(Protocol):
    """What is printed as tables, as plain text, or as JSON."""

    def to_json(self) -> str:
        """Return all of it as JSON."""
        ...


def show(console: Console, found: Shown, *, json: bool) -> None:
    """Print a result: as JSON, as tables on a terminal, as plain text elsewhere."""
    if json:
        console.out(found.to_json(), highlight=False)
    elif console.is_terminal:
        console.print(found)
    else:
        console.out(str(found), highlight=False)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say on a terminal's stderr what is going on."""
    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        yield


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes `path` at the end; nothing is left behind after an exception.

    Raises:
        InputError: at once, if nothing can be written there.
    """
    if path.is_dir():
        raise InputError(f"the output {path} is a folder")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise InputError(f"the output {path} can't be written: {error.strerror}") from None
    draft = Path(name)
    try:
        yield draft
        draft.chmod(0o666 & ~_umask())
        draft.replace(path)
    except OSError as error:
        raise InputError(f"the output {path} can't be written: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
