"""Graphs within the graph, masks and power spectra."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from quantmark import BackendQuantizer, UncalibratedError, configs, observe_ranges, quantize, sqnr_db
from quantmark.annotators.masks import masked_values
from quantmark.annotators.spectra import spectrum_values
from quantmark.configs import BackendConfig, OpRules, Spectra
from support.models import Batches

EVERYTHING = BackendConfig()


def quantized(model: nn.Module, batches: Batches, config: BackendConfig = EVERYTHING) -> GraphModule:
    prepared = prepare_pt2e(torch.export.export(model.eval(), batches[0]).module(), BackendQuantizer(config))
    for batch in batches:
        prepared(*batch)
    return convert_pt2e(prepared)


def quantizes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [n for n in graph.nodes if str(n.target).startswith("quantized_decomposed.quantize_per_tensor")]


class UnderNoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(self.norm(self.a(x)))
        return self.b(y), y


def test_a_forward_under_no_grad_is_quantized_as_if_it_were_not() -> None:
    torch.manual_seed(0)
    model: nn.Module = UnderNoGrad().eval()
    batches: Batches = [(torch.randn(1, 3, 8, 8),) for _ in range(3)]
    converted = quantized(model, batches, configs.xnnpack())
    targets = [str(n.target) for n in converted.graph.nodes]
    assert not any("batch_norm" in target or "set_grad" in target for target in targets)
    assert len(quantizes(converted.graph)) == 3
    for mine, theirs in zip(converted(*batches[0]), model(*batches[0]), strict=True):
        assert sqnr_db(theirs, mine) > 30


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda t: F.relu(self.a(t)), lambda t: self.b(t) * 2.0, (x,))
        return cast("Tensor", self.o(y))


def test_both_branches_of_a_cond_are_quantized_by_their_own_data() -> None:
    torch.manual_seed(0)
    model: nn.Module = Chooses().eval()
    batches: Batches = [(torch.rand(3, 4),), (-torch.rand(3, 4),), (torch.rand(3, 4) * 2,), (-torch.rand(3, 4),)]
    before = copy.deepcopy(model.state_dict())
    converted = quantized(model, batches)
    inner = [m for name, m in converted.named_modules() if name and isinstance(m, GraphModule)]
    assert [len(quantizes(m.graph)) > 0 for m in inner] == [True, True]
    assert min(sqnr_db(model(*batch), converted(*batch)) for batch in batches) > 20
    again = torch.export.export(converted, batches[0]).module()
    assert all(torch.equal(again(*batch), converted(*batch)) for batch in batches)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_exported_program_with_a_cond_can_be_quantized_twice() -> None:
    torch.manual_seed(0)
    model = Chooses().eval()
    batches: Batches = [(torch.rand(3, 4),), (-torch.rand(3, 4),)]
    program = torch.export.export(model, batches[0])
    outputs = [quantize(program, batches, EVERYTHING, progress=False).model(*batches[0]) for _ in range(2)]
    assert torch.equal(*outputs)
    assert torch.equal(program.module()(*batches[0]), model(*batches[0]))


class Counts(nn.Module):
    """A model that writes into a buffer, as caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.mean(0))
        return cast("Tensor", self.a(x) + self.seen)


def test_calibration_writes_into_no_buffer_of_the_user() -> None:
    model: Counts = Counts().eval()
    batches: Batches = [(torch.rand(3, 4),), (torch.rand(3, 4),)]
    quantize(model, batches, configs.xnnpack(), progress=False)
    program = torch.export.export(model, batches[0])
    quantize(program, batches, configs.xnnpack(), progress=False)
    observe_ranges(program, batches)
    assert not model.seen.any()
    assert not program.state_dict["seen"].any()


def test_a_grouped_transposed_convolution_has_a_derived_bias() -> None:
    torch.manual_seed(0)
    model, x = nn.ConvTranspose2d(4, 6, 3, groups=2).eval(), torch.randn(2, 4, 6, 6)
    assert sqnr_db(model(x), quantize(model, [x], configs.arm_tosa(), progress=False).model(x)) > 30


def test_a_branch_that_no_batch_takes_is_an_error_that_names_it() -> None:
    batches: Batches = [(torch.rand(3, 4),), (torch.rand(3, 4),)]
    with pytest.raises(UncalibratedError, match="linear"):
        quantized(Chooses(), batches)


class Attends(nn.Module):
    """Attention with a padding mask, written in one of the usual ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.q, self.k, self.v = how, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("causal", torch.full((6, 6), float("-inf")).triu(1))
        self.large: Tensor
        self.register_buffer("large", torch.full((6, 6), -1e9).triu(1))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        if self.how == "masked_fill":
            scores = scores.masked_fill(keep[:, None] < 0.5, float("-inf"))
        elif self.how == "smallest":
            scores = scores + (1.0 - keep[:, None]) * torch.finfo(torch.float32).min
        elif self.how == "ten thousand":
            scores = scores + (1.0 - keep[:, None]) * -10000.0
        elif self.how == "scaled":
            scores = scores + self.large * 1.0
        elif self.how == "cast":
            scores = scores + self.large.to(x.dtype)[None]
        elif self.how == "made on the way":
            scores = scores + torch.full((6, 6), float("-inf")).triu(1)
        else:
            scores = scores + self.causal
        return cast("Tensor", torch.softmax(scores, -1) @ self.v(x))


@pytest.mark.parametrize(
    "how", ["masked_fill", "smallest", "ten thousand", "causal buffer", "made on the way", "scaled", "cast"]
)
def test_a_mask_keeps_its_meaning_and_ruins_no_scale(how: str) -> None:
    torch.manual_seed(0)
    model = Attends(how).eval()
    batches: Batches = [(torch.randn(2, 6, 8), (torch.arange(6) < 4).float().expand(2, 6)) for _ in range(4)]
    converted = quantized(model, batches)
    scales = [float(n.args[1]) for n in quantizes(converted.graph)]  # type: ignore[arg-type]
    assert max(scales) < 1.0
    assert min(sqnr_db(model(*batch), converted(*batch)) for batch in batches) > 28


def test_ordinary_large_factors_are_no_masks() -> None:
    class Pixels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x) * 640.0 - 320.0

    graph = torch.export.export(Pixels(), (torch.randn(2, 3),)).module()
    assert isinstance(graph, GraphModule)
    assert masked_values(graph) == set()


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.re, self.im, self.mel = nn.Linear(64, 33, bias=False), nn.Linear(64, 33, bias=False), nn.Linear(33, 12)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.re(x), self.im(x)
        return cast("Tensor", self.mel(torch.log(a * a + b * b + 1e-6)))


def spectrum_db(spectra: Spectra) -> float:
    torch.manual_seed(0)
    model = Spectrum().eval()
    batches: Batches = [(torch.randn(4, 20, 64) * torch.logspace(-2, 0, 20)[None, :, None],) for _ in range(4)]
    converted = quantized(model, batches, replace(EVERYTHING, ops=OpRules(spectra=spectra)))
    return sqnr_db(model(*batches[0]), converted(*batches[0]))


def test_squares_that_feed_a_logarithm_gain_ten_db_in_float_or_int16() -> None:
    with pytest.warns(UserWarning, match="square that feeds a logarithm"):
        kept = spectrum_db(Spectra.KEEP)
    assert spectrum_db(Spectra.FLOAT) > kept + 10
    assert spectrum_db(Spectra.WIDE) > kept + 10


def test_a_logarithm_of_no_product_is_no_spectrum() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(torch.sigmoid(x) + 1.0)

    graph = torch.export.export(Plain(), (torch.randn(2, 3),)).module()
    assert isinstance(graph, GraphModule)
    assert spectrum_values(graph) == set()
