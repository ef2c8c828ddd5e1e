"""What Arm's configs quantize lowers: each op by itself, partitioned, run on the reference model, compiled by Vela."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantmark import configs
from quantmark.configs.arm import ActivationName
from support.arm_ops import MODELS
from support.flow import quantize, sqnr_db
from support.tosa import run_on_reference
from support.vela import compile_for, profile_of

pytestmark = [pytest.mark.arm, pytest.mark.timeout(600)]
LEFT = {  # what stays outside, on which target: in no table of ours there, or not as the model calls it
    ("ethos-u55-128", "int8"): {"conv3d", "gather", "index", "index_select", "upsample_bilinear2d", "where"},
    ("ethos-u85-256", "int8"): {"where"},  # the comparison
}
LEFT[("ethos-u55-128", "int16")] = {
    *LEFT["ethos-u55-128", "int8"],
    *("mm", "bmm", "matmul", "conv_transpose2d", "conv_transpose2d, groups", "ceil", "floor"),
}
LEFT[("ethos-u85-256", "int16")] = {"where", "ceil", "floor"}
LOST_DB = {"layer_norm": 9.0, "cos": 5.0}  # tables of 513 entries: rsqrt (TOSAQuantizer loses 16), and cos


def run(name: str, target: str, activation: ActivationName) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, batches = make().eval(), [(torch.randn(shape),) for _ in range(4)]
    factory = configs.ethos_u55 if "u55" in target else configs.ethos_u85
    flow = quantize(model, batches[0], factory(activation=activation), batches=batches, guards=False)
    ran = run_on_reference(flow.converted, batches[:1], profile_of(target))
    if name not in LEFT[target, activation]:
        assert (ran.delegates, ran.outside) == (1, set())
    compile_for(flow.converted, batches[0], target)
    exact: Any = model(*batches[0])
    exact = exact if isinstance(exact, (list, tuple)) else [exact]
    allowed = 1.0 if activation == "int8" else LOST_DB.get(name, 4.0)  # of 75 to 98 dB
    for want, eager, reference in zip(exact, ran.eager[0], ran.reference[0], strict=True):
        assert reference.shape == want.shape
        assert sqnr_db(want, reference) >= max(20.0, sqnr_db(want, eager) - allowed)


@pytest.mark.parametrize("name", ["conv_transpose2d, groups", "upsample_bilinear2d", "hstack"])
def test_a_few_ops_lower_to_an_ethos_u55(name: str) -> None:
    run(name, "ethos-u55-128", "int8")


@pytest.mark.slow
@pytest.mark.parametrize(("target", "activation"), LEFT)
@pytest.mark.parametrize("name", MODELS)
def test_every_op_lowers(name: str, target: str, activation: ActivationName) -> None:
    run(name, target, activation)
