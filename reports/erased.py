"""Blocks whose last ops `convert_pt2e` erased: activations that saturation stands for, folded batch norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..annotators.kept import kept

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.fx import GraphModule, Node

    from ..annotators.blocks import Block


def erased_blocks(model: GraphModule, names: Mapping[Node, str] | None = None) -> dict[Node, Block]:
    """Return the blocks whose output node is gone, by the node that is quantized in its stead.

    Args:
        model: a converted graph.
        names: what nodes were called when the graph was annotated, where they are called otherwise now.
    """
    found = kept(model)
    if found is None:
        return {}
    nodes = {(names or {}).get(node, node.name): node for node in model.graph.nodes}
    blocks: dict[Node, Block] = {}
    for name, block in found.record.blocks.items():
        left = [nodes[member.name] for member in block.members if member.name in nodes]
        if name not in nodes and left:
            blocks[left[-1]] = block
    return blocks
