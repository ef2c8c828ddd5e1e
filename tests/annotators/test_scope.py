"""Which config applies to which node: the user's rules, through the real flow."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer

from quantmark import AnnotationWarning, BackendQuantizer, ConfigError
from quantmark.annotators.graph import clean_path
from quantmark.configs import WeightConfig
from quantmark.observers.qparams import INT8_SYMMETRIC, INT16_SYMMETRIC
from support.flow import calls, export, is_dequantize, is_quantize, minmax_config, pair_of, quantize, sqnr_db

strictly = pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
X = (torch.randn(1, 3, 8, 8),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.act(self.conv(x)) + 0.25)


class Tail(nn.Sequential):
    pass


class Net(nn.Module):
    """conv_0 in layers.0, conv_1 in layers.1, conv_2 in named.last.0, then a linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Block(), Block()])
        self.named = nn.ModuleDict({"last": Tail(nn.Conv2d(3, 3, 1), nn.ReLU())})
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.named["last"](x))
        return out


def net() -> nn.Module:
    return Net().eval()


HEADS = ["conv_0", "conv_1", "conv_2", "linear"]


def heads(graph: GraphModule) -> dict[str, str]:
    """Name of each weighted op -> what it is quantized to: "float", "int8", ..."""
    found = {}
    for name, node in zip(HEADS, [*calls(graph, "conv2d"), *calls(graph, "linear")], strict=True):
        x, weight = node.args[:2]
        found[name] = "float"
        if is_dequantize(weight):
            assert is_dequantize(x), f"{node} is half quantized"
            found[name] = str(pair_of(x).dtype).removeprefix("torch.")
        assert found[name] == "float" or all(is_quantize(user) or fused(user) for user in node.users)
    return found


def quantized(rules: Callable[[BackendQuantizer], object], **how: Any) -> dict[str, str]:
    """What the rules make of the net; what was asked for must not warn, and compute what the float net does."""
    quantizer = BackendQuantizer(minmax_config())
    rules(quantizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AnnotationWarning)
        flow = quantize(net(), X, quantizer, **how)
    assert sqnr_db(net()(*X), flow.converted(*X)) > 20
    return heads(flow.converted)


def only_float(*names: str) -> dict[str, str]:
    return {name: "float" if name in names else "int8" for name in HEADS}


# -- by module name -------------------------------------------------------------------------------------------


@strictly
@pytest.mark.parametrize(
    ("name", "floats"),
    [
        ("layers.0", ["conv_0"]),
        ("layers.1.conv", ["conv_1"]),
        ("layers", ["conv_0", "conv_1"]),
        ("named.last", ["conv_2"]),
        ("named", ["conv_2"]),
        ("named.last.0", ["conv_2"]),
        ("head", ["linear"]),
        ("L['self'].layers[1]", ["conv_1"]),
        (re.compile(r"layers\.\d"), ["conv_0", "conv_1"]),
        (re.compile(r".*\.conv"), ["conv_0", "conv_1"]),
        (re.compile(r"layers.*0|head"), ["conv_0", "linear"]),
    ],
    ids=str,
)
def test_a_module_and_all_below_it_are_left_float(name: str | re.Pattern[str], floats: list[str], strict: bool) -> None:
    assert quantized(lambda q: q.set_module_name(name, None), strict=strict) == only_float(*floats)


def test_a_pattern_must_match_the_whole_path() -> None:
    quantizer = BackendQuantizer(minmax_config()).set_module_name(re.compile("conv"), None)
    with pytest.warns(AnnotationWarning, match=r"^module name 'conv' matched no node; nearest: "):
        prepare_pt2e(export(net(), X), quantizer)


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("L['self'].layers[0].conv", "layers.0.conv"),
        ("L['self'].named['last'][0]", "named.last.0"),
        ("L__self__.head", "head"),
        ("self.head", "head"),
        ("L['self']", ""),
        ("selfish.head", "selfish.head"),
        ("head", "head"),
        ("", ""),
    ],
)
def test_paths_lose_the_prefix_of_the_export(path: str, clean: str) -> None:
    assert clean_path(path) == clean


def test_the_empty_path_is_the_whole_model() -> None:
    quantizer = BackendQuantizer(minmax_config()).set_module_name("", None)
    with pytest.warns(AnnotationWarning, match="no operator was annotated: nothing will be quantized"):
        prepare_pt2e(export(net(), X), quantizer)
    assert quantizer.record.messages == ["no operator was annotated: nothing will be quantized"]


# -- by module type, operator, predicate ----------------------------------------------------------------------


@strictly
@pytest.mark.parametrize(
    ("kind", "floats"),
    [
        (Block, ["conv_0", "conv_1"]),
        (nn.Conv2d, ["conv_0", "conv_1", "conv_2"]),
        (Tail, ["conv_2"]),
        (nn.Linear, ["linear"]),
    ],
)
def test_modules_of_a_type_and_what_is_in_them_are_left_float(kind: type, floats: list[str], strict: bool) -> None:
    assert quantized(lambda q: q.set_module_type(kind, None), strict=strict) == only_float(*floats)


@strictly
@pytest.mark.parametrize(
    "op",
    [torch.ops.aten.conv2d.default, torch.ops.aten.conv2d, "conv2d", "aten.conv2d.default", "aten::conv2d", F.conv2d],
    ids=["overload", "packet", "name", "text", "schema", "function"],
)
def test_an_operator_is_left_float(op: object, strict: bool) -> None:
    found = quantized(lambda q: q.set_operator_type(op, None), strict=strict)
    assert found == only_float("conv_0", "conv_1", "conv_2")


@pytest.mark.parametrize(
    ("op", "left"),
    [
        (torch.ops.aten.relu_.default, 2),  # the two that were exported in place
        (torch.ops.aten.relu_, 3),  # a packet stands for every spelling
        (torch.ops.aten.relu.default, 3),  # the two are functional by now
        ("relu", 3),
        (F.relu6, 2),  # spelled hardtanh by now
        ("relu6", 2),
        (torch.ops.aten.hardtanh.default, 2),
        ("hardtanh", 2),
    ],
    ids=["in-place", "in-place packet", "respelled", "relu", "function", "relu6", "hardtanh overload", "hardtanh"],
)
def test_an_operator_is_known_as_exported_and_as_respelled(op: object, left: int) -> None:
    quantizer = BackendQuantizer(minmax_config()).set_operator_type(op, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AnnotationWarning)
        graph = quantize(net(), X, quantizer).converted
    clamps = calls(graph, "relu", "relu_", "hardtanh", "relu6")
    in_float = [node for node in clamps if not is_dequantize(node.args[0]) and not fused(node)]
    assert len(in_float) == 0  # a clamp between quantized ops reads a dequantized value ...
    apart = [node for node in clamps if is_dequantize(node.args[0])]
    assert len(apart) == left  # ... and is no part of a block


def fused(node: Node) -> bool:
    (source,) = node.all_input_nodes
    return not is_dequantize(source) and all(is_quantize(user) for user in node.users)


def test_a_predicate_leaves_nodes_float() -> None:
    def first_layer(node: Node) -> bool:
        return node.name == "conv2d"

    assert quantized(lambda q: q.set_filter(first_layer, None)) == only_float("conv_0")


# -- precedence -----------------------------------------------------------------------------------------------

CONFIG = minmax_config()


@pytest.mark.parametrize(
    ("rules", "floats"),
    [
        # a longer path wins over a shorter one, whatever the order
        (lambda q: q.set_module_name("layers", None).set_module_name("layers.1", CONFIG), ["conv_0"]),
        (lambda q: q.set_module_name("layers.1", CONFIG).set_module_name("layers", None), ["conv_0"]),
        # a later call wins over an earlier one of the same level
        (lambda q: q.set_module_name("layers.0", None).set_module_name("layers.0", CONFIG), []),
        (lambda q: q.set_operator_type("conv2d", CONFIG).set_operator_type(torch.ops.aten.conv2d, None), HEADS[:3]),
        # the innermost module wins among types
        (lambda q: q.set_module_type(Block, None).set_module_type(nn.Conv2d, CONFIG), []),
        (lambda q: q.set_module_type(nn.Conv2d, CONFIG).set_module_type(Block, None), []),
        (lambda q: q.set_module_type(Block, CONFIG).set_module_type(nn.Conv2d, None), HEADS[:3]),
        # predicate > module name > module type > operator > global
        (lambda q: q.set_module_name("layers", None).set_module_type(Block, CONFIG), ["conv_0", "conv_1"]),
        (lambda q: q.set_module_type(nn.Conv2d, None).set_module_name("named", CONFIG), ["conv_0", "conv_1"]),
        (lambda q: q.set_operator_type("conv2d", None).set_module_type(Tail, CONFIG), ["conv_0", "conv_1"]),
        (lambda q: q.set_module_type(Tail, CONFIG).set_operator_type("conv2d", None), ["conv_0", "conv_1"]),
        (lambda q: q.set_filter(lambda n: n.name == "conv2d", CONFIG).set_module_name("layers", None), ["conv_1"]),
        (lambda q: q.set_global(None).set_module_name("layers.0", CONFIG), HEADS[1:]),
        (lambda q: q.set_module_name("layers.0", CONFIG).set_global(None), HEADS[1:]),
    ],
    ids=[str(index) for index in range(14)],
)
def test_the_most_specific_rule_wins(rules: Callable[[BackendQuantizer], object], floats: list[str]) -> None:
    assert quantized(rules) == only_float(*floats)


def test_no_config_leaves_float_what_no_rule_names() -> None:
    quantizer = BackendQuantizer(None).set_module_name("head", minmax_config())
    assert heads(quantize(net(), X, quantizer).converted) == only_float(*HEADS[:3])


# -- refinement -----------------------------------------------------------------------------------------------


def test_a_scheme_refines_the_global_config() -> None:
    found = quantized(lambda q: q.set_module_name("layers.1", INT16_SYMMETRIC).set_module_type(nn.Linear, None))
    assert found == {"conv_0": "int8", "conv_1": "int16", "conv_2": "int8", "linear": "float"}


def test_a_scheme_by_operator_type() -> None:
    found = quantized(lambda q: q.set_operator_type(torch.ops.aten.linear.default, INT16_SYMMETRIC))
    assert found == {"conv_0": "int8", "conv_1": "int8", "conv_2": "int8", "linear": "int16"}


def test_a_scheme_needs_a_global_config() -> None:
    quantizer = BackendQuantizer(None).set_module_name("head", INT8_SYMMETRIC)
    with pytest.raises(ConfigError, match="module name 'head' is a scheme, which refines the global config, but none"):
        prepare_pt2e(export(net(), X), quantizer)


def test_a_scheme_refines_the_global_config_that_is_set_last() -> None:
    last = minmax_config(weight=WeightConfig(per_channel=False))
    quantizer = BackendQuantizer(minmax_config()).set_module_name("head", INT8_SYMMETRIC).set_global(last)
    converted = quantize(net(), X, quantizer).converted
    (head,) = calls(converted, "linear")
    given, weight = head.all_input_nodes[:2]
    assert pair_of(given).zero_point == 0
    assert "dequantize_per_tensor" in str(weight.target)


def test_no_block_is_fused_across_configs() -> None:
    def split(quantizer: BackendQuantizer) -> None:
        quantizer.set_module_name("named.last.1", INT16_SYMMETRIC)

    quantizer = BackendQuantizer(minmax_config())
    split(quantizer)
    graph = quantize(net(), X, quantizer).converted
    relu = calls(graph, "relu")[-1]
    assert is_dequantize(relu.args[0])  # quantized apart from its convolution
    assert pair_of(relu.args[0]).dtype is torch.int16
    assert all(is_quantize(user) for user in calls(graph, "conv2d")[2].users)


def test_equal_configs_fuse_though_set_by_two_calls() -> None:
    def both(quantizer: BackendQuantizer) -> None:
        quantizer.set_module_name("named.last.0", INT16_SYMMETRIC).set_module_name("named.last.1", INT16_SYMMETRIC)

    quantizer = BackendQuantizer(minmax_config())
    both(quantizer)
    graph = quantize(net(), X, quantizer).converted
    relu = calls(graph, "relu")[-1]
    assert fused(relu)
    (quantize_node,) = relu.users
    assert pair_of(quantize_node).dtype is torch.int16


@pytest.mark.parametrize("name", ["layers.0.act", "layers.0.conv"])
def test_a_filtered_member_leaves_no_half_of_a_block(name: str) -> None:
    quantizer = BackendQuantizer(minmax_config()).set_module_name(name, None)
    graph = quantize(net(), X, quantizer).converted
    conv, relu = calls(graph, "conv2d")[0], calls(graph, "relu")[0]
    is_float = not is_dequantize(conv.args[0])
    assert is_float == (name == "layers.0.conv")
    assert is_dequantize(conv.args[1]) != is_float
    if not is_float:  # the block ends at its head
        assert [is_quantize(user) for user in conv.users] == [True]
        assert is_dequantize(relu.args[0])
    assert sqnr_db(net()(*X), graph(*X)) > 20


# -- rules without effect -------------------------------------------------------------------------------------


def nothing(_: Node) -> bool:
    return False


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (lambda q: q.set_module_name("layer.0", None), r"^module name 'layer\.0' matched no node; nearest: layers\.0"),
        (lambda q: q.set_module_type(nn.Conv1d, None), r"'torch\.nn\.modules\.conv\.Conv1d' matched .*Conv2d"),
        (lambda q: q.set_operator_type("conv3d", None), r"^operator type 'conv3d' matched no node; nearest: conv2d"),
        (lambda q: q.set_operator_type(torch.ops.aten.gelu.default, None), r"'aten\.gelu\.default' matched no node"),
        (lambda q: q.set_operator_type(F.gelu, None), r"^operator type 'gelu' matched no node"),
        (lambda q: q.set_filter(nothing, None), r"^filter 'nothing' matched no node$"),
    ],
    ids=["name", "type", "operator", "overload", "function", "filter"],
)
def test_a_rule_that_matches_nothing_is_reported(rules: Callable[[BackendQuantizer], object], message: str) -> None:
    quantizer = BackendQuantizer(minmax_config())
    rules(quantizer)
    with pytest.warns(AnnotationWarning, match=message):
        prepare_pt2e(export(net(), X), quantizer)
    assert len(quantizer.record.messages) == 1
    assert re.search(message, quantizer.record.messages[0])


def test_a_rule_for_what_another_quantizer_has_annotated_matched() -> None:
    first = BackendQuantizer(None).set_module_name("head", minmax_config())
    second = BackendQuantizer(minmax_config()).set_module_name("head", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AnnotationWarning)
        flow = quantize(net(), X, ComposableQuantizer([first, second]))
    assert heads(flow.converted) == only_float()
    assert second.record.messages == []


def test_the_setters_can_be_chained_and_used_again() -> None:
    quantizer = BackendQuantizer(minmax_config()).set_module_name("head", None).set_global(minmax_config())
    for _ in range(2):
        assert heads(quantize(net(), X, quantizer).converted) == only_float("linear")
