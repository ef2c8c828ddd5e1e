"""The command line: `python -m quantmark`."""

import tyro

__all__ = ["main"]


def demo() -> None:
    """Quantize a small network, trained on handwritten digits, and run it on the ExecuTorch runtime."""
    raise NotImplementedError("`quantmark demo` is not written yet")


def main() -> None:
    """Run the command line."""
    tyro.extras.subcommand_cli_from_dict({"demo": demo}, prog="quantmark", description=__doc__)
