"""What a backend's runtime can't do although its lowering takes it: for the checks, which name it before it happens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..observers.errors import ConfigError
from ..observers.fields import ALLOWED, check_fields
from .ops import JOINS, MOVEMENT, NO_OPS, POOLS, SELECTS


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a backend's runtime; the defaults are none.

    Args:
        max_requantize_ratio: input scale * weight scale / output scale of a weighted op must be below it.
        bias_bits: a float bias becomes a code of so many bits with scale = input scale * weight scale, once per
            tensor (of the first op that reads it).
        whole_blocks: a weighted op with a quantized weight must have a quantized input and one quantize as its only
            reader, or its kernel reads codes as if they were real values.
        uniform_readers: of the ops that read one dequantize, all must run quantized, or none.
        equal_sides: ops (canonical names) whose inputs and output must have the same qparams.
        activation_dtypes: dtypes of quantized activations that kernels take; None: any.
    """

    max_requantize_ratio: float | None = None
    bias_bits: int | None = None
    whole_blocks: bool = False
    uniform_readers: bool = False
    equal_sides: frozenset[str] = field(
        default=frozenset(), metadata={ALLOWED: MOVEMENT | SELECTS | NO_OPS | POOLS | JOINS}
    )
    activation_dtypes: tuple[torch.dtype, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "limits")
        if self.max_requantize_ratio is not None and not self.max_requantize_ratio > 0:
            raise ConfigError(f"limits.max_requantize_ratio must be > 0, got {self.max_requantize_ratio}")
        if self.bias_bits is not None and not 2 <= self.bias_bits <= 64:
            raise ConfigError(f"limits.bias_bits must be 2 to 64, got {self.bias_bits}")
