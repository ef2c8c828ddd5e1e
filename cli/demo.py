"""`quantmark demo`: train, quantize, check, lower and run a small network, beside executorch's own quantizer."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from .. import configs
from ..annotators.blocks import clamp_bounds
from ..annotators.graph import op_name, users
from ..configs.ops import HEADS
from ..observers.metrics import sqnr_db
from ..workflow import quantize, track
from .digits import Digits, load_digits, train
from .lowering import Lowered, lower_to_xnnpack, run_program
from .quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torch.fx import GraphModule, Node


_PEER: Final = "XNNPACKQuantizer"
_OURS: Final = "quantmark"


@dataclass(frozen=True)
class Result:
    """One model, in eager mode and on the runtime.

    Args:
        eager: its logits on the held-out digits.
        lowered: the program.
        on_runtime: the program's logits on the same digits, one by one.
        heads: weighted ops with quantized input, of how many.
        fused: activations that read a quantized weighted op directly, of how many; without a quantization between.
    """

    eager: Tensor
    lowered: Lowered
    on_runtime: Tensor
    heads: tuple[int, int]
    fused: tuple[int, int]


def run(seed: int, epochs: int, folder: Path) -> None:
    """Run the demo, write its programs to `folder` and print its table. Calibrated by 64 images, run one by one."""
    console, status = Console(), Console(stderr=True).status
    with quiet(), _one_thread():
        digits = load_digits(seed)
        model = train(digits, epochs, seed)
        quantized = quantize(model, digits.calibration(), configs.xnnpack(), dynamic_shapes=_dynamic())
        peer = _peer(model, digits)
        results = {}
        for name, each in (("float", model), (_PEER, peer), (_OURS, quantized.model)):
            with status(f"Lowering and running {name}"):
                results[name] = _lower_and_run(each, digits, folder / f"{name.lower()}.pte")
    rows = _rows(digits, results["float"].eager)
    console.print("Held-out handwritten digits, int8 on XNNPACK. SQNR: of the logits, against the float model.")
    console.print(_table(results, rows))
    console.print(f"Checks of {_OURS}'s graph: {quantized.report}", soft_wrap=True, markup=False)
    console.print(f"Programs: {folder}", soft_wrap=True, markup=False)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from splitting tensors this small between threads, which costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _dynamic() -> tuple[dict[int, torch.export.Dim]]:
    return ({0: torch.export.Dim("batch")},)


def _peer(model: nn.Module, digits: Digits) -> GraphModule:
    """Quantize with executorch's own quantizer, set up as its documentation says, on the same data."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    batches = digits.calibration()
    exported = torch.export.export(model, (batches[0],), dynamic_shapes=_dynamic()).module()
    prepared = prepare_pt2e(exported, quantizer)
    with torch.no_grad():
        for batch in track(batches, "Calibrating XNNPACKQuantizer", len(batches)):
            prepared(batch)
    return convert_pt2e(prepared)


def _lower_and_run(model: nn.Module, digits: Digits, program: Path) -> Result:
    with torch.no_grad():
        eager = model(digits.images)
    lowered = lower_to_xnnpack(model, (digits.images[:1],))
    program.write_bytes(lowered.buffer)
    outputs = run_program(program, ((image,) for image in digits.images.split(1)))
    heads, fused = _count_blocks(model) if isinstance(model, torch.fx.GraphModule) else ((0, 0), (0, 0))
    return Result(eager, lowered, torch.cat([logits for (logits,) in outputs]), heads, fused)


def _count_blocks(model: GraphModule) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (quantized, all) weighted ops, and (fused, all) of the activations that follow them."""
    heads = [node for node in model.graph.nodes if op_name(node) in HEADS]
    quantized = [node for node in heads if _is_dequantize(node.args[0])]
    direct = [node for node in quantized if _clamps(users(node))]
    apart = [node for node in quantized if _clamps(_behind_quantization(node))]
    return (len(quantized), len(heads)), (len(direct), len(direct) + len(apart))


def _clamps(nodes: Iterable[Node]) -> bool:
    return any(clamp_bounds(node) is not None for node in nodes)


def _behind_quantization(node: Node) -> list[Node]:
    """Return the readers of the node's value behind a quantize and dequantize."""
    quantize_ops = [user for user in users(node) if "quantize_per_tensor" in str(user.target)]
    return [reader for q in quantize_ops for dq in users(q) for reader in users(dq)]


def _is_dequantize(node: object) -> bool:
    return "dequantize" in str(getattr(node, "target", ""))


@dataclass(frozen=True)
class Row:
    """One line of the table: what is measured, how, and whether more of it is better (or less)."""

    what: str
    measure: Callable[[Result], float]
    form: str
    more_is_better: bool = True
    of: Callable[[Result], int] | None = None

    def text(self, result: Result) -> str:
        """Return the measured value as text."""
        value = self.measure(result)
        total = f" of {self.of(result)}" if self.of else ""
        return "" if math.isinf(value) or total == " of 0" else f"{value:{self.form}}{total}"


def _rows(digits: Digits, reference: Tensor) -> list[Row]:
    total = len(digits.labels)
    return [
        Row(f"right of {total}, eager", lambda r: digits.right(r.eager), "d"),
        Row(f"right of {total}, runtime", lambda r: digits.right(r.on_runtime), "d"),
        Row("SQNR in dB, eager", lambda r: sqnr_db(reference, r.eager), ".1f"),
        Row("SQNR in dB, runtime", lambda r: sqnr_db(reference, r.on_runtime), ".1f"),
        Row("blocks quantized", lambda r: r.heads[0], "d", of=lambda r: r.heads[1]),
        Row("activations fused", lambda r: r.fused[0], "d", of=lambda r: r.fused[1]),
        Row("XNNPACK delegates", lambda r: r.lowered.delegates, "d", more_is_better=False),
        Row("ops outside of them", lambda r: len(r.lowered.outside), "d", more_is_better=False),
        Row("program, bytes", lambda r: len(r.lowered.buffer), ",d", more_is_better=False),
    ]


def _table(results: dict[str, Result], rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    table.add_column("")
    verdicts = {1: "[bold green]better[/]", 0: "equal", -1: "[bold red]worse[/]"}
    for row in rows:
        table.add_row(row.what, *(row.text(result) for result in results.values()), verdicts[_compare(row, results)])
    return table


def _compare(row: Row, results: dict[str, Result]) -> int:
    """Return 1 where quantmark is better than its peer, -1 where it is worse, 0 where both read the same."""
    peer, ours = results[_PEER], results[_OURS]
    if row.text(peer) == row.text(ours):
        return 0
    return 1 if (row.measure(ours) > row.measure(peer)) is row.more_is_better else -1
