"""Rewrites that a backend's passes need done before annotation, each from the backend's own package.

Ops that a backend takes apart when it lowers (mean into sum and mul, softmax, layer norm) need qparams for the parts;
so they are taken apart first. What stays float, or under another config, is left whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from torch.fx.graph import _Namespace
from torch.nn import Parameter

from ..observers.errors import AnnotationError, ConfigError
from .passes import arm_pass_manager, why_stopped

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from torch.fx import Node
    from torch.fx.graph_module import GraphModule

RewriteName = Literal["tosa", "tosa_int16", "ethos_u55", "ethos_u85"]
_NAME: Final = "quantmark_name"
_PROFILES: Final[dict[str, str]] = {
    "tosa": "TOSA-1.0+INT",
    "tosa_int16": "TOSA-1.0+INT+int16",
    # executorch 1.5.1, backends/arm/ethosu/compile_spec.py, _tosa_spec_for_target (u65 has the profile of u55):
    "ethos_u55": "TOSA-1.0+INT+int16+int4+u55",
    "ethos_u85": "TOSA-1.0+INT+int16+int4+cf",
}


def rewrite(model: GraphModule, name: RewriteName, wanted: set[Node]) -> GraphModule:
    """Return the graph as the named rewrite leaves it, with the nodes that are not `wanted` left whole.

    Raises:
        ConfigError: if the backend's package isn't installed.
        AnnotationError: if its passes can't do with the graph.
    """
    try:
        from executorch.backends.arm.constants import DISALLOW_TFA_META_KEY

        manager = arm_pass_manager(_PROFILES[name])
    except ImportError as error:
        raise ConfigError(
            f'rewrite="{name}" runs executorch\'s Arm passes, which are not installed ({error}): install the extra '
            '"arm", or use dataclasses.replace(config, rewrite=None) for a graph that has none of the ops that they '
            "take apart"
        ) from error
    for node in list(model.graph.nodes):
        if node.target == "_guards_fn":  # of `.module()`: the passes interpret the graph, and refuse a called module
            model.graph.erase_node(node)
        node.meta[DISALLOW_TFA_META_KEY] = node not in wanted
        node.meta[_NAME] = node.name
    _own_constants(model)
    names = {node.name: node for node in model.graph.nodes}
    products = _products(model)
    try:
        changed: GraphModule = manager.transform_for_annotation_pipeline(graph_module=model)
    except Exception as error:
        raise AnnotationError(
            f'rewrite="{name}": executorch\'s Arm passes, which run before annotation, stopped at this graph with '
            f"{why_stopped(error)}. Leave the op that they name in float with set_module_name or set_operator_type "
            "and None, or take dataclasses.replace(config, rewrite=None)"
        ) from error
    _name_as_before(changed, names, products)
    return changed


def _products(model: GraphModule) -> dict[str, str]:
    """Return, by the name of each convolution or product that a product alone reads, that product's name."""
    found = {}
    for node in model.graph.nodes:
        reader = next(iter(node.users), node)
        alone = len(node.users) == 1 and str(reader.target).startswith("aten.mul.")
        if alone and str(node.target).startswith(("aten.conv", "aten.mul.")):
            found[node.name] = reader.name
    return found


def _own_constants(model: GraphModule) -> None:
    """Give the graph copies of the constants of convolutions that a product reads.

    Arm's passes write the factor into them in place, and the user's eager model and exported program hold the same.
    """
    for node in model.graph.nodes:
        if "conv" not in str(node.target) or not any("mul" in str(user.target) for user in node.users):
            continue
        for constant in [each for each in node.all_input_nodes if each.op == "get_attr"]:
            owner, _, attribute = str(constant.target).rpartition(".")
            value = getattr(model.get_submodule(owner), attribute)
            name = f"_{constant.name}_of_{node.name}"  # by reader: a layer that is called twice has two factors
            if isinstance(value, Parameter):
                model.register_parameter(name, Parameter(value.detach().clone(), requires_grad=value.requires_grad))
            else:
                model.register_buffer(name, value.detach().clone())
            with model.graph.inserting_before(constant):
                copied = model.graph.get_attr(name)
            copied.meta = dict(constant.meta)
            node.replace_input_with(constant, copied)


def _name_as_before(model: GraphModule, names: Container[str], products: Mapping[str, str]) -> None:
    """Give each node of a graph that was traced anew the name that its value had, and no other node such a name.

    Of the parts of an op that was taken apart, the last holds the op's value; a convolution that took in the factor of
    a product holds the product's. Ranges and rules are found by name, and tracing numbers ops afresh: "add" would be
    another one.
    """
    graph, namespace = model.graph, _Namespace()
    last = {node.meta[_NAME]: node for node in graph.nodes if _NAME in node.meta}
    old = {}
    for name, node in last.items():
        value = name
        while value in products and products[value] not in last:
            value = products[value]
        old[node] = value
    for node, name in old.items():
        node.name = namespace.create_name(name, node)
    for node in graph.nodes:
        if node not in old:
            name = node.name
            while name in names:
                name += "_part"
            node.name = namespace.create_name(name, node)
        node.meta.pop(_NAME, None)
    graph._graph_namespace = namespace
    model.recompile()
