"""What each aten operator does to a range: support tables as data, the same for every backend.

Names are canonical: without overload, trailing underscore (in-place) or `_copy` (functionalized). So one entry
stands for every spelling: `relu` for aten.relu.default and aten.relu_.default, `slice` for slice.Tensor and
slice_copy.Tensor. A backend's config says which of these it runs quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class HeadRule:
    """Where a weighted op keeps its operands: indices into the schema's arguments.

    `channel_axis` is the axis of the weight that runs over output channels.
    """

    input: int
    weight: int
    bias: int | None
    channel_axis: int
    transposed: bool = False


HEADS: Final[dict[str, HeadRule]] = {
    **{name: HeadRule(0, 1, 2, 0) for name in ("conv1d", "conv2d", "conv3d", "linear")},
    **{
        name: HeadRule(0, 1, 2, 1, transposed=True)
        for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    },
    "convolution": HeadRule(0, 1, 2, 0),  # its `transposed` argument is looked at
    "addmm": HeadRule(1, 2, 0, 1),
    "mm": HeadRule(0, 1, None, 1),
    "matmul": HeadRule(0, 1, None, 1),
}

BATCH_NORMS: Final = frozenset({"batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"})

CLAMPS: Final = frozenset({"relu", "relu6", "hardtanh", "clamp", "clip", "clamp_min", "clamp_max", "threshold"})
"""Activations that only clamp: they can disappear into the saturation of their producer's output."""

NO_OPS: Final = frozenset(
    {
        "dropout",
        "feature_dropout",
        "alpha_dropout",
        "native_dropout",
        "alias",
        "detach",
        "lift_fresh",
        "clone",
        "contiguous",
    }
)
"""The value passes through unchanged and unmoved (dropout: in eval mode)."""

MOVEMENT: Final = frozenset(
    {
        "view", "_unsafe_view", "reshape", "view_as", "flatten", "unflatten", "permute", "transpose", "t", "numpy_T",
        "mT", "adjoint", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze", "expand", "expand_as",
        "broadcast_to", "repeat", "repeat_interleave", "tile", "flip", "roll", "rot90", "pixel_shuffle",
        "pixel_unshuffle", "channel_shuffle", "unfold", "im2col", "as_strided", "gather", "index", "ravel",
        "reshape_as", "atleast_1d", "atleast_2d", "atleast_3d",
    }
)  # fmt: skip
"""Values are moved or repeated, never changed: qparams pass through."""

SELECTS: Final = frozenset(
    {
        "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "unbind", "index_select",
        "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "hsplit", "vsplit", "dsplit", "diagonal",
    }
)  # fmt: skip
"""A part of the tensor is read: a branch begins here."""

POOLS: Final = frozenset(
    {
        "max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
        "adaptive_max_pool1d", "adaptive_max_pool2d", "amax", "amin",
    }
)  # fmt: skip
"""Each output value is one of the input's values: qparams pass through."""

JOINS: Final = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"})
"""Several tensors become one."""

ELEMENTWISE: Final = frozenset(
    {
        "add", "sub", "rsub", "mul", "div", "neg", "abs", "maximum", "minimum", "where", "masked_fill", "mean", "sum",
        "softmax", "_softmax", "log_softmax", "sigmoid", "tanh", "hardswish", "hardsigmoid", "silu", "gelu",
        "leaky_relu",
        "prelu", "elu", "softplus", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "pow", "layer_norm",
        "native_layer_norm", "group_norm", "instance_norm", "batch_norm", "bmm", "matmul", "mm", "avg_pool1d",
        "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
        "upsample_nearest2d", "upsample_bilinear2d", "pad", "constant_pad_nd", "glu", "sin", "cos", "erf", "floor",
        "ceil",
    }
) | CLAMPS  # fmt: skip
"""Inputs quantized, output with qparams of its own."""
