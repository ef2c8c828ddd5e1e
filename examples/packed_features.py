"""One packed row of raw measurements, cut into groups of features: what Cadence's hoist makes of it.

The table is scikit-learn's breast cancer data: 569 tumours, 30 measurements each, raw, from thousandths (the error of
the fractal dimension) to thousands (the largest area). A small model slices the packed row into five groups of like
size, each with a linear + relu tower of its own; normalization is folded into the towers, so that raw rows are fed.

Cadence's compiler replaces the five quantize ops by one above the row. With CadenceDefaultQuantizer the five differ,
so the pass takes one group's qparams for all; quantmark sees the ranges and does not let that happen.

    python examples/packed_features.py [--markdown] [--seed N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from quantmark import BackendQuantizer, configs
from quantmark.cli.quiet import quiet
from quantmark.observers.metrics import sqnr_db
from quantmark.observers.rules import Conflict, HoistRule

GROUPS = {  # by how far a measurement spreads: columns of the raw table
    "hundreds": [3, 13, 23, 2, 22],  # areas, perimeters
    "tens": [0, 1, 20, 21, 12],  # radii, textures
    "ones": [10, 11, 25, 26],
    "tenths": [4, 5, 6, 7, 8, 15, 16, 24, 27, 28, 29],
    "hundredths": [9, 14, 17, 18, 19],
}
ORDER = [column for columns in GROUPS.values() for column in columns]
SIZES = [len(columns) for columns in GROUPS.values()]
WIDTH = 8
ALL_MACS = WIDTH * (sum(SIZES) + 2 * len(SIZES))


class PackedTowers(nn.Module):
    """A tower for each group of features in a packed row, and a head over all of them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(size, width) for size in SIZES)
        self.head = nn.Linear(width * len(SIZES), 2)

    def forward(self, row: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and what each tower says."""
        said, start = [], 0
        for tower, size in zip(self.towers, SIZES, strict=True):
            said.append(torch.relu(tower(row[:, start : start + size])))
            start += size
        return self.head(torch.cat(said, 1)), said


@dataclass
class Data:
    """Packed raw rows."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load(seed: int) -> Data:
    """Return the table with its columns packed by group, 7 of 10 rows for training and calibration."""
    rows, labels = load_breast_cancer(return_X_y=True)
    parts = train_test_split(rows[:, ORDER], labels, test_size=0.3, random_state=seed, stratify=labels)
    train, test = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    return Data(train, torch.tensor(parts[2]), test, torch.tensor(parts[3]))


def trained(data: Data, *, epochs: int, seed: int) -> PackedTowers:
    """Train on normalized rows, then fold the normalization into the towers."""
    torch.manual_seed(seed)
    model = PackedTowers()
    mean, deviation = data.train.mean(0), data.train.std(0)
    rows = (data.train - mean) / deviation
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows)[0], data.train_labels).backward()
        optimizer.step()
    start = 0
    with torch.no_grad():
        for tower, size in zip(model.towers, SIZES, strict=True):
            part = slice(start, start + size)
            if isinstance(tower, nn.Linear):
                tower.weight /= deviation[part]
                tower.bias.sub_(tower.weight @ mean[part])
            start += size
    return model.eval()


@dataclass
class Result:
    """What one quantizer's model says before and after the pass, in dB against the float model."""

    name: str
    when: str
    right: int
    logits_db: float
    towers_db: list[float]
    float_macs: int = ALL_MACS
    identical: bool = True


def measured(name: str, when: str, outputs: Sequence[Tensor], model: PackedTowers, data: Data) -> Result:
    """Compare outputs (logits, then towers) with the float model's."""
    with torch.no_grad():
        logits, said = model(data.test)
    right = int((outputs[0].argmax(1) == data.test_labels).sum())
    towers = [sqnr_db(a, b) for a, b in zip(said, outputs[1:], strict=True)]
    return Result(name, when, right, sqnr_db(logits, outputs[0]), towers)


def hoisted(converted: GraphModule, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Run the model on the edge dialect before and after executorch's pass."""
    import executorch.backends.cadence.aot.ops_registrations  # noqa: F401  # registers torch.ops.cadence
    from executorch.backends.cadence.aot.reorder_ops import AdvanceQuantizeOpAboveDefInBranchPass
    from executorch.exir import EdgeCompileConfig, to_edge

    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    edge = to_edge(torch.export.export(converted, (rows,)), compile_config=config)
    before = flat(edge.exported_program().module()(rows))
    after = edge.transform([AdvanceQuantizeOpAboveDefInBranchPass()])
    return before, flat(after.exported_program().module()(rows))


def float_macs(graph: GraphModule) -> int:
    """Return the multiply-accumulates per row of the linear ops that read float values."""
    linears = [n for n in graph.graph.nodes if n.target is torch.ops.aten.linear.default]
    floats = [n for n in linears if "dequantize" not in n.args[0].name]
    return sum(n.args[0].meta["val"].shape[-1] * n.meta["val"].shape[-1] for n in floats)


def flat(outputs: tuple[Tensor, list[Tensor]]) -> list[Tensor]:
    """Return the logits and what each tower says in one list."""
    return [outputs[0], *outputs[1]]


def compared(model: PackedTowers, data: Data, name: str, quantizer: Quantizer) -> list[Result]:
    """Quantize with the three calls, and measure before and after the pass."""
    exported = torch.export.export(model, (data.test,), strict=True).module()  # Cadence's finds nothing otherwise
    prepared = prepare_pt2e(exported, quantizer)
    with torch.no_grad():
        for start in range(0, len(data.train) - len(data.test) + 1, len(data.test)):
            prepared(data.train[start : start + len(data.test)])
    converted = convert_pt2e(prepared)
    before, after = hoisted(converted, data.test)
    pairs = ("before", before), ("after", after)
    results = [measured(name, when, outputs, model, data) for when, outputs in pairs]
    for result in results:
        result.float_macs = float_macs(converted)
    results[1].identical = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return results


def quantizers() -> dict[str, Callable[[], Quantizer]]:
    """Return what is compared: name -> how it is made."""
    from executorch.backends.cadence.aot.quantizer.quantizer import CadenceDefaultQuantizer

    always = HoistRule.ALWAYS
    return {
        "Cadence": CadenceDefaultQuantizer,
        "quantmark": lambda: BackendQuantizer(configs.cadence(hoist=always)),
        "union": lambda: BackendQuantizer(configs.cadence(hoist=always, conflict=Conflict.UNION)),
    }


def compare(*, epochs: int = 300, seed: int = 0) -> tuple[list[Result], Data]:
    """Train, quantize and measure everything."""
    data = load(seed)
    model = trained(data, epochs=epochs, seed=seed)
    with torch.no_grad():
        results = [measured("float", "", flat(model(data.test)), model, data)]
    for name, make in quantizers().items():
        results += compared(model, data, name, make())
    return results, data


def tabulated(results: Sequence[Result], data: Data) -> tuple[list[str], list[list[str]]]:
    """Return the table's heading and rows."""
    shown = [r for r in results if (r.name, r.when) != ("union", "before")]  # the same as after
    heading = ["", *(f"{r.name}, {r.when}" if r.when else r.name for r in shown)]
    rows = [
        [f"right of {len(data.test)}", *(str(r.right) for r in shown)],
        ["logits", *(_db(r.logits_db) for r in shown)],
    ]
    for index, group in enumerate(GROUPS):
        low, high = _range(data.train, index)
        rows.append([f"{group}, {low:.2g}..{high:.4g}", *(_db(r.towers_db[index]) for r in shown)])
    rows.append([f"MACs in float, of {ALL_MACS}", *(str(r.float_macs) for r in shown)])
    rows.append(["hoist is bit-exact", *("" if r.when != "after" else _yes(r.identical) for r in shown)])
    return heading, rows


def _range(rows: Tensor, index: int) -> tuple[float, float]:
    part = rows[:, sum(SIZES[:index]) : sum(SIZES[: index + 1])]
    return float(part.min()), float(part.max())


def _db(value: float) -> str:
    return "" if value == float("inf") else f"{value:.1f}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def as_markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as it stands in the README."""
    lines = [list(heading), ["---", *("---:" for _ in heading[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    parser.add_argument("--seed", type=int, default=0, help="of split and training (default: 0)")
    parser.add_argument("--epochs", type=int, default=300, help="of training (default: 300)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the model is tiny
    with quiet():
        results, data = compare(epochs=options.epochs, seed=options.seed)
    heading, rows = tabulated(results, data)
    if options.markdown:
        print(as_markdown(heading, rows))
        return
    table = Table(
        title="Packed features, int8: SQNR in dB before and after Cadence's hoist", box=SIMPLE, padding=(0, 0, 0, 1)
    )
    for index, title in enumerate(heading):
        table.add_column(title.replace(", ", "\n"), justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
