"""Numbers for each node of a graph as Model Explorer reads them ("node data"), to lay over the model's picture there.

The format, as the comments of its `node_data_builder.py` document it: a JSON object from graph ids to

    {"results": {node id: {"value": number}}, "thresholds": [{"value": upper end, "bgColor": ..., "textColor": ...}]}

or with "gradient": [{"stop": 0..1, "bgColor": ...}] instead of thresholds. Its adapter for exported PyTorch programs
calls the graph "graph", and each node by its name in the graph.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from ..observers.errors import InputError
from .explanation import Explanation, Status
from .measured import Measurement
from .sensitive import Sensitivity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .explanation import Numbers, Op

Value = Literal["sqnr_db", "rounding_db", "bits", "scale"]

GRAPH: Final = "graph"
_FLOAT_BITS: Final = 32
_LARGEST_DB: Final = 300.0  # beyond it the last colour ends: more than float64 can tell apart

_SQNR: Final = (
    (10.0, "#8c1d18", "#ffffff"),
    (20.0, "#d9534f", "#ffffff"),
    (30.0, "#f2c46d", "#1b2230"),
    (40.0, "#b7e0c3", "#1b2230"),
    (_LARGEST_DB, "#1e6b3a", "#ffffff"),
)
_BITS: Final = ((8, "#1e6b3a", "#ffffff"), (16, "#3367d6", "#ffffff"), (_FLOAT_BITS, "#f2c46d", "#1b2230"))
_GRADIENT: Final = ((0.0, "#e3f3e8"), (1.0, "#1e6b3a"))


def node_data(
    source: Explanation | Measurement | Sensitivity, value: Value = "sqnr_db", *, output: int | None = None
) -> str:
    """Return JSON text for Model Explorer: one number for each node, and the colours to show it in.

    Args:
        source: what `explain`, `measure_sqnr` or `sensitivity` returned.
        value: "sqnr_db" (measured, or with the part alone quantized) and "rounding_db" in dB; "bits" per element of
            the op's output (32 where it is float); "scale" of it in real units per code. A node without a finite
            number (float and exact, per channel, inside a block) is left out.
        output: for a sensitivity: at which of the model's outputs; the worst by default.

    Raises:
        InputError: if the source does not hold such numbers.
    """
    if value not in get_args(Value):
        raise InputError(f"there is no node data {value!r}; there are {', '.join(get_args(Value))}")
    if isinstance(source, Explanation) and value in {"sqnr_db", "rounding_db"} and source.measured is not None:
        source = source.measured
    if isinstance(source, Sensitivity) and output is not None and not 0 <= output < len(source.outputs):
        raise InputError(f"there is no output {output}; the model has {len(source.outputs)}")
    results = {name: number for name, number in _numbers(source, value, output) if math.isfinite(number)}
    if not results:
        raise InputError(f"there are no numbers {value!r} in this {type(source).__name__}: {_MISSING[value]}")
    content = {"results": {name: {"value": number} for name, number in results.items()}, **_colours(value)}
    return json.dumps({GRAPH: content}, indent=2, allow_nan=False)


def _numbers(
    source: Explanation | Measurement | Sensitivity, value: Value, output: int | None
) -> Iterator[tuple[str, float]]:
    if isinstance(source, Sensitivity):
        return _of_sensitivity(source, value, output)
    return _of_measurement(source, value) if isinstance(source, Measurement) else _of_explanation(source, value)


_MISSING: Final = {
    "sqnr_db": "measure them with measure_sqnr or sensitivity",
    "rounding_db": "measure them with measure_sqnr",
    "bits": "take what explain returned",
    "scale": "take what explain returned after calibration",
}


def _of_measurement(found: Measurement, value: str) -> Iterator[tuple[str, float]]:
    for node in dict.fromkeys(tensor.node for tensor in found.tensors):
        readings = found.readings(node)
        if value == "sqnr_db":
            yield node, found.of(node)
        elif value == "rounding_db":
            yield node, min((each.rounding_db for each in readings), default=math.nan)


def _of_sensitivity(found: Sensitivity, value: str, output: int | None) -> Iterator[tuple[str, float]]:
    for part in found.parts if value == "sqnr_db" else ():
        number = part.worst_db if output is None else part.outputs_db[output]
        for node in part.nodes:
            yield node, number


def _of_explanation(found: Explanation, value: str) -> Iterator[tuple[str, float]]:
    for op in found.ops:
        numbers = found.groups[op.output].numbers if op.output in found.groups else None
        if value == "bits":
            yield op.node, _bits(op, numbers)
        elif value == "scale" and numbers is not None:
            yield op.node, numbers.scale


def _bits(op: Op, numbers: Numbers | None) -> float:
    """Return how many bits an element of the op's output takes; NaN where that is not known, or inside a block."""
    if numbers is not None:
        return (numbers.quant_max - numbers.quant_min).bit_length()
    return math.nan if op.output or op.status is Status.FUSED else _FLOAT_BITS


def _colours(value: str) -> dict[str, Any]:
    if value == "scale":
        return {"gradient": [{"stop": stop, "bgColor": colour} for stop, colour in _GRADIENT]}
    steps = _BITS if value == "bits" else _SQNR
    return {"thresholds": [{"value": end, "bgColor": back, "textColor": text} for end, back, text in steps]}
