"""Block borders: nothing is quantized between the members of a fused block, everything at its borders."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from ..annotators.blocks import clamp_bounds, why_not_fused
from ..annotators.graph import op_name, users
from ..configs.base import BiasKind, SymmetricActivation
from ..configs.ops import BATCH_NORMS, HEADS, MOVEMENT
from ..observers.qparams import INT8_AFFINE, scale_of, sharing_loss_db
from ..observers.rules import JoinOutcome
from .findings import Finding, Severity
from .kinds import Kind
from .qdq import Facts, Head, finding, head_names, is_dequantize, is_quantize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Node

    from ..annotators.blocks import Block
    from .encoding import Encoding

HAIR_DB: Final = 0.1  # a loss that a message need not name
BIAS_TOLERANCE: Final = 1e-3  # relative error of a bias scale that is float32 rounding, not another scale


def find(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong at the borders of weighted blocks and of elementwise ops with an activation."""
    names = facts.config.blocks.residual_heads
    weighted = [head.block for head in facts.heads if head.weight.is_quantized]
    for block in weighted + [facts.block(node) for node in facts.nodes if op_name(node) in names]:
        yield from _split(facts, block)
    for head in facts.heads:
        yield from _half_quantized(facts, head)
        yield from _bias(facts, head)


def _split(facts: Facts, block: Block) -> Iterator[Finding]:
    """Find head -> quantize -> dequantize -> clamp (or batch norm), each the only reader of the one before."""
    quantize = _only(block.output, is_quantize)
    dequantize = _only(quantize, is_dequantize) if quantize else None
    readers = users(dequantize) if dequantize else []
    if quantize is None or len(readers) != 1 or not _folds(facts, block, readers[0]):
        return
    follower, middle = readers[0], facts.encoding(quantize)
    after = _only(follower, is_quantize)
    outer = facts.encoding(after) if after is not None else None
    loss = _loss_db(middle, outer, follower)
    symmetric = facts.is_symmetric and middle is not None and outer is not None and outer.is_symmetric
    if facts.given and symmetric and facts.config.blocks.symmetric_activation is SymmetricActivation.SEPARATE:
        return
    if facts.given and JoinOutcome.UNFOLD in facts.config.joins.outcomes and middle is not None and middle == outer:
        return  # it shares with a join at which saturation would be no clamp
    why = "the value between them is quantized"
    if symmetric:
        why = "symmetric qparams are no clamp, so the value between them is quantized"
    elif loss > HAIR_DB:
        why += f", which costs {loss:.1f} dB"
    assumed = not facts.given and (symmetric or op_name(block.head) not in HEADS)  # not every backend fuses these
    yield finding(
        "QM101",
        Severity.INFO if assumed else Severity.WARNING,
        follower,
        f"{op_name(follower)} could be fused into {block.output.name}, but {why}",
        "give the output one-sided codes (quant_min = zero point) and annotate both as one block"
        if symmetric
        else "annotate both as one block: input and weight quantized at the head, the output at the last op only",
        (middle.numbers("middle_") if middle else {}) | {"loss_db": loss},
    )


def _loss_db(middle: Encoding | None, outer: Encoding | None, follower: Node) -> float:
    """Return what the quantization in the middle costs against fused qparams, which spend all codes on the output."""
    bounds = clamp_bounds(follower)
    if middle is None or outer is None or bounds is None or not (middle.is_usable and outer.is_usable):
        return 0.0
    used = outer.qparams.representable.clamp(bounds)
    if used.max - used.min < outer.scales[0] or outer.scheme.dtype != middle.scheme.dtype:
        return 0.0
    return max(0.0, sharing_loss_db(scale_of(used, outer.scheme), middle.scales[0]))


def _only(node: Node, test: object) -> Node | None:
    readers = users(node)
    return readers[0] if len(readers) == 1 and callable(test) and test(readers[0]) else None


def _folds(facts: Facts, block: Block, follower: Node) -> bool:
    """Tell whether the config folds a node, or the clamp that it would be spelled as, into a block."""
    name, rules = op_name(follower), facts.config.blocks
    weighted = op_name(block.head) in HEADS
    if name in BATCH_NORMS:
        return weighted and block.output is block.head
    bounds = clamp_bounds(follower)
    if bounds is None or not bounds.is_bounded or why_not_fused(bounds, INT8_AFFINE, rules):
        return False
    if weighted and rules.activation_heads is not None and not head_names(block.head) & rules.activation_heads:
        return False
    relu = bounds.lower == 0.0 and bounds.upper is None
    spelled = "relu" if relu else "clamp" if None in {bounds.lower, bounds.upper} else "hardtanh"
    return bool({name, spelled} & (rules.activations if weighted else rules.residual_activations))


def _half_quantized(facts: Facts, head: Head) -> Iterator[Finding]:
    """Find heads of which the weight is quantized without the input or the output, or the other way round."""
    source, weight = head.input.is_quantized, head.weight.is_quantized
    written = writes_quantized(facts, head.block.output)
    dynamic = head.input.dequantize is not None and facts.is_dynamic(head.input.dequantize)
    if dynamic or (source and weight and written) or not (weight or (source and written)):
        return
    missing = [name for name, there in (("input", source), ("weight", weight), ("output", written)) if not there]
    quantized = [name for name in ("input", "weight", "output") if name not in missing]
    yield finding(
        "QM102",
        Severity.WARNING if weight and written else Severity.INFO,
        head.node,
        f"quantized only in part: {' and '.join(quantized)} quantized, {' and '.join(missing)} float, "
        "so that it runs in float",
        f"quantize {' and '.join(missing)} too, or leave the weight float",
    )


def writes_quantized(facts: Facts, output: Node) -> bool:
    """Tell whether all that reads a block's output is quantize ops, directly or below data movement."""
    readers = users(output)
    for reader in readers:
        moved = op_name(reader) in MOVEMENT | facts.config.ops.selects | {"getitem"}
        if not (is_quantize(reader) or (moved and writes_quantized(facts, reader))):
            return False
    return bool(readers)


def _bias(facts: Facts, head: Head) -> Iterator[Finding]:
    """Find biases of another kind, or with another scale, than integer kernels add them with."""
    if head.bias is None or not (head.input.is_quantized and head.weight.is_quantized):
        return
    wanted = facts.config.bias.kind
    if not head.bias.is_quantized:
        if facts.given and wanted is BiasKind.INT32_DERIVED:
            yield finding(
                "QM103",
                Severity.ERROR,
                head.node,
                f"the bias is float, but {facts.config.name} takes an int32 bias",
                "annotate the bias with scale = input scale * weight scale",
            )
        return
    if facts.given and wanted is BiasKind.FLOAT:
        yield finding(
            "QM103",
            Severity.ERROR,
            head.node,
            f"the bias is quantized, but {facts.config.name} takes a float bias",
            "leave the bias without annotation: the backend quantizes it by itself",
        )
        return
    entries = (head.input.encoding, head.weight.encoding, head.bias.encoding)
    given, weights, found = entries
    if given is None or weights is None or found is None:
        return
    products = [given.scales[0] * scale for scale in weights.scales]
    count = max(len(products), len(found.scales))
    if {len(products), len(found.scales)} > {1, count}:
        return
    pairs = zip(products * (count // len(products)), found.scales * (count // len(found.scales)), strict=True)
    worst = max((abs(math.log(scale / product)) for product, scale in pairs if product > 0 < scale), default=0.0)
    if worst > BIAS_TOLERANCE or any(found.zero_points):
        yield finding(
            "QM104",
            Severity.ERROR,
            head.node,
            "the bias is not in units of input scale * weight scale from zero point 0, as an integer kernel adds it",
            "derive the bias qparams from those of input and weight",
            {"ratio": math.exp(worst), "zero_point": float(max(found.zero_points, key=abs, default=0))},
        )


KIND = Kind(
    "block borders",
    {
        "QM101": "a value inside a block that could be fused is quantized",
        "QM102": "a weighted op is quantized only in part",
        "QM103": "a bias is float where the backend takes int32, or the other way round",
        "QM104": "a bias scale is not input scale * weight scale, or its zero point not 0",
    },
    find,
)
