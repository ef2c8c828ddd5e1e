"""The activation contract: where a clamp is folded into its producer, saturation of the output is the clamp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..annotators.blocks import Block
from ..annotators.graph import op_name
from ..configs.ops import HEADS
from ..observers.qparams import INT8_AFFINE
from .findings import Finding, Severity
from .kinds import Kind
from .program import erased_activation
from .qdq import Facts, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .encoding import Encoding


def find(facts: Facts) -> Iterator[Finding]:
    """Yield every block whose output qparams don't clamp as its activation does, or did before it was erased."""
    erased = {node: found[1] for node in facts.nodes if (found := erased_activation(node))}
    folded = [head.block for head in facts.heads if head.weight.is_quantized] + facts.residual_blocks
    for block in folded + [Block(node, (node,), bounds, INT8_AFFINE) for node, bounds in erased.items()]:
        if not block.bounds.is_bounded:
            continue
        for quantize in facts.quantizes_of(block.output):
            encoding = facts.encoding(quantize)
            if encoding is not None and encoding.axis is None and encoding.is_usable:
                yield from _broken(facts, block, encoding)


def _broken(facts: Facts, block: Block, encoding: Encoding) -> Iterator[Finding]:
    qparams, bounds = encoding.qparams, block.bounds
    limits = qparams.representable
    lower, upper = (type(bounds)(bounds.lower, None), type(bounds)(None, bounds.upper))
    activation = op_name(block.output) if len(block.members) > 1 else "the activation"
    numbers = encoding.numbers() | {"quant_min": float(qparams.scheme.quant_min)}
    if bounds.lower is not None and not qparams.honours(lower):
        found = f"zero point {qparams.zero_point} is not quant_min" if bounds.lower == 0.0 else "codes go on below it"
        yield finding(
            "QM201",
            _severity(facts, block),
            block.output,
            f"{found}: saturation does not clamp at the lower bound {bounds.lower:g} of {activation} fused into "
            f"{block.head.name}; values down to {limits.min:.4g} can be written",
            _mend(facts),
            numbers | {"bound": bounds.lower, "smallest": limits.min},
        )
    if bounds.upper is not None and not qparams.honours(upper):
        yield finding(
            "QM202",
            _severity(facts, block),
            block.output,
            f"codes go on above it: saturation does not clamp at the upper bound {bounds.upper:g} of {activation} "
            f"fused into {block.head.name}; values up to {limits.max:.4g} can be written",
            _mend(facts),
            numbers | {"bound": bounds.upper, "largest": limits.max},
        )


def _severity(facts: Facts, block: Block) -> Severity:
    if len(block.members) == 1:
        return Severity.ERROR  # the activation was erased: nothing else clamps
    if not facts.config.blocks.saturation_is_activation:
        return Severity.INFO
    # Not every backend that drops the activation of a weighted op also drops that of an add.
    return Severity.ERROR if facts.given or op_name(block.head) in HEADS else Severity.WARNING


def _mend(facts: Facts) -> str:
    if not facts.config.blocks.saturation_is_activation:
        return f"{facts.config.name} keeps the bounds, so the result is right; qparams of its own would use all codes"
    return "give the output qparams of its own that fit the bounds, and requantize where it meets other tensors"


KIND = Kind(
    "activation contract",
    {
        "QM201": "saturation of a block's output does not clamp at the lower bound of its activation",
        "QM202": "saturation of a block's output does not clamp at the upper bound of its activation",
    },
    find,
)
