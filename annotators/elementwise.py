"""Ops with qparams of their own at the output: elementwise ops, reductions, and residual heads with an activation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..configs.ops import NO_OPS
from ..observers.qparams import QParams
from .blocks import clamp_bounds
from .conversion import FOLDED
from .graph import op_name

if TYPE_CHECKING:
    from torch.fx import Node

    from ..configs.base import BackendConfig
    from .blocks import Block
    from .draft import Draft


def annotate_block_output(draft: Draft, block: Block, config: BackendConfig) -> None:
    """Put the output of a block in a cell whose contract is what its activations guarantee."""
    output = block.output
    draft.put(
        output,
        draft.new_cell(output.name, output, config, scheme=block.scheme, contract=block.bounds),
    )
    if config.blocks.erase_activations:
        draft.cells[output.name].may_unfold = block.bounds.is_bounded
        for member in block.members:
            if clamp_bounds(member) is not None or op_name(member) in NO_OPS:
                member.meta[FOLDED] = block.bounds


def annotate_own_output(draft: Draft, node: Node, config: BackendConfig) -> None:
    """Put the output of an op in a cell of its own, with the qparams that the backend dictates, if it does."""
    fixed = None
    if config.ops.fixed:
        name, scheme = op_name(node), config.activation.scheme
        fixed = next((QParams(f.scale, f.zero_point, scheme) for f in config.ops.fixed if f.op == name), None)
    draft.put(node, draft.new_cell(node.name, node, config, fixed=fixed))
