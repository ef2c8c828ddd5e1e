"""Facts of a graph with quantize and dequantize ops, whoever wrote them. Read-only; every kind of check asks here.

x -> quantize -> dequantize -> head -> clamp -> quantize -> ...        constant -> [quantize ->] dequantize -> head
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch
from torch.fx import Node

from ..annotators.blocks import Block, find_block, head_rule
from ..annotators.graph import argument, constant_value, module_path, op_name, users, value_of
from ..annotators.roles import other_form
from ..configs.base import BackendConfig
from ..configs.ops import HEADS, MOVEMENT, NO_OPS, HeadRule
from ..observers.errors import ConfigError
from ..observers.qparams import INT8_AFFINE, Scheme
from ..observers.ranges import UNBOUNDED
from .encoding import Encoding
from .findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..observers.table import Entry
    from .program import Program

_QUANTIZES: Final = frozenset(
    {"quantize_per_tensor", "quantize_per_channel", "quantize_per_channel_group", "quantize_per_token"}
    | {"quantize_affine"}
)
_DEQUANTIZES: Final = frozenset(f"de{name}" for name in _QUANTIZES)
_MOVES_CONSTANTS: Final = MOVEMENT | NO_OPS | {"lift_fresh"}


def library_op(node: Node) -> str:
    """Return the name of the op without namespace, for any library ("quantize_per_tensor"), or ""."""
    name = getattr(getattr(node.target, "_schema", None), "name", "") if node.op == "call_function" else ""
    return str(name).rpartition("::")[2]


def is_quantize(node: Node) -> bool:
    """Tell whether the node turns real values into codes."""
    return library_op(node) in _QUANTIZES


def is_dequantize(node: Node) -> bool:
    """Tell whether the node turns codes into real values."""
    return library_op(node) in _DEQUANTIZES


def quantized_value(dequantize: Node) -> Node:
    """Return the value that a dequantize gives back, whose name says more; the dequantize itself for a constant."""
    source = dequantize.args[0]
    value = source.args[0] if isinstance(source, Node) and is_quantize(source) else None
    return value if isinstance(value, Node) else dequantize


def head_names(node: Node) -> frozenset[str]:
    """Return the names that a config may know a head by: its own, and those of the ops that decompose into it."""
    name = op_name(node)
    if name == "convolution":
        kind = "conv_transpose" if argument(node, "transposed") else "conv"
        return frozenset({name, f"{kind}{len(getattr(value_of(node), 'shape', ())) - 2}d"})
    weight = argument(node, HEADS[name].weight) if name in {"addmm", "mm"} else None
    was_linear = isinstance(weight, Node) and op_name(weight) in {"t", "permute", "transpose"}
    return frozenset({name, "linear"}) if was_linear else frozenset({name})


@dataclass(frozen=True)
class Operand:
    """What a head reads.

    Args:
        value: the node it reads.
        dequantize: the dequantize that the value comes from, or None where it is float.
        moved: movement lies between the two.
        encoding: the dequantize's qparams; None where float, dynamic, or of a kind that has no such numbers.
        constant: the value is a parameter or buffer (quantized or not).
    """

    value: Node
    dequantize: Node | None
    moved: bool
    encoding: Encoding | None
    constant: bool

    @property
    def is_quantized(self) -> bool:
        """Tell whether the value was quantized."""
        return self.dequantize is not None


@dataclass(frozen=True)
class Head:
    """A weighted op with a constant weight, and what it reads."""

    node: Node
    rule: HeadRule
    input: Operand
    weight: Operand
    bias: Operand | None
    block: Block


class Facts:
    """All that the checks ask of one graph.

    Args:
        program: the graph and its constants.
        config: what the backend fuses and can do, or None: any backend, with every fusion that one of them does.
        ranges: what was observed of the nodes' float values, or None.
    """

    def __init__(self, program: Program, config: BackendConfig | None, ranges: Mapping[Node, Entry] | None) -> None:
        self.program = program
        self.ranges = ranges or {}
        self.given = config is not None
        self.config = config or BackendConfig()
        # Whether saturation can stand for a clamp is judged by the qparams found, not by the config's scheme; which
        # heads take an activation is looked up here, under their names before decomposition.
        self._blocks_config = replace(
            self.config,
            activation=replace(self.config.activation, scheme=INT8_AFFINE),
            blocks=replace(self.config.blocks, activation_heads=None),
        )
        self._encodings: dict[Node, Encoding | None] = {}

    @cached_property
    def nodes(self) -> list[Node]:
        """The graph's nodes, in order."""
        return list(self.program.model.graph.nodes)

    @cached_property
    def quantizes(self) -> list[Node]:
        """The quantize nodes."""
        return [node for node in self.nodes if is_quantize(node)]

    @cached_property
    def dequantizes(self) -> list[Node]:
        """The dequantize nodes."""
        return [node for node in self.nodes if is_dequantize(node)]

    @cached_property
    def activations(self) -> list[tuple[Node, Node, Encoding]]:
        """(value, quantize, qparams) of every activation that has one known scale."""
        found = []
        for node in self.quantizes:
            encoding, value = self.encoding(node), node.args[0]
            if encoding is None or encoding.axis is not None or not isinstance(value, Node):
                continue
            if not self.is_constant(value):
                found.append((value, node, encoding))
        return found

    @cached_property
    def is_symmetric(self) -> bool:
        """Tell whether all activations are symmetric (or one-sided), so that it is by intent where one is."""
        encodings = [encoding for _, _, encoding in self.activations]
        return all(e.qparams.zero_point == e.scheme.symmetric_zero_point for e in encodings)

    @cached_property
    def weights(self) -> list[tuple[Node, Encoding, torch.Tensor | None]]:
        """(dequantize, qparams, codes) of every quantized constant; codes None where they aren't stored as such."""
        found = []
        for node in self.dequantizes:
            encoding, source = self.encoding(node), node.args[0]
            if encoding is not None and isinstance(source, Node) and self.is_constant(source):
                found.append((node, encoding, self.constant(source)))
        return found

    def encoding(self, node: Node) -> Encoding | None:
        """Return the qparams of a quantize or dequantize; None if they are dynamic or no scale and zero point."""
        if node not in self._encodings:
            self._encodings[node] = self._read_encoding(node)
        return self._encodings[node]

    def _read_encoding(self, node: Node) -> Encoding | None:
        name = library_op(node).removeprefix("de")
        if name not in {"quantize_per_tensor", "quantize_per_channel"}:
            return None
        plural = "s" if name == "quantize_per_channel" else ""
        scales, zero_points = self._values(node, f"scale{plural}"), self._values(node, f"zero_point{plural}")
        low, high = self._values(node, "quant_min"), self._values(node, "quant_max")
        dtype, axis = argument(node, "dtype"), argument(node, "axis") if plural else None
        if not scales or not zero_points or not low or not high or not isinstance(dtype, torch.dtype):
            return None
        try:
            scheme = Scheme(dtype=dtype, quant_min=int(low[0]), quant_max=int(high[0]))
        except ConfigError:  # float8 and the like: no integer codes
            return None
        codes = tuple(int(point) if math.isfinite(point) else 0 for point in zero_points)
        return Encoding(tuple(scales), codes, scheme, axis if isinstance(axis, int) else None)

    def _values(self, node: Node, key: str) -> list[float]:
        value = argument(node, key)
        if isinstance(value, Node):
            tensor = self.constant(value)
            return [] if tensor is None else [float(v) for v in tensor.detach().flatten().to(torch.float64).tolist()]
        return [float(value)] if isinstance(value, (int, float)) else []

    def is_dynamic(self, node: Node) -> bool:
        """Tell whether a quantize or dequantize takes its scale from the data of each run."""
        scale = argument(node, "scale") if library_op(node).endswith("per_tensor") else None
        return library_op(node).endswith("per_token") or (isinstance(scale, Node) and self.constant(scale) is None)

    def constant(self, node: Node) -> torch.Tensor | None:
        """Return the tensor that a node holds if it is a parameter, a buffer or a lifted constant, else None."""
        if node.op == "placeholder":
            return self.program.constants.get(node.name)
        return constant_value(self.program.model, node)

    def is_constant(self, node: Node) -> bool:
        """Tell whether a value is a constant: also one that was moved, quantized or dequantized."""
        while node.args and isinstance(node.args[0], Node):
            if not (op_name(node) in _MOVES_CONSTANTS or is_quantize(node) or is_dequantize(node)):
                break
            node = node.args[0]
        return self.constant(node) is not None

    def operand(self, value: Node) -> Operand:
        """Return what is known of a value that an op reads."""
        node, moved = value, False
        while op_name(node) in _MOVES_CONSTANTS and node.args and isinstance(node.args[0], Node):
            node, moved = node.args[0], True
        found = node if is_dequantize(node) else None
        encoding = self.encoding(found) if found is not None else None
        return Operand(value, found, moved, encoding, self.is_constant(value))

    @cached_property
    def heads(self) -> list[Head]:
        """The weighted ops with a constant weight that the config has as heads, whether quantized or not."""
        return [head for node in self.nodes if (head := self._head(node)) is not None]

    def _head(self, node: Node) -> Head | None:
        name = op_name(node)
        rule = HEADS.get(name)
        if rule is None or not head_names(node) & self.config.blocks.heads:
            return None
        if name == "convolution" and argument(node, "transposed"):
            rule = replace(rule, channel_axis=1, transposed=True)
        source, weight = argument(node, rule.input), argument(node, rule.weight)
        bias = argument(node, rule.bias) if rule.bias is not None else None
        if not isinstance(source, Node) or not isinstance(weight, Node) or not self.is_constant(weight):
            return None
        read = self.operand(bias) if isinstance(bias, Node) else None
        return Head(node, rule, self.operand(source), self.operand(weight), read, self.block(node))

    def block(self, head: Node) -> Block:
        """Return the block that begins at a node: as far down as clamps follow that the config folds into it."""
        names = self.config.blocks.activation_heads
        if names is not None and op_name(head) in HEADS and not head_names(head) & names:
            return Block(head, (head,), UNBOUNDED, INT8_AFFINE)
        config = self._blocks_config
        if op_name(head) in {"addmm", "mm"} and "linear" in head_names(head):  # decomposed, with views around it
            config = replace(config, blocks=replace(config.blocks, through=config.blocks.through | {"view"}))
        return find_block(head, config, lambda node: not is_quantize(node), head_rule(head, config))

    @cached_property
    def residual_blocks(self) -> list[Block]:
        """The elementwise ops that the config fuses with the clamp behind them, with that clamp."""
        names = self.config.blocks.residual_heads
        blocks = [self.block(node) for node in self.nodes if op_name(node) in names]
        return [block for block in blocks if len(block.members) > 1]

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks: those of weighted ops, and of elementwise ops with a clamp."""
        return [head.block for head in self.heads] + self.residual_blocks

    def runs_quantized(self, node: Node) -> bool:
        """Tell whether the config runs an op quantized (movement and joins included)."""
        ops = self.config.ops
        known = self.config.blocks.heads | ops.own | ops.shared | ops.selects | ops.joins
        return bool(head_names(node) & known) and not other_form(node, self.config)

    def quantizes_of(self, value: Node) -> list[Node]:
        """Return the quantize nodes that read a value directly."""
        return [user for user in users(value) if is_quantize(user)]

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the sizes of a node's value, -1 for those that are not known before the run; () if unknown."""
        tensor = self.constant(node)
        value = tensor if tensor is not None else value_of(node)
        return tuple(size if isinstance(size, int) else -1 for size in getattr(value, "shape", ()))


def finding(  # noqa: PLR0917  (the order in which a finding is told)
    code: str, severity: Severity, node: Node, message: str, mend: str, numbers: dict[str, float] | None = None
) -> Finding:
    """Make a finding at a node."""
    return Finding(
        code=code,
        severity=severity,
        node=node.name,
        module_path=module_path(node),
        message=message,
        mend=mend,
        numbers=numbers or {},
    )
