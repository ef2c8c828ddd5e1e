"""The command line: `python -m quantmark`."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import tyro
from rich.console import Console
from rich.text import Text

from ..observers.errors import InputError, QuantmarkError
from .backends import backends
from .check import check
from .explain import explain
from .quantize import quantize
from .quiet import quiet
from .ranges import ranges
from .sensitivity import sensitivity

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_ABOUT = "Quantize exported models so that what the backend's passes assume holds, and check that it does."
USER_ERROR = 2  # the exit status of an error that the user can mend, as argparse has it


def demo(
    *,
    seed: int = 0,
    epochs: int = 10,
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
) -> None:
    """Quantize a small network, trained on handwritten digits, and run it on the ExecuTorch runtime.

    Prints accuracy, SQNR and more beside executorch's own XNNPACKQuantizer, on the same data.

    Args:
        seed: of the weights, the batches and the choice of held-out digits.
        epochs: passes over the training digits.
        output: folder for the programs (.pte); a new temporary one by default.
    """
    if epochs < 1:
        raise InputError(f"--epochs must be at least 1, got {epochs}")
    folder = _folder(output)
    with quiet():
        from .demo import run
    run(seed, epochs, folder)


def _folder(output: Path | None) -> Path:
    if output is None:
        return Path(tempfile.mkdtemp(prefix="quantmark-demo-"))
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output} can't be made a folder: {error.strerror}") from None
    return output


_COMMANDS: Final[dict[str, Callable[..., int | None]]] = {
    "demo": demo,
    "backends": backends,
    "ranges": ranges,
    "quantize": quantize,
    "check": check,
    "explain": explain,
    "sensitivity": sensitivity,
}


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no draft of an output is left then
    try:
        status = tyro.extras.subcommand_cli_from_dict(_COMMANDS, prog="quantmark", description=_ABOUT)
    except QuantmarkError as error:
        _say_error(str(error))
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        _say_error("interrupted")
        sys.exit(USER_ERROR)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    sys.exit(status or 0)


def _say_error(message: str) -> None:
    text = Text.assemble(("error:", "bold red"), " ", message)
    Console(stderr=True).print(text, soft_wrap=True, highlight=False)
