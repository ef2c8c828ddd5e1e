"""Cadence Xtensa, as executorch 1.5.1 compiles for it: per-tensor int8, affine weights in linear, int32 bias.

Every rule was read in executorch 1.5.1 (paths below are under `executorch/backends/cadence/aot/`) and those on the
hoist were confirmed on the pass itself:

* A8W8: int8 affine activations; weights int8 per tensor, affine in linear and addmm, symmetric in convolutions;
  16-bit activations are int16 affine (`quantizer/quantizer.py`, act_qspec_asym8s, act_qspec_asym16s).
* The bias is int32 with scale = input scale * weight scale; a float bias is replaced by zeros in fusion
  (`quantizer/fusion_pass.py`).
* conv1d/conv2d + relu is one block, whose relu is dropped without a look at the zero point, so that the activation
  contract decides correctness (`quantizer/patterns.py`, ConvReluBasePattern); add + relu likewise; linear + relu is
  never one.
* Data movement is not annotated: passes move the quantize ops themselves (`reorder_ops.py`).
* `AdvanceQuantizeOpAboveDefInBranchPass` hoists one quantize above a tensor whose every path ends in a quantize, even
  where they differ (rule ALWAYS, executorch <= 1.5.1; later versions hoist only identical ones). It looks through the
  ops of `trivially_quantizable_ops_overloadpkt`; where these are slices and selects alone, their elements must be at
  least half of the tensor's. split and chunk stop it, as does any float reader (`reorder_ops.py`, 34-154).
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, Literal

import torch

from ..observers.errors import UnsupportedOptionError
from ..observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, Scheme
from ..observers.rules import BranchRules, Conflict, HoistRule, JoinOutcome, JoinRules, Outcome
from .base import (
    ActivationConfig,
    BackendConfig,
    BiasConfig,
    BiasKind,
    BlockRules,
    EstimatorName,
    OpRules,
    WeightConfig,
)
from .options import factory

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import Quantizer

_LAST_HOISTING_ALWAYS: Final = (1, 5, 1)
_INT16_AFFINE: Final = Scheme(dtype=torch.int16, quant_min=-32768, quant_max=32767)
_MOVED: Final = frozenset(
    {
        "view", "_unsafe_view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "permute",
        "transpose", "t", "numpy_T", "mT", "adjoint", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze",
        "unsqueeze", "atleast_1d", "atleast_2d", "atleast_3d", "expand", "expand_as", "broadcast_to", "unfold",
        "repeat_interleave", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "clone", "contiguous", "dropout",
        "alias", "detach", "lift_fresh",
    }
)  # fmt: skip
"""What is one of the pass's ops once lowered, or nothing at all."""
_SELECTS: Final = frozenset(
    {"slice", "select", "narrow", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind"}
    | {"split", "split_with_sizes", "chunk"}
)
_COVERING: Final = frozenset({"slice", "select", "narrow", "tensor_split", "hsplit", "vsplit", "dsplit"})


def installed_hoist_rule() -> HoistRule:
    """Return the rule of the installed executorch's pass: ALWAYS up to 1.5.1 (and where none is installed)."""
    try:
        found = version("executorch")
    except PackageNotFoundError:
        return HoistRule.ALWAYS
    numbers = tuple(int(n) for n in re.findall(r"\d+", found.split("+")[0])[:3])
    return HoistRule.ALWAYS if numbers <= _LAST_HOISTING_ALWAYS else HoistRule.IDENTICAL


@factory
def cadence(
    *,
    activation: Literal["int8", "int16"] = "int8",
    per_channel: bool = False,
    is_qat: bool = False,
    eps: float = 2.0**-24,
    estimator: EstimatorName | None = None,
    symmetric_weights: bool = False,
    hoist: HoistRule | None = None,
    conflict: Conflict = Conflict.FLOAT,
    max_sharing_loss_db: float = 0.5,
    rest: Quantizer | None = None,
) -> BackendConfig:
    """Return the config for Cadence.

    Args:
        activation: "int8" or "int16", both affine.
        per_channel: must be False: Cadence's kernels take one weight scale per tensor.
        is_qat: for `prepare_qat_pt2e`.
        eps: floor of every scale, in real units per code.
        estimator: "minmax", "moving_average", "histogram" or "percentile"; histogram by default, moving_average in
            QAT.
        symmetric_weights: symmetric weights in linear and addmm too.
        hoist: what the installed compiler does with quantize ops below branches; found out by default.
        conflict: what to do with branches that differ where the compiler hoists always.
        max_sharing_loss_db: what sharing may cost a branch, in dB.
        rest: another quantizer for whatever this config leaves.

    Raises:
        UnsupportedOptionError: for an option that Cadence lacks.
    """
    schemes = {"int8": INT8_AFFINE, "int16": _INT16_AFFINE}
    if per_channel:
        raise UnsupportedOptionError("cadence has per_channel=False only: its kernels take one weight scale per tensor")
    symmetric = replace(INT8_SYMMETRIC, quant_min=-128, eps=eps)
    return BackendConfig(
        name="cadence",
        activation=ActivationConfig(
            scheme=replace(schemes[activation], eps=eps),
            estimator=estimator or ("moving_average" if is_qat else "histogram"),
        ),
        weight=WeightConfig(
            scheme=symmetric if symmetric_weights else replace(INT8_AFFINE, eps=eps),
            conv_scheme=symmetric,
            per_channel=False,
            allow_affine=True,
        ),
        bias=BiasConfig(kind=BiasKind.INT32_DERIVED),
        blocks=BlockRules(
            heads=frozenset({"conv1d", "conv2d", "linear", "addmm"}),
            activations=frozenset({"relu"}),
            activation_heads=frozenset({"conv1d", "conv2d"}),
            residual_heads=frozenset({"add"}),
            residual_activations=frozenset({"relu"}),
        ),
        branches=BranchRules(
            hoist=installed_hoist_rule() if hoist is None else hoist,
            outcomes=(Outcome.SHARED, Outcome.INDEPENDENT, Outcome.FLOAT_ROOT),
            max_sharing_loss_db=max_sharing_loss_db,
            conflict=conflict,
            hoist_through=_MOVED | _COVERING | {"unbind"},
            covering=_COVERING,
        ),
        joins=JoinRules(outcomes=(JoinOutcome.SHARED, JoinOutcome.REQUANTIZE, JoinOutcome.FLOAT)),
        ops=OpRules(
            own=frozenset({"add", "relu", "bmm", "matmul"}),
            shared=_MOVED,
            selects=_SELECTS,
            joins=frozenset({"cat", "max_pool2d"}),
            quantize_movement=False,
        ),
        is_qat=is_qat,
        rest=rest,
    )
