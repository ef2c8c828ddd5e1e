"""What annotation costs: microseconds per node, from 100 to 10,000 nodes, beside executorch's own quantizers.

Run with `python benchmarks/annotate.py`. CPU seconds of `transform_for_annotation` and `annotate` together, best of
three, in one run, with the garbage collector off; chains of convolution-free blocks (linear, relu, add, reshape), and
one tensor with 1,000 branches.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torchao.quantization.pt2e.quantizer import Quantizer

from quantmark import BackendQuantizer, configs

ATEN = torch.ops.aten
WIDTH = 8


def _value(arg: object) -> object:
    if isinstance(arg, list):
        return [_value(each) for each in arg]
    return arg.meta["val"] if isinstance(arg, Node) else arg


class Builder:
    """Builds an exported-looking graph by hand: exporting 10,000 nodes takes minutes."""

    def __init__(self, width: int) -> None:
        self.owner = torch.nn.Module()
        self.owner.register_buffer("w", torch.randn(WIDTH, WIDTH))
        self.graph, self.mode = Graph(), FakeTensorMode()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = self.mode.from_tensor(torch.empty(1, width))

    def weight(self) -> Node:
        """Return a node that reads the weight."""
        node = self.graph.get_attr("w")
        node.meta["val"] = self.mode.from_tensor(torch.empty(WIDTH, WIDTH))
        return node

    def call(self, target: torch._ops.OpOverload, *args: object) -> Node:
        """Return a node that calls an op, with its fake value."""
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        with self.mode:
            node.meta["val"] = target(*(_value(arg) for arg in args))
        return node

    def done(self, *outputs: Node) -> GraphModule:
        """Return the module."""
        self.graph.output(outputs)
        return GraphModule(self.owner, self.graph)


def chain(nodes: int) -> GraphModule:
    """Return a chain of blocks with residual adds and views, of about `nodes` nodes."""
    builder = Builder(WIDTH)
    value = builder.x
    for _ in range(nodes // 5):
        block = builder.call(ATEN.relu.default, builder.call(ATEN.linear.default, value, builder.weight()))
        value = builder.call(ATEN.view.default, builder.call(ATEN.add.Tensor, block, value), [1, WIDTH])
    return builder.done(value)


def fan(branches: int) -> GraphModule:
    """Return one tensor with many slices, each with a block of its own."""
    builder = Builder(branches * WIDTH)
    outputs = []
    for index in range(branches):
        part = builder.call(ATEN.slice.Tensor, builder.x, 1, index * WIDTH, (index + 1) * WIDTH)
        linear = builder.call(ATEN.linear.default, part, builder.weight())
        outputs.append(builder.call(ATEN.relu.default, linear))
    return builder.done(builder.call(ATEN.cat.default, outputs, 1))


def microseconds(make: Callable[[], Quantizer], graph: Callable[[], GraphModule]) -> float:
    """Return CPU microseconds per node."""
    best = float("inf")
    for _ in range(3):
        model, quantizer = graph(), make()
        nodes = len(model.graph.nodes)
        gc.collect()
        gc.disable()
        start = time.process_time()
        quantizer.annotate(quantizer.transform_for_annotation(model))
        best = min(best, (time.process_time() - start) / nodes)
        gc.enable()
    return best * 1e6


def peers() -> dict[str, Callable[[], Quantizer]]:
    """Return executorch's quantizers."""
    from executorch.backends.cadence.aot.quantizer.quantizer import CadenceDefaultQuantizer
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack

    def own() -> Quantizer:
        quantizer = xnnpack.XNNPACKQuantizer()
        return quantizer.set_global(xnnpack.get_symmetric_quantization_config(is_per_channel=True))

    found: dict[str, Callable[[], Quantizer]] = {
        "XNNPACKQuantizer": own,
        "CadenceDefaultQuantizer": CadenceDefaultQuantizer,
    }
    try:
        from executorch.backends.arm.quantizer import arm_quantizer as arm
        from executorch.backends.arm.tosa.specification import TosaSpecification
    except ImportError:
        return found

    def tosa() -> Quantizer:
        quantizer = arm.TOSAQuantizer(TosaSpecification.create_from_string("TOSA-1.0+INT"))
        quantizer.set_global(arm.get_symmetric_quantization_config())
        return quantizer

    return {**found, "TOSAQuantizer": tosa}


def main() -> None:
    """Print the table."""
    warnings.filterwarnings("ignore")
    sizes = (100, 1_000, 10_000)
    graphs: dict[str, Callable[[], GraphModule]] = {f"chain of {n:,}": partial(chain, n) for n in sizes}
    graphs["1,000 branches"] = partial(fan, 1_000)
    makers: dict[str, Callable[[], Quantizer]] = {
        "quantmark xnnpack": lambda: BackendQuantizer(configs.xnnpack()),
        "quantmark cadence": lambda: BackendQuantizer(configs.cadence()),
        "quantmark arm_tosa": lambda: BackendQuantizer(configs.arm_tosa()),
        **peers(),
    }
    table = Table("microseconds per node", *graphs)
    for name, make in makers.items():
        table.add_row(name, *(f"{microseconds(make, graph):.0f}" for graph in graphs.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
