"""Compare quantmark's observers with torchao's on the same data, in one run: `python benchmarks/observers.py`.

Three tables: the time of a whole forward, the time of asking for qparams, and the SQNR of quantizing what was
observed. Repeats of both sides alternate and medians are taken, so that what else the machine does hits both.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torchao.quantization.pt2e.observer import HistogramObserver, MinMaxObserver, MovingAverageMinMaxObserver

from quantmark.observers.estimators import (
    Estimator,
    HistogramEstimator,
    MinMaxEstimator,
    MovingAverageEstimator,
)
from quantmark.observers.observer import Component, RangeObserver
from quantmark.observers.plan import Cell, Plan
from quantmark.observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, Scheme

if TYPE_CHECKING:
    from collections.abc import Callable

LAWS: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "laplace": lambda n: torch.distributions.Laplace(0.0, 1.0).sample((n,)),
    "relu of normal": lambda n: torch.randn(n).relu(),
    "exponential": lambda n: torch.empty(n).exponential_(),
    "student t, 3 dof": lambda n: torch.distributions.StudentT(3.0).sample((n,)),
    "student t, 1.5 dof": lambda n: torch.distributions.StudentT(1.5).sample((n,)),
    "uniform": lambda n: torch.rand(n) * 2 - 1,
    "silu of normal": lambda n: torch.nn.functional.silu(3 * torch.randn(n)),
    "gelu of normal": lambda n: torch.nn.functional.gelu(torch.randn(n)),
    "normal, one 4000": lambda n: torch.cat((torch.randn(n - 1), torch.tensor([4000.0]))),
}
PAIRS: dict[str, tuple[type[Estimator], Any]] = {
    "min-max": (MinMaxEstimator, MinMaxObserver),
    "moving average": (MovingAverageEstimator, MovingAverageMinMaxObserver),
    "histogram": (HistogramEstimator, HistogramObserver),
}
SCHEMES = {"affine": INT8_AFFINE, "symmetric": INT8_SYMMETRIC}
NOISE_DB = 0.05


@dataclass
class Score:
    """What was won, lost or neither, for the last line."""

    wins: int = 0
    ties: int = 0
    losses: int = 0

    def verdict(self, gain: float, noise: float) -> str:
        """Count one comparison, positive `gain` being better, and return its cell."""
        if gain > noise:
            self.wins += 1
            return "[green]win"
        if gain < -noise:
            self.losses += 1
            return "[red]loss"
        self.ties += 1
        return "tie"


def our_observer(kind: type[Estimator], scheme: Scheme) -> RangeObserver:
    """Return an observer of a plan that has one cell."""
    component = Component(Plan(cells={"x": Cell(name="x", where="x", scheme=scheme)}))
    return RangeObserver(
        scheme.dtype,
        scheme.quant_min,
        scheme.quant_max,
        scheme.qscheme,
        component=component,
        cell="x",
        estimator=kind(),
    )


def their_observer(kind: Any, scheme: Scheme) -> Any:
    """Return torchao's observer with the same options."""
    return kind(
        dtype=scheme.dtype,
        quant_min=scheme.quant_min,
        quant_max=scheme.quant_max,
        qscheme=scheme.qscheme,
        eps=scheme.eps,
    )


def alternate(ours: Callable[[], object], theirs: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Return the median seconds of one call of each, from repeats that alternate for about `seconds`."""

    def timed(call: Callable[[], object], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    timed(ours, 1), timed(theirs, 1)
    once = max(timed(ours, 1), timed(theirs, 1))
    calls = max(1, int(5e-4 / once))
    repeats = min(max(int(seconds / (2 * once * calls)), 7), 300)
    times = [(timed(ours, calls), timed(theirs, calls)) for _ in range(repeats)]
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def forward_table(sizes: list[int], seconds: float, score: Score) -> Table:
    """Time whole forwards, after a first batch."""
    table = Table("observer", "dtype", "elements", "quantmark", "torchao", "ratio", "", title="Forward, one batch")
    cases = [(name, torch.float32, size) for name in PAIRS for size in sizes]
    cases += [(name, torch.bfloat16, sizes[-2]) for name in ("min-max", "moving average")]
    for name, dtype, size in track(cases, "forward", transient=True):
        torch.manual_seed(0)
        values = torch.randn(size).to(dtype)
        kinds = PAIRS[name]
        ours, theirs = our_observer(kinds[0], INT8_AFFINE), their_observer(kinds[1], INT8_AFFINE)
        mine, other = alternate(lambda: ours(values), lambda: theirs(values), seconds)  # noqa: B023
        cells = [name, str(dtype)[6:], f"{size:,}", f"{mine * 1e6:,.1f} us", f"{other * 1e6:,.1f} us"]
        table.add_row(*cells, f"{mine / other:.2f}", score.verdict(1 - mine / other, 0.03))
    return table


def resolve_table(seconds: float, score: Score) -> Table:
    """Time `calculate_qparams` after a batch of 1e5 values; nothing is kept from an earlier call."""
    table = Table("observer", "law", "scheme", "quantmark", "torchao", "ratio", "", title="Asking for qparams")
    laws = ("normal", "relu of normal", "student t, 1.5 dof")
    cases = [(law, scheme) for law in laws for scheme in SCHEMES]
    for law, scheme in track(cases, "qparams", transient=True):
        torch.manual_seed(0)
        values = LAWS[law](100_000)
        ours = our_observer(HistogramEstimator, SCHEMES[scheme])
        theirs = their_observer(HistogramObserver, SCHEMES[scheme])
        ours(values), theirs(values)
        state = ours.state_dict()

        def afresh() -> object:
            ours.load_state_dict(state)  # noqa: B023
            return ours.calculate_qparams()  # noqa: B023

        mine, other = alternate(afresh, theirs.calculate_qparams, seconds)
        cells = ["histogram", law, scheme, f"{mine * 1e3:.2f} ms", f"{other * 1e3:.2f} ms"]
        table.add_row(*cells, f"{mine / other:.3f}", score.verdict(1 - mine / other, 0.03))
    return table


def sqnr(values: Tensor, qparams: tuple[Tensor, Tensor], scheme: Scheme) -> float:
    """Return the SQNR, in dB, of quantizing `values`."""
    exact, scale, zero_point = values.double(), qparams[0].double().item(), int(qparams[1])
    codes = (torch.round(exact / scale) + zero_point).clamp(scheme.quant_min, scheme.quant_max)
    noise = (exact - (codes - zero_point) * scale).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))


def quality_table(sizes: list[int], seeds: int, score: Score) -> Table:
    """Compare the SQNR on the observed data."""
    table = Table(title="SQNR on the observed data, dB (histogram; mean over seeds)")
    for header in ("law", "elements", "scheme", "quantmark", "torchao", "gain", "worst seed", "over min-max", ""):
        table.add_column(header)
    cases = [(law, size, scheme) for law in LAWS for size in sizes for scheme in SCHEMES]
    for law, size, name in track(cases, "SQNR", transient=True):
        scheme, rows = SCHEMES[name], []
        for seed in range(seeds):
            torch.manual_seed(seed)
            values = LAWS[law](size)
            observers = (
                our_observer(HistogramEstimator, scheme),
                their_observer(HistogramObserver, scheme),
                our_observer(MinMaxEstimator, scheme),
            )
            for observer in observers:
                observer(values)
            rows.append([sqnr(values, observer.calculate_qparams(), scheme) for observer in observers])
        ours, theirs, plain = (statistics.fmean(column) for column in zip(*rows, strict=True))
        worst = min(row[0] - row[1] for row in rows)
        table.add_row(
            law,
            f"{size:,}",
            name,
            f"{ours:.2f}",
            f"{theirs:.2f}",
            f"{ours - theirs:+.2f}",
            f"[red]{worst:+.2f}" if worst < -NOISE_DB else f"{worst:+.2f}",
            f"{ours - plain:+.2f}",
            score.verdict(ours - theirs, NOISE_DB) if math.isfinite(ours - theirs) else "",
        )
    return table


def main() -> None:
    """Parse the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per timed case (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="seeds per SQNR case (default: %(default)s)")
    parser.add_argument("--largest", type=int, default=7, help="exponent of the largest size (default: 7)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # torchao's, on its way to qparams
    console, score = Console(), Score()
    sizes = [10**power for power in range(3, options.largest + 1)]
    console.print(f"torch {torch.__version__}, {options.threads} thread(s); a ratio below 1 is faster than torchao")
    with torch.no_grad():
        console.print(forward_table(sizes, options.seconds, score))
        console.print(resolve_table(options.seconds, score))
        console.print(quality_table([n for n in sizes if 10**4 <= n <= 10**6], options.seeds, score))
    console.print(
        f"{score.wins} wins, {score.ties} ties, [bold]{score.losses} losses[/bold] "
        f"(noise: 3 % of a time, {NOISE_DB} dB)"
    )


if __name__ == "__main__":
    main()
