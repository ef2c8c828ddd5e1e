"""Arm: TOSA's integer profiles, as executorch 1.5.1 lowers to them. `ethos.py` has the NPUs, which are such profiles.

Every rule was read in executorch 1.5.1 (paths below are under `executorch/backends/arm/`):

* int8: affine activations, symmetric int8 weights per channel or per tensor, int32 bias with scale = input scale *
  weight scale (`quantizer/arm_quantizer.py`, get_symmetric_quantization_config). 16 bit: symmetric int16 activations
  (get_symmetric_a16w8_quantization_config). 4 bit: weights -7..7 (get_symmetric_a8w4_quantization_config).
* relu, and hardtanh from 0 up, disappear into the rescale behind a convolution or linear; what is left of them is the
  output's zero point and codes (`_passes/fuse_quantized_activation_pass.py`). The activation contract decides
  correctness. Behind add and the like, and of other clamps, the pass fuses nothing: a float relu between add and
  quantize stays outside. So every folded activation is erased when the model is converted.
* mean, softmax, layer norm and others are taken apart before annotation (`_passes/arm_pass_manager.py`,
  transform_for_annotation_pipeline): what is left whole then has no qparams inside, and doesn't lower.
* Data movement, CONCAT, pad, pools, means, relu and clamp don't rescale: both sides have one qparams; a requantize
  before a CONCAT is a RESCALE of its own (`quantizer/quantization_annotator.py`, _one_to_one_shared_input_qspec). That
  RESCALE is 10 % of the cycles of two convolutions and a cat on an Ethos-U, where a CLAMP with one qparams on both
  sides costs nothing behind a convolution (Vela 5.1 puts it there).
* An integer-only graph has no float op inside: a packed graph input is quantized branch by branch outside the
  delegate; a computed root can be int16 where the int16 extension is there, and is shared otherwise.
* An int16 TABLE has 513 entries and interpolates between them (`_passes/insert_table_ops.py`): floor and ceil have no
  steps there (ceil: 24 dB on the reference model, 90 dB converted).
* A transposed convolution with groups takes one weight scale per tensor only
  (`operator_support/convolution_support.py`, _check_transposed_support).
* The partitioner takes a node for quantized only if its `meta["custom"]` carries Arm's annotation info
  (`common/annotation_meta.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from ..observers.errors import UnsupportedOptionError
from ..observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, INT16_SYMMETRIC, Scheme
from ..observers.rules import BranchRules, JoinOutcome, JoinRules, Outcome
from .base import (
    ActivationConfig,
    BackendConfig,
    BiasConfig,
    BiasKind,
    BlockRules,
    EstimatorName,
    OpRules,
    Spectra,
    SymmetricActivation,
    WeightConfig,
)
from .options import factory

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import Quantizer

    from .rewrites import RewriteName

ActivationName = Literal["int8", "sym8", "int16"]
_MARKER: Final = "_arm_annotation_info"
_HEADS: Final = frozenset({"conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear"})
_OWN: Final = frozenset(
    {"add", "sub", "mul", "mm", "bmm", "matmul", "abs", "exp", "log", "reciprocal", "rsqrt", "sigmoid", "tanh", "sum"}
    | {"hardsigmoid", "hardswish", "leaky_relu", "elu", "gelu", "silu", "pow", "sin", "cos", "erf", "floor", "ceil"}
    | {"minimum", "maximum"}
)
_SHARED: Final = frozenset(
    {"squeeze", "unsqueeze", "reshape", "repeat", "expand", "view", "view_as", "_unsafe_view", "transpose", "moveaxis"}
    | {"movedim", "t", "tile", "flip", "contiguous", "unflatten", "permute", "flatten", "dropout", "alias", "clone"}
    | {"detach", "pixel_shuffle", "pixel_unshuffle", "max_pool2d", "amax", "amin"}
    | {"relu", "relu6", "hardtanh", "clamp", "mean", "avg_pool2d", "adaptive_avg_pool2d", "pad", "gather"}
    | {"upsample_nearest2d", "upsample_bilinear2d", "index", "repeat_interleave"}
)
_SELECTS: Final = frozenset(
    {"slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "index_select"}
)
_HEADROOM: Final = 2.0  # 16 bit: a bit of resolution costs nothing, a value that calibration did not see saturates
_TABLE_HEADROOM: Final = 1.5  # log, rsqrt, reciprocal: at 2 a table lacks entries, at 1.25 unseen values saturate
_MAX_IDLE_LOSS_DB: Final = 24.1  # four bits: only integers are moved inside the delegate, read by a quantized op or not
_STEPS: Final = frozenset({"floor", "ceil"})
_JOINS: Final = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "where"})


@factory
def arm_tosa(
    *,
    activation: ActivationName = "int8",
    per_channel: bool = True,
    is_qat: bool = False,
    eps: float = 2.0**-16,
    estimator: EstimatorName | None = None,
    weight_bits: int = 8,
    int16: bool | None = None,
    clamp_at_joins: bool = False,
    rest: Quantizer | None = None,
) -> BackendConfig:
    """Return the config for a TOSA integer profile.

    Args:
        activation: "int8" (affine), "sym8" (symmetric int8) or "int16" (symmetric).
        per_channel: one weight scale per output channel instead of one per tensor.
        is_qat: for `prepare_qat_pt2e`.
        eps: floor of every scale, in real units per code.
        estimator: "minmax", "moving_average", "histogram" or "percentile"; histogram by default, moving_average in
            QAT.
        weight_bits: 8 or 4.
        int16: the target has the int16 extension, so that a root can be widened; by default where activation is
            "int16".
        clamp_at_joins: an activation that meets signed values at a join becomes a CLAMP of its own there and shares
            their qparams, instead of staying folded into its block and being requantized.
        rest: another quantizer for whatever this config leaves.

    Raises:
        UnsupportedOptionError: for an option that TOSA lacks.
    """
    wide = activation == "int16" if int16 is None else int16
    return integer_config(
        "arm_tosa",
        activation=activation,
        per_channel=per_channel,
        is_qat=is_qat,
        eps=eps,
        estimator=estimator,
        weight_bits=weight_bits,
        int16=wide,
        clamp_at_joins=clamp_at_joins,
        rewrite="tosa_int16" if activation == "int16" or wide else "tosa",
        rest=rest,
    )


def integer_config(
    name: str,
    *,
    activation: ActivationName,
    per_channel: bool,
    is_qat: bool,
    eps: float,
    estimator: EstimatorName | None,
    weight_bits: int,
    int16: bool,
    clamp_at_joins: bool,
    rewrite: RewriteName,
    rest: Quantizer | None,
    lacks: frozenset[str] = frozenset(),
) -> BackendConfig:
    """Return the config of one of TOSA's integer profiles, without the ops that it `lacks`."""
    schemes = {"int8": INT8_AFFINE, "sym8": INT8_SYMMETRIC, "int16": replace(INT16_SYMMETRIC, headroom=_HEADROOM)}
    weights = {8: INT8_SYMMETRIC, 4: Scheme(quant_min=-7, quant_max=7, symmetric=True)}
    if weight_bits not in weights:
        raise UnsupportedOptionError(f"{name} has weight_bits=8 or 4, not {weight_bits!r}")
    wide = int16 and activation != "int16"
    clamps = (JoinOutcome.UNFOLD,) if clamp_at_joins else ()
    lacks |= _STEPS if activation == "int16" else frozenset()
    return BackendConfig(
        name=name,
        activation=ActivationConfig(
            scheme=replace(schemes[activation], eps=eps),
            estimator=estimator or ("moving_average" if is_qat else "histogram"),
        ),
        weight=WeightConfig(scheme=replace(weights[weight_bits], eps=eps), per_channel=per_channel),
        bias=BiasConfig(kind=BiasKind.INT32_DERIVED),
        blocks=BlockRules(
            heads=_HEADS - lacks,
            residual_heads=frozenset({"add", "sub", "mul"}),
            erase_activations=True,
            per_tensor_heads=frozenset({"grouped_transposed"}),
            symmetric_activation=SymmetricActivation.SEPARATE,
        ),
        branches=BranchRules(
            outcomes=(Outcome.SHARED, Outcome.INDEPENDENT, *([Outcome.WIDE_ROOT] if wide else [])),
            max_float_loss_db=_MAX_IDLE_LOSS_DB,
        ),
        joins=JoinRules(outcomes=(JoinOutcome.SHARED, *clamps, JoinOutcome.REQUANTIZE)),
        ops=OpRules(
            own=_OWN - lacks,
            shared=_SHARED - lacks,
            selects=_SELECTS - lacks,
            joins=_JOINS - lacks,
            spectra=Spectra.WIDE if wide else Spectra.KEEP,
            table_headroom=_TABLE_HEADROOM,
        ),
        marker=_MARKER,
        rewrite=rewrite,
        is_qat=is_qat,
        rest=rest,
    )
