"""What a node is to the annotators depends on the form in which its op is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from quantmark import BackendQuantizer, configs
from quantmark.annotators.account import OpAccount
from quantmark.annotators.roles import Role
from quantmark.configs import BackendConfig

Binary = Callable[[Tensor, Tensor], Tensor]
PLAIN: dict[str, Binary] = {"add": torch.add, "sub": torch.sub, "alpha=1": lambda x, y: torch.add(x, y, alpha=1)}
SCALED: dict[str, Binary] = {
    "add": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: torch.sub(x, y, alpha=0.5),
}


class Calls(nn.Module):
    def __init__(self, call: Binary) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.call(x, y)


def account(call: Binary, config: BackendConfig) -> OpAccount:
    """What became of the one op that is called."""
    x = torch.randn(2, 3, 4, 4)
    graph = torch.export.export(Calls(call), (x, x)).module()
    assert isinstance(graph, GraphModule)
    quantizer = BackendQuantizer(config)
    quantizer.annotate(quantizer.transform_for_annotation(graph))
    (found,) = quantizer.record.account.ops
    return found


@pytest.mark.parametrize("factory", [configs.xnnpack, configs.arm_tosa])
@pytest.mark.parametrize("call", PLAIN)
def test_plain_sums_are_quantized(call: str, factory: Callable[[], BackendConfig]) -> None:
    found = account(PLAIN[call], factory())
    assert (found.role, found.why) == (Role.OWN, "")


@pytest.mark.filterwarnings("ignore:no operator was annotated")
@pytest.mark.parametrize("call", SCALED)
def test_a_sum_that_scales_an_operand_stays_float(call: str) -> None:
    found = account(SCALED[call], configs.xnnpack())
    assert (found.role, found.inputs, found.output) == (Role.FLOAT, (), "")
    assert "alpha" in found.why


@pytest.mark.filterwarnings("ignore:no operator was annotated")
def test_a_quotient_that_is_rounded_stays_float() -> None:
    config = BackendConfig()
    assert account(torch.div, config).role is Role.OWN
    assert "rounds" in account(lambda x, y: torch.div(x, y, rounding_mode="floor"), config).why


@pytest.mark.filterwarnings("ignore:no operator was annotated")
def test_where_only_global_pools_run_others_stay_float() -> None:
    config = configs.xnnpack()
    assert account(lambda x, _: x.mean((2, 3), keepdim=True), config).role is Role.OWN
    assert "global pools" in account(lambda x, _: x.mean((2, 3)), config).why
    assert "global pools" in account(lambda x, _: x.mean(1, keepdim=True), config).why
