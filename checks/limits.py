"""What the backend's runtime can't do although its lowering takes it (`configs.Limits`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch.fx import Node

from ..annotators.graph import argument, op_name, users
from ..configs.ops import HEADS, MOVEMENT
from .blocks import BIAS_TOLERANCE
from .findings import Finding, Severity
from .kinds import Kind
from .qdq import Facts, Head, finding, head_names, is_quantize, quantized_value

if TYPE_CHECKING:
    from collections.abc import Iterator

_MATMULS: Final = frozenset({"addmm", "mm"})  # what linear decomposes into, with views around it
_PADS: Final = frozenset({"constant_pad_nd", "pad"})


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the ops that the runtime would refuse, or compute wrongly."""
    limits = facts.config.limits
    for head in facts.heads:
        yield from _ratio(facts, head)
        yield from _bias(facts, head)
        yield from _saturated_bias(facts, head)
        if limits.whole_blocks:
            yield from _torn(facts, head)
    if limits.bias_bits is not None:
        yield from _shared_biases(facts)
    if limits.whole_blocks:
        yield from _unknown_heads(facts)
    if limits.uniform_readers:
        yield from _mixed_readers(facts)
    dtypes = limits.activation_dtypes
    for value, _, encoding in facts.activations:
        if dtypes is not None and encoding.scheme.dtype not in dtypes:
            yield finding(
                "QM804",
                Severity.ERROR,
                value,
                f"quantized as {encoding.scheme.dtype}, for which {facts.config.name} has no kernels",
                f"quantize activations as {', '.join(map(str, dtypes))}",
            )


def _ratio(facts: Facts, head: Head) -> Iterator[Finding]:
    limit, source, weight = facts.config.limits.max_requantize_ratio, head.input.encoding, head.weight.encoding
    if limit is None or source is None or weight is None or not (source.is_usable and weight.is_usable):
        return
    for quantize in facts.quantizes_of(head.block.output):
        after = facts.encoding(quantize)
        if after is None or not after.is_usable:
            continue
        ratio = source.scales[0] * max(weight.scales) / after.scales[0]
        if ratio >= limit:
            yield finding(
                "QM801",
                Severity.ERROR,
                head.block.output,
                f"input scale * weight scale / output scale is {ratio:.4g}; {facts.config.name} does not load "
                f"{limit:g} or more",
                "the output's range is far smaller than what the op can write: check its calibration, or raise its "
                "floor (eps)",
                after.numbers() | {"ratio": ratio, "limit": limit},
            )


def _bias(facts: Facts, head: Head) -> Iterator[Finding]:
    """Find float biases that overflow the integer in which the backend adds them."""
    bits, source, weight = facts.config.limits.bias_bits, head.input.encoding, head.weight.encoding
    if bits is None or head.bias is None or head.bias.is_quantized or source is None or weight is None:
        return
    bias = facts.constant(head.bias.value)
    if bias is None or not (source.is_usable and weight.is_usable):
        return
    steps = torch.tensor(weight.scales, dtype=torch.float64) * source.scales[0]
    values = bias.detach().double().abs().flatten()
    if steps.numel() not in {1, values.numel()}:
        return
    codes = values / steps
    over = int((codes >= 2.0 ** (bits - 1)).sum())
    if over:
        yield finding(
            "QM802",
            Severity.ERROR,
            head.node,
            f"the bias of {over} channels overflows {bits} bits in steps of input scale * weight scale",
            "their weights are next to nothing beside the bias: leave the op float, or add so large a bias in an op of "
            "its own",
            {"channels": float(over), "bits_needed": float(torch.log2(codes.max())) + 1.0},
        )


def _saturated_bias(facts: Facts, head: Head) -> Iterator[Finding]:
    """Find int32 biases whose codes stand at the end of the codes: what they meant does not fit."""
    bias = head.bias
    if bias is None or bias.encoding is None or bias.dequantize is None:
        return
    source = bias.dequantize.args[0]
    codes = facts.constant(source) if isinstance(source, Node) else None
    scheme = bias.encoding.scheme
    if codes is None or codes.is_floating_point() or codes.numel() == 0:
        return
    over = int(((codes >= scheme.quant_max) | (codes <= scheme.quant_min)).sum())
    if over:
        yield finding(
            "QM802",
            Severity.ERROR,
            head.node,
            f"the bias of {over} channels saturates {scheme.dtype} in steps of input scale * weight scale",
            "scale the op's weights and bias down, use 16-bit activations with coarser steps, or leave the op float",
            {"channels": float(over)},
        )


def _shared_biases(facts: Facts) -> Iterator[Finding]:
    """Find float biases that several heads read with differing scales: the backend quantizes each tensor once."""
    first: dict[int, tuple[Head, list[float]]] = {}
    for head in facts.heads:
        source, weight = head.input.encoding, head.weight.encoding
        bias = facts.constant(head.bias.value) if head.bias is not None and not head.bias.is_quantized else None
        if bias is None or source is None or weight is None or not (source.is_usable and weight.is_usable):
            continue
        steps = [source.scales[0] * scale for scale in weight.scales]
        other, known = first.setdefault(id(bias), (head, steps))
        ratio = max((a / b for a, b in zip(steps, known, strict=False)), key=lambda r: abs(math.log(r)))
        if abs(math.log(ratio)) > BIAS_TOLERANCE and bool(bias.any()):
            yield finding(
                "QM806",
                Severity.ERROR,
                head.node,
                f"its bias is also that of {other.node.name}, with other scales: {facts.config.name} quantizes it "
                "once, with those of the first",
                "give each call a bias tensor of its own",
                {"ratio": ratio},
            )


def _torn(facts: Facts, head: Head) -> Iterator[Finding]:
    """Find heads with a quantized weight that are not quantized whole."""
    if not head.weight.is_quantized or _is_dynamic(facts, head):
        return
    reads, writes = _reads_codes(facts, head), _writes_codes(head)
    if reads and writes:
        return
    if not head.input.is_quantized and not any(map(is_quantize, users(head.block.output))):
        return  # weight only: dequantized as a whole beforehand
    missing = " and ".join(
        part
        for part, there in (("no dequantize directly above", reads), ("no quantize as its only reader", writes))
        if not there
    )
    yield _garbage(facts, head.node, missing)


def _unknown_heads(facts: Facts) -> Iterator[Finding]:
    """Find weighted ops with a quantized weight for which the backend has no quantized kernel."""
    for node in facts.nodes:
        rule = HEADS.get(op_name(node))
        weight = argument(node, rule.weight) if rule is not None else None
        if not isinstance(weight, Node) or head_names(node) & facts.config.blocks.heads:
            continue
        if facts.is_constant(weight) and facts.operand(weight).is_quantized:
            yield _garbage(facts, node, "no quantized kernel")


def _mixed_readers(facts: Facts) -> Iterator[Finding]:
    """Find dequantize ops that are read by quantized and by float ops (or by the graph's output)."""
    heads = {head.node: head for head in facts.heads}
    for dequantize in facts.dequantizes:
        readers = users(dequantize)
        if len(readers) < 2 or facts.is_constant(dequantize):
            continue
        quantized = [reader for reader in readers if _runs_quantized(facts, reader, heads.get(reader))]
        floats = [reader for reader in readers if reader not in quantized]
        if quantized and floats:
            yield finding(
                "QM805",
                Severity.ERROR,
                quantized_value(dequantize),
                f"one dequantize is read by {quantized[0].name}, which runs quantized, and by {floats[0].name}, which "
                f"does not: {facts.config.name} can't load or run it",
                "give each reader a dequantize of its own, as convert_pt2e does for ops that are annotated",
                {"readers": float(len(readers)), "float": float(len(floats))},
            )


def _runs_quantized(facts: Facts, reader: Node, head: Head | None) -> bool:
    if head is not None:
        return head.weight.is_quantized
    if not facts.runs_quantized(reader):
        return False
    readers = users(facts.block(reader).output)
    return bool(readers) and all(map(is_quantize, readers))


def _garbage(facts: Facts, node: Node, missing: str) -> Finding:
    return finding(
        "QM803",
        Severity.ERROR,
        node,
        f"the weight is quantized, but the op has {missing}: {facts.config.name} would read its codes as real values",
        "quantize input and output as well, with nothing but a fused activation between, or leave the weight float",
    )


def _is_dynamic(facts: Facts, head: Head) -> bool:
    return head.input.dequantize is not None and facts.is_dynamic(head.input.dequantize)


def _reads_codes(facts: Facts, head: Head) -> bool:
    source = head.input
    if source.is_quantized:
        return not source.moved or op_name(head.node) in _MATMULS
    if op_name(source.value) in _PADS and isinstance(source.value.args[0], Node):
        return facts.operand(source.value.args[0]).is_quantized
    return False


def _writes_codes(head: Head) -> bool:
    node = head.block.output
    while len(readers := users(node)) == 1:
        if is_quantize(readers[0]):
            return True
        if op_name(head.node) not in _MATMULS or op_name(readers[0]) not in MOVEMENT:
            return False
        node = readers[0]
    return False


KIND = Kind(
    "limits of the runtime",
    {
        "QM801": "input scale * weight scale / output scale is beyond what the backend's kernels can do",
        "QM802": "a bias overflows the integer in which the backend adds it",
        "QM803": "a weight is quantized in an op that the backend does not run quantized",
        "QM804": "an activation's dtype is none that the backend has kernels for",
        "QM805": "a dequantize is read by quantized and by float ops",
        "QM806": "a float bias that the backend quantizes once is read with differing scales",
    },
    find,
)
