"""Other quantizers on the same graph, before, after and as `rest`."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer, Quantizer

from quantmark import BackendQuantizer, SharingConflictError, configs, sqnr_db
from quantmark.configs import BackendConfig, OpRules
from support.models import Batches


class Meets(nn.Module):
    """A relu block meets a signed tensor in a cat, and itself in an add."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.c, self.l = nn.Conv2d(8, 4, 1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        w = self.c(torch.cat([y, self.b(x)], 1)) + y
        return cast("Tensor", self.l(F.max_pool2d(w, 2).mean((2, 3))))


def xnnpack_quantizer() -> Quantizer:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))


def tosa_quantizer() -> Quantizer:
    pytest.importorskip("tosa_reference_model", reason="needs the extra arm")
    from executorch.backends.arm.quantizer.arm_quantizer import TOSAQuantizer, get_symmetric_quantization_config
    from executorch.backends.arm.tosa.specification import TosaSpecification

    quantizer = TOSAQuantizer(TosaSpecification.create_from_string("TOSA-1.0+INT"))
    quantizer.set_global(get_symmetric_quantization_config())
    return quantizer


def heads_only(rest: Quantizer | None = None) -> BackendConfig:
    """Return a config that leaves everything but weighted blocks to another quantizer."""
    base = configs.xnnpack()
    nothing: frozenset[str] = frozenset()
    blocks = replace(base.blocks, residual_heads=nothing)
    ops = OpRules(own=nothing, shared=nothing, selects=nothing, joins=nothing)
    return replace(base, blocks=blocks, ops=ops, rest=rest)


def quantized(quantizer: Quantizer) -> tuple[nn.Module, GraphModule, Batches]:
    torch.manual_seed(0)
    model = Meets().eval()
    batches: Batches = [(torch.randn(1, 3, 8, 8),) for _ in range(4)]
    prepared = prepare_pt2e(torch.export.export(model, batches[0]).module(check_guards=False), quantizer)
    for batch in batches:
        prepared(*batch)
    return model, convert_pt2e(prepared), batches


def relu_codes(converted: GraphModule) -> list[tuple[int, int]]:
    """Return (zero_point, quant_min) of each quantize that reads a relu."""
    relus = [n for n in converted.graph.nodes if "relu" in str(n.target)]
    quantizes = [u for n in relus for u in n.users if "quantize_per_tensor" in str(u.target)]
    return [(int(q.args[2]), int(q.args[3])) for q in quantizes]


@pytest.mark.parametrize("rest", [xnnpack_quantizer, tosa_quantizer])
def test_what_rest_adds_keeps_the_contract_and_the_precision(rest: object) -> None:
    model, converted, batches = quantized(BackendQuantizer(heads_only(rest())))  # type: ignore[operator]
    assert relu_codes(converted)
    assert all(zero_point == quant_min for zero_point, quant_min in relu_codes(converted))
    adds = [n for n in converted.graph.nodes if "aten.add" in str(n.target)]
    assert adds, "the add is what rest was for"
    assert all("dequantize" in str(a.target) for n in adds for a in n.all_input_nodes)
    assert min(sqnr_db(model(*batch), converted(*batch)) for batch in batches) > 35


@pytest.mark.parametrize("order", ["first", "last"])
def test_beside_xnnpacks_quantizer_in_a_composable_one(order: str) -> None:
    ours = BackendQuantizer(heads_only() if order == "first" else configs.xnnpack())
    both: list[Quantizer] = [ours, xnnpack_quantizer()] if order == "first" else [xnnpack_quantizer(), ours]
    model, converted, batches = quantized(ComposableQuantizer(both))
    assert min(sqnr_db(model(*batch), converted(*batch)) for batch in batches) > 35
    if order == "first":
        assert all(zero_point == quant_min for zero_point, quant_min in relu_codes(converted))


def test_a_quantizer_that_ties_a_signed_tensor_to_our_relu_is_refused() -> None:
    with pytest.raises(
        SharingConflictError, match=r"relu \(relu\): values .* pass|Pass that quantizer as the config's"
    ):
        quantized(ComposableQuantizer([BackendQuantizer(heads_only()), tosa_quantizer()]))


def test_what_another_quantizer_annotated_is_read_with_its_qparams() -> None:
    """conv (theirs) -> relu (ours): the edge has the very qparams of the conv's output, and no second quantize."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", self.b(self.a(x)))

    torch.manual_seed(0)
    batches: Batches = [(torch.randn(6, 4),) for _ in range(3)]
    theirs = xnnpack_quantizer()
    theirs.set_filter_function(lambda node: node.name == "linear")  # type: ignore[attr-defined]
    quantizer = ComposableQuantizer([theirs, BackendQuantizer(configs.xnnpack())])
    prepared = prepare_pt2e(torch.export.export(Chain().eval(), batches[0]).module(), quantizer)
    for batch in batches:
        prepared(*batch)
    converted = convert_pt2e(prepared)
    quantizes = [n for n in converted.graph.nodes if "quantize_per_tensor" in str(n.target) and "de" not in n.name[:2]]
    assert len(quantizes) == 3  # x, between, output
