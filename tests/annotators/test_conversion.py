"""What becomes of observers: pairs that are needed, dtypes and origins that later passes read, folded batch norms."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.exir import to_edge
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torchao.quantization.pt2e import allow_exported_model_train_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from quantmark import configs
from quantmark.annotators.graph import op_name
from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.configs.base import BackendConfig, WeightConfig
from quantmark.observers.qparams import INT16_SYMMETRIC
from support.flow import (
    Inputs,
    calls,
    export,
    is_dequantize,
    is_quantize,
    minmax_config,
    outputs,
    pair_of,
    quantize,
    quantized_value,
    sqnr_db,
)


class Net(nn.Module):
    """Blocks, a join that requantizes one of its operands, branches, and an output in half the width."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.conv = nn.Conv1d(6, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x).relu()
        joined = torch.cat([y, self.second(y) * 30 - 20])
        return self.second(joined), y[:, :3] + 1, self.conv(joined.t().unsqueeze(0)).view(-1)


def rows(dtype: torch.dtype = torch.float32) -> Inputs:
    torch.manual_seed(1)
    return (torch.randn(3, 6).to(dtype),)


class Watched(Interpreter):
    """Runs a graph and notes where a value is not of the dtype and shape that its metadata promise."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.wrong: list[str] = []

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        promised = n.meta.get("val")
        if isinstance(value, Tensor) and isinstance(promised, Tensor):
            if (value.dtype, value.shape) != (promised.dtype, promised.shape):
                self.wrong.append(f"{n.name}: {value.dtype}{list(value.shape)}, promised {promised}")
        elif (is_quantize(n) or is_dequantize(n)) and not isinstance(promised, Tensor):
            self.wrong.append(f"{n.name}: no promise")
        return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [minmax_config(), minmax_config(INT16_SYMMETRIC)], ids=["int8", "int16"])
def test_every_value_is_what_its_metadata_promise(dtype: torch.dtype, scheme: BackendConfig) -> None:
    converted = quantize(Net().to(dtype).eval(), rows(dtype), scheme).converted
    watched = Watched(converted)
    with torch.no_grad():
        watched.run(*rows(dtype))
    assert watched.wrong == []


@pytest.mark.parametrize("config", [minmax_config(), configs.xnnpack(estimator="minmax")], ids=["any", "xnnpack"])
def test_converted_models_reach_the_edge_dialect(config: BackendConfig) -> None:
    converted = quantize(Net().eval(), rows(), config).converted
    edge = to_edge(torch.export.export(converted, rows())).exported_program().module()
    with torch.no_grad():
        for want, got in zip(converted(*rows()), edge(*rows()), strict=True):
            assert sqnr_db(want, got) > 60


def test_pairs_know_where_they_come_from() -> None:
    converted = quantize(Net().eval(), rows(), minmax_config()).converted
    made = [n for n in converted.graph.nodes if is_quantize(n) or is_dequantize(n)]
    assert made
    assert [n for n in made if "from_node" not in n.meta] == []


def test_a_value_is_quantized_once_with_the_same_qparams() -> None:
    converted = quantize(Net().eval(), rows(), minmax_config()).converted
    for node in converted.graph.nodes:
        source = node.args[0] if is_quantize(node) and isinstance(node.args[0], Node) else None
        if source is not None and is_dequantize(source) and source.args[1:3] == node.args[1:3]:
            pytest.fail(f"{node} requantizes {source} with the qparams that it has")


def _saved(prepared: GraphModule) -> GraphModule:
    fresh = prepare_pt2e(export(Net().eval(), rows()), BackendQuantizer(minmax_config()))
    stream = io.BytesIO()
    torch.save(prepared.state_dict(), stream)
    fresh.load_state_dict(torch.load(io.BytesIO(stream.getvalue())))
    return fresh


@pytest.mark.parametrize("travel", [copy.deepcopy, _saved, lambda m: copy.deepcopy(copy.deepcopy(m))])
def test_a_prepared_model_converts_the_same_after_travelling(travel: Callable[[GraphModule], GraphModule]) -> None:
    prepared = prepare_pt2e(export(Net().eval(), rows()), BackendQuantizer(minmax_config()))
    prepared(*rows())
    travelled = travel(prepared)
    here, there = convert_pt2e(prepared), convert_pt2e(travelled)
    with torch.no_grad():
        for want, got in zip(here(*rows()), there(*rows()), strict=True):
            assert torch.equal(want, got)


# -- batch norms ---------------------------------------------------------------------------------------------------

NORMED: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 6), nn.BatchNorm1d, (9, 5)),
    "conv2d_same": (lambda: nn.Conv2d(4, 6, 3, padding="same", bias=False), nn.BatchNorm2d, (4, 4, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 6, 2, groups=2), nn.BatchNorm3d, (4, 2, 4, 4, 4)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 6, 2), nn.BatchNorm3d, (4, 4, 3, 3, 3)),
}
FOLDED_BY_TORCHAO: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), nn.BatchNorm1d, (4, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d, (4, 4, 6, 6)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d, (4, 4, 4, 4)),
}


class Normed(nn.Module):
    """Towers of head, batch norm and relu6."""

    def __init__(self, made: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([make() for make, _, _ in made.values()])
        self.norms = nn.ModuleList([norm(6) for _, norm, _ in made.values()])
        with torch.no_grad():
            for norm in self.norms:
                assert isinstance(norm.weight, Tensor)
                norm.weight.copy_(torch.tensor([1.5, -0.7, 1.0, 0.5, -1.2, 0.8]))  # negative ones swap the ends

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.relu6(n(h(x))) for h, n, x in zip(self.heads, self.norms, inputs, strict=True))


def trained(made: dict[str, Any], config: BackendConfig) -> tuple[GraphModule, tuple[Tensor, ...], Inputs]:
    """Train for a few steps with fake-quantize, convert; return that and what the trained model gave."""
    torch.manual_seed(2)
    inputs = tuple(torch.randn(shape) for _, _, shape in made.values())
    prepared = prepare_qat_pt2e(export(Normed(made).train(), inputs), BackendQuantizer(config))
    allow_exported_model_train_eval(prepared)
    prepared.train()
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-2)
    for _ in range(5):
        loss = sum((y - 1).square().mean() for y in prepared(*(torch.randn_like(x) for x in inputs)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prepared.eval()
    with torch.no_grad():
        expected = prepared(*inputs)
        return convert_pt2e(prepared), expected, inputs


@pytest.mark.parametrize("made", [NORMED, FOLDED_BY_TORCHAO], ids=["left by torchao", "folded by torchao"])
def test_no_batch_norm_is_left_in_a_block_after_training(made: dict[str, Any]) -> None:
    converted, expected, inputs = trained(made, minmax_config(is_qat=True))
    assert calls(converted, "batch_norm") == []
    if made is NORMED:
        assert calls(converted, "add_") == []  # batches are counted no longer
    for output in outputs(converted):
        pair, clamp = pair_of(output), quantized_value(output)
        assert pair.zero_point == pair.quant_min
        assert pair.largest <= 6 + pair.scale / 2
        (head, *_) = clamp.args
        assert isinstance(head, Node)
        assert op_name(head).startswith(("conv", "linear"))
        assert is_dequantize(head.args[0])
        assert is_dequantize(head.args[1])
    with torch.no_grad():
        for name, want, got in zip(made, expected, converted(*inputs), strict=True):
            assert sqnr_db(want, got) > (40 if made is NORMED else 28), name


@pytest.mark.slow
def test_a_batch_norm_that_cannot_be_folded_stays_outside() -> None:
    made = {name: NORMED[name] for name in ("linear", "conv3d")}
    converted, expected, inputs = trained(made, minmax_config(is_qat=True, weight=WeightConfig(per_channel=False)))
    norms = calls(converted, "batch_norm")
    assert len(norms) == 2
    assert all(is_dequantize(n.args[0]) for n in norms)
    with torch.no_grad():
        for name, want, got in zip(made, expected, converted(*inputs), strict=True):
            assert sqnr_db(want, got) > 40, name


class Affine(nn.Module):
    """addmm and mm with a batch norm, which torchao never folds."""

    def __init__(self, bias: bool, affine: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.bias = nn.Parameter(torch.randn(6)) if bias else None
        self.norm = nn.BatchNorm1d(6, affine=affine)
        nn.init.uniform_(self.norm.running_mean, -1, 1)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2)  # type: ignore[arg-type]
        if affine:
            with torch.no_grad():
                self.norm.weight.copy_(torch.tensor([1.5, -0.7, 0.0, 0.5, -1.2, 0.8]))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)
        normed: Tensor = self.norm(y)
        return normed.relu()


# Where a batch norm is left, torchao takes seconds to look for those that it folds.
@pytest.mark.parametrize(
    ("bias", "affine"),
    [(True, True), (True, False), pytest.param(False, True, marks=pytest.mark.slow)],
    ids=["addmm", "addmm, not affine", "matmul"],
)
def test_a_batch_norm_behind_a_matrix_product(bias: bool, affine: bool) -> None:
    model = Affine(bias, affine).eval()
    inputs = (torch.randn(9, 5),)
    converted = quantize(model, inputs, minmax_config()).converted
    norms = calls(converted, "batch_norm")
    assert len(norms) == (0 if bias else 1)  # without a bias there is nowhere to put the offset
    assert all(is_dequantize(n.args[0]) for n in norms)
    with torch.no_grad():
        assert sqnr_db(model(*inputs), converted(*inputs)) > 32
