"""XNNPACK, as executorch 1.5.1 runs it: int8 affine activations, symmetric int8 weights, float bias.

Every rule was read in executorch 1.5.1 (paths below are under `executorch/backends/xnnpack/`) and confirmed on the
runtime:

* int8 only: other activation dtypes raise in lowering (`utils/quant_utils.py`, validate_quant_zeropoints).
* A conv or linear is quantized whole or not at all: dequantized input and weight, at most one relu or hardtanh, one
  quantize. With a float output but an int8 weight the lowered program reads codes as floats
  (`partition/config/gemm_configs.py`, get_deps), so a block whose output is left float keeps its weight float too.
* relu and hardtanh fold into conv and linear, relu into add; clamp, and anything behind sub or mul, does not
  (`_passes/fuse_activation_pass.py`, `partition/config/generic_node_configs.py`). Nor does anything behind addmm or mm
  with a plain weight: the partitioner takes the activation in (`gemm_configs.py`, AddmmConfig), but the pass that fuses
  it does not know the op, and the program fails to load.
* cat, views, permutes and max pools need the same qparams on both sides, or the program fails to load.
* The bias stays float here; lowering makes it int32 with scale = input scale * weight scale
  (`operators/quant_params.py`, from_bias).
* Weights per channel: axis 0; transposed convolutions axis 1 and without groups only (`gemm_configs.py`); mm without
  bias per tensor only.
* The bounds of a fused activation are serialized as real numbers, so its output needs no particular zero point
  (`_passes/fuse_activation_pass.py`).
* On the runtime (x86-64): a ratio input scale * weight scale / output scale of 256 or more does not load; a bias
  beyond 2**31 steps of input scale * weight scale overflows in silence; one dequantize that a quantized op and a float
  op (or the graph's output) read does not load, or fails when it runs.
* Scales must be normal float32 numbers (`utils/quant_utils.py`, validate_quant_scales): the default floor of 2**-24 is
  far above that and far below what small activations and folded batch norms need.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

import torch

from ..observers.qparams import INT8_AFFINE, INT8_SYMMETRIC
from ..observers.rules import BranchRules, JoinRules, Outcome
from .base import ActivationConfig, BackendConfig, BlockRules, EstimatorName, OpRules, WeightConfig
from .limits import Limits
from .options import factory

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import Quantizer

_HEADS: Final = frozenset(
    {"conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "linear", "addmm", "mm", "convolution"}
)
_OWN: Final = frozenset({"add", "sub", "mul", "relu", "relu6", "hardtanh", "clamp", "mean", "adaptive_avg_pool2d"})
_SHARED: Final = frozenset(
    {"view", "_unsafe_view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "unsqueeze", "max_pool2d"}
    | {"swapaxes", "swapdims", "movedim", "dropout", "alias", "detach", "clone", "contiguous"}
)

_LIMITS: Final = Limits(
    max_requantize_ratio=256.0,
    bias_bits=32,
    whole_blocks=True,
    uniform_readers=True,
    equal_sides=frozenset({"cat", "concat", "concatenate", "hstack", "vstack", "max_pool2d"})
    | (_SHARED - {"dropout", "alias", "detach", "clone", "contiguous"}),
    activation_dtypes=(torch.int8,),
)


@factory
def xnnpack(
    *,
    activation: Literal["int8", "sym8"] = "int8",
    per_channel: bool = True,
    is_qat: bool = False,
    eps: float = 2.0**-24,
    estimator: EstimatorName | None = None,
    rest: Quantizer | None = None,
) -> BackendConfig:
    """Return the config for XNNPACK.

    Args:
        activation: "int8" (affine) or "sym8" (symmetric int8; a relu is one-sided then).
        per_channel: one weight scale per output channel instead of one per tensor.
        is_qat: for `prepare_qat_pt2e`.
        eps: floor of every scale, in real units per code.
        estimator: "minmax", "moving_average", "histogram" or "percentile"; histogram by default, moving_average in
            QAT.
        rest: another quantizer for whatever this config leaves.

    Raises:
        UnsupportedOptionError: for an activation that XNNPACK lacks.
    """
    schemes = {"int8": INT8_AFFINE, "sym8": replace(INT8_SYMMETRIC, quant_min=-128)}
    return BackendConfig(
        name="xnnpack",
        activation=ActivationConfig(
            scheme=replace(schemes[activation], eps=eps),
            estimator=estimator or ("moving_average" if is_qat else "histogram"),
        ),
        weight=WeightConfig(scheme=replace(INT8_SYMMETRIC, eps=eps), per_channel=per_channel),
        blocks=BlockRules(
            heads=_HEADS,
            activations=frozenset({"relu", "relu6", "hardtanh"}),
            residual_heads=frozenset({"add"}),
            residual_activations=frozenset({"relu"}),
            activation_heads=_HEADS - {"addmm", "mm"},
            per_tensor_heads=frozenset({"mm", "grouped_transposed"}),
            saturation_is_activation=False,
        ),
        branches=BranchRules(outcomes=(Outcome.SHARED, Outcome.INDEPENDENT, Outcome.FLOAT_ROOT)),
        joins=JoinRules(),
        ops=OpRules(
            own=_OWN,
            shared=_SHARED,
            selects=frozenset({"slice", "narrow", "select", "split", "split_with_sizes", "chunk", "unbind"}),
            joins=frozenset({"cat", "concat", "concatenate", "hstack", "vstack"}),
            global_pools_only=True,
        ),
        limits=_LIMITS,
        is_qat=is_qat,
        rest=rest,
    )
