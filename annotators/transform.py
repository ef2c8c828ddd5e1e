"""Rewrites before annotation: the same function, spelled so that it can be quantized.

* Tensor keyword arguments become positional (torchao can't annotate an edge that is a keyword argument).
* In-place ops become functional: once a quantize/dequantize pair stands behind the base, a later reader of the
  base would no longer see what the op wrote (see `memory`).
* Scalar operands of add, sub, rsub and mul become constants, which can be quantized; rsub becomes sub.
* In training, a convolution without a bias gets one of zeros before its batch norm, where the backend's bias is int32:
  folding makes a bias of it, which would stay float.
* A batch norm that no weighted op takes in becomes the depthwise convolution that it is (see `folding`), a negation the
  product with -1 where the backend has no other with qparams of its own.
* Clamps in a row become one, and every clamp is spelled as relu, hardtanh or clamp, by its bounds: backends fold
  some spellings only, and a relu6 is a relu6 however it is written.

Values stay the same bit for bit, but for the rounding of a batch norm's factors. No parameter is touched: the exported
module shares its own with the user's eager model. A node that changes its operator remembers the one that it was
exported with, for rules that name operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torchao.quantization.pt2e.utils import _fuse_conv_bn_

from ..configs.base import BiasKind
from ..configs.ops import CLAMPS, HEADS
from .blocks import clamp_bounds, is_in_block
from .folding import gets_bias, spell_batch_norm
from .graph import EXPORTED_AS, argument, is_float_tensor, is_in_place, op_name, value_of
from .masks import masks_out
from .memory import Memory
from .nested import Nothing, inline_no_grad

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node
    from torch.fx.graph_module import GraphModule
    from torchao.quantization.pt2e.quantizer import Quantizer

    from ..configs.base import BackendConfig

_ATEN = torch.ops.aten
_RELU = _ATEN.relu.default
_SCALAR_OPS = {"add": _ATEN.add.Tensor, "sub": _ATEN.sub.Tensor, "mul": _ATEN.mul.Tensor, "rsub": _ATEN.sub.Tensor}
_SPELLED = {*_SCALAR_OPS, "neg", *HEADS}


def transform(model: GraphModule, config_of: Callable[[Node], BackendConfig | None]) -> GraphModule:
    """Rewrite the graph in place and return it."""
    changed = inline_no_grad(model)
    if changed:
        _fuse_conv_bn_(model)  # as prepare_pt2e did before, when it could not see inside
    calls = [node for node in model.graph.nodes if node.op == "call_function"]
    memory = Memory(model) if any(is_in_place(node) for node in calls) else None
    clamps = []
    for node in calls:
        name = op_name(node)
        if not name or name == "getitem":
            continue
        if node.kwargs:
            changed |= _make_positional(node)
        exported_as = node.target
        if memory is not None:
            changed |= memory.make_functional(node)
        if name in CLAMPS:
            clamps.append(node)
        elif name in _SPELLED and (config := config_of(node)) is not None and not is_in_place(node):
            changed |= _spell(model, node, name, config)
        if node.target is not exported_as:
            _remember(node, exported_as)
    for node in reversed(clamps):  # from the last clamp of a row, which swallows the others
        if config_of(node) is not None and not is_in_place(node):
            exported_as = node.target
            changed |= _spell_clamp(node, config_of)
            _remember(node, exported_as)
    if changed:
        model.graph.lint()
        model.recompile()
    return model


class SpelledAs(Nothing):
    """Spells the graph as a quantizer would, or as none needs it (None), and annotates nothing."""

    def __init__(self, quantizer: Quantizer | None) -> None:
        super().__init__()
        self.quantizer = quantizer

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Spell the graph."""
        if self.quantizer is not None:
            return self.quantizer.transform_for_annotation(model)
        return transform(model, lambda _: None)


def spell_norms(model: GraphModule, config_of: Callable[[Node], BackendConfig | None]) -> None:
    """Spell the batch norms that no weighted op takes in; before any backend's passes take them apart."""
    for node in model.graph.find_nodes(op="call_function", target=_ATEN.batch_norm.default):
        exported_as, config = node.target, config_of(node)
        if config is not None and not is_in_block(node, config) and spell_batch_norm(model, node, config):
            _remember(node, exported_as)


def _make_positional(node: Node) -> bool:
    if not any(isinstance(value, torch.fx.Node) for value in node.kwargs.values()):
        return False
    args, kwargs = list(node.args), dict(node.kwargs)
    for parameter in node.target._schema.arguments[len(args) :]:  # type: ignore[union-attr]
        if parameter.kwarg_only or not kwargs:
            break
        if parameter.name in kwargs:
            args.append(kwargs.pop(parameter.name))
        elif parameter.has_default_value():
            args.append(parameter.default_value)
        else:
            break
    node.args, node.kwargs = tuple(args), kwargs
    return True


def _spell(model: GraphModule, node: Node, name: str, config: BackendConfig) -> bool:
    """Spell an op as its config can quantize it; tell if anything changed."""
    if name in _SCALAR_OPS:
        return config.ops.constants and _lift_scalar(model, node, name, config)
    if name == "neg":
        return _spell_neg(model, node, config)
    return config.is_qat and config.bias.kind is BiasKind.INT32_DERIVED and _zero_bias(model, node)


def _remember(node: Node, exported_as: object) -> None:
    if node.target is not exported_as:
        node.meta.setdefault(EXPORTED_AS, exported_as)


def _lift_scalar(model: GraphModule, node: Node, name: str, config: BackendConfig) -> bool:
    """Turn the scalar operand of add, sub, rsub or mul into a constant tensor, and rsub into sub."""
    args, target = [*node.args], _SCALAR_OPS[name]
    tensors = [each for each in args if isinstance(each, torch.fx.Node)]
    if len(args) != 2 or (len(tensors) == 2 and name != "rsub"):
        return False
    if node.kwargs.get("alpha", 1) != 1 or _name(target) not in config.ops.own or not is_float_tensor(node):
        return False
    if not all(_same_dtype(each, node) for each in tensors):
        return False
    if name == "rsub":
        args.reverse()
    scalars = [i for i in (0, 1) if isinstance(args[i], (int, float)) and not isinstance(args[i], bool)]
    if len(scalars) == len(tensors) == 1:
        constant = _constant(model, node, float(args[scalars[0]]))  # type: ignore[arg-type]
        if constant is None:
            return False
        args[scalars[0]] = constant
    elif len(tensors) != 2:
        return False
    node.args, node.kwargs, node.target = tuple(args), {}, target
    return True


def _spell_neg(model: GraphModule, node: Node, config: BackendConfig) -> bool:
    """Spell a negation as a product with -1, where the backend runs that alone."""
    ops = config.ops
    if "neg" in ops.own | ops.shared or "mul" not in ops.own or not ops.constants or not is_float_tensor(node):
        return False
    constant = _constant(model, node, -1.0)
    if constant is not None:
        node.target, node.args, node.kwargs = _ATEN.mul.Tensor, (node.args[0], constant), {}
    return constant is not None


def _zero_bias(model: GraphModule, node: Node) -> bool:
    """Give a convolution before a batch norm the bias that folding will make, so that it is quantized in training."""
    rule, value = HEADS[op_name(node)], value_of(node)
    if rule.bias is None or argument(node, rule.bias) is not None or not gets_bias(node):
        return False
    if not isinstance(value, torch.Tensor):
        return False
    zeros = torch.zeros(int(value.shape[1]), dtype=value.dtype, device=value.device)
    # A parameter, since torchao writes the folded bias over it as one; the batch norm's bias is what is trained.
    bias = torch.nn.Parameter(zeros, requires_grad=False)
    constant = _read_constant(model, node, f"_bias_of_{node.name}", bias)
    args = [argument(node, index) for index in range(max(len(node.args), rule.bias + 1))]
    args[rule.bias] = constant
    node.args = tuple(args)
    return True


def _read_constant(model: GraphModule, node: Node, name: str, tensor: torch.Tensor) -> Node:
    """Return a node, before `node`, that reads a new parameter or buffer."""
    if isinstance(tensor, torch.nn.Parameter):
        model.register_parameter(name, tensor)
    else:
        model.register_buffer(name, tensor)
    with node.graph.inserting_before(node):
        constant = node.graph.get_attr(name)
    mode = getattr(value_of(node), "fake_mode", None)
    constant.meta["val"] = mode.from_tensor(tensor.detach()) if mode is not None else tensor.detach()
    return constant


def _name(target: torch._ops.OpOverload) -> str:
    return target._schema.name.removeprefix("aten::")


def _same_dtype(first: Node, second: Node) -> bool:
    return getattr(value_of(first), "dtype", None) == getattr(value_of(second), "dtype", None)


def _spell_clamp(node: Node, config_of: Callable[[Node], BackendConfig | None]) -> bool:
    """Spell a clamp by its bounds, together with the clamps that it alone reads."""
    bounds = clamp_bounds(node)
    source = node.args[0] if node.args else None
    if bounds is None or not bounds.is_bounded or not isinstance(source, torch.fx.Node):
        return False
    if node.target is _RELU and clamp_bounds(source) is None:
        return False  # as most are
    if not is_float_tensor(node) or not _same_dtype(source, node):
        return False
    swallowed: list[Node] = []
    while isinstance(source, torch.fx.Node) and len(source.users) == 1 and (first := clamp_bounds(source)) is not None:
        if is_in_place(source) or not _same_dtype(source, node) or config_of(source) != config_of(node):
            break
        bounds = first.then(bounds)
        swallowed.append(source)
        source = source.args[0]
    low, high = bounds.lower, bounds.upper
    if low == 0.0 and high is None:
        target, args = _RELU, (source,)
    elif low is not None and high is not None:
        target, args = _ATEN.hardtanh.default, (source, low, high)  # type: ignore[assignment]
    else:
        target, args = _ATEN.clamp.default, (source, low, high)  # type: ignore[assignment]
    if (node.target, node.args) == (target, args) and not node.kwargs:
        return False
    node.target, node.args, node.kwargs = target, args, {}
    for each in swallowed:
        node.graph.erase_node(each)
    return True


def _constant(model: GraphModule, node: Node, value: float) -> Node | None:
    """Return a new constant of one element, or None where a tensor would not compute just what the scalar does."""
    fake = value_of(node)
    if not isinstance(fake, torch.Tensor) or fake.dim() == 0 or masks_out(value):
        return None
    tensor = torch.full((1,), value, dtype=fake.dtype, device=fake.device)
    if fake.dtype.itemsize < 4 and tensor.float() != torch.tensor(value, dtype=torch.float32, device=fake.device):
        return None  # a scalar beside half precision is used in single precision
    return _read_constant(model, node, f"_scalar_of_{node.name}", tensor)
