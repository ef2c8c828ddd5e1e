"""The command line: `python -m quantmark`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..observers.errors import InputError, QuantmarkError
from .quiet import quiet

__all__ = ["main"]

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


def main() -> None:
    """Run the command line."""
    try:
        tyro.extras.subcommand_cli_from_dict({"demo": demo}, prog="quantmark", description=__doc__)
    except QuantmarkError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", soft_wrap=True, highlight=False)
        sys.exit(USER_ERROR)
