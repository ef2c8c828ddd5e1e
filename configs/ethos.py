"""The Ethos-U NPUs, as executorch 1.5.1 lowers to them and Vela 5.1 compiles for them.

All are TOSA's integer profile, whose rules stand in `arm.py`, with the extensions int16 and int4
(`backends/arm/ethosu/compile_spec.py`, _tosa_spec_for_target). What differs is data: the ops that a device lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .arm import ActivationName, integer_config
from .base import BackendConfig, EstimatorName
from .options import factory

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import Quantizer

    from .rewrites import RewriteName


@dataclass(frozen=True, kw_only=True)
class Device:
    """What tells one NPU from another.

    Args:
        rewrite: the TOSA profile that its compile spec asks for.
        lacks: ops that its partitioner leaves outside, whatever their arguments.
        lacks_in_16_bit: ops that it leaves outside where activations are int16.
    """

    rewrite: RewriteName
    lacks: frozenset[str] = frozenset()
    lacks_in_16_bit: frozenset[str] = frozenset()


U55: Final = Device(
    rewrite="ethos_u55",
    # backends/arm/operator_support/ethos_u55_support.py, EthosU55NotSupported: CONV3D, GATHER, RESIZE, SELECT
    lacks=frozenset({"conv3d", "gather", "index", "index_select", "upsample_bilinear2d", "where"}),
    # the same, EthosU55DtypeSupport; and Vela 5.1.0 stops at a transposed convolution of int16
    lacks_in_16_bit=frozenset({"mm", "bmm", "matmul", "conv_transpose2d"}),
)
U65: Final = U55  # backends/arm/ethosu/compile_spec.py: "u65" adds +u55 too
U85: Final = Device(rewrite="ethos_u85")


@factory
def ethos_u55(
    *,
    activation: ActivationName = "int8",
    per_channel: bool = True,
    is_qat: bool = False,
    eps: float = 2.0**-16,
    estimator: EstimatorName | None = None,
    weight_bits: int = 8,
    int16: bool = True,
    clamp_at_joins: bool = True,
    rest: Quantizer | None = None,
) -> BackendConfig:
    """Return the config for an Ethos-U55.

    Args:
        activation: "int8" (affine), "sym8" (symmetric int8) or "int16" (symmetric).
        per_channel: one weight scale per output channel instead of one per tensor.
        is_qat: for `prepare_qat_pt2e`.
        eps: floor of every scale, in real units per code.
        estimator: "minmax", "moving_average", "histogram" or "percentile"; histogram by default, moving_average in
            QAT.
        weight_bits: 8 or 4.
        int16: let a root of very unlike branches be int16 where activations are int8.
        clamp_at_joins: an activation that meets signed values at a join becomes a CLAMP of its own there and shares
            their qparams, which spares 10 % of the cycles of a small net; False keeps it folded and requantizes it.
        rest: another quantizer for whatever this config leaves.

    Raises:
        UnsupportedOptionError: for an option that the device lacks.
    """
    return integer_config(
        "ethos_u55",
        activation=activation,
        per_channel=per_channel,
        is_qat=is_qat,
        eps=eps,
        estimator=estimator,
        weight_bits=weight_bits,
        int16=int16,
        clamp_at_joins=clamp_at_joins,
        rewrite=U55.rewrite,
        rest=rest,
        lacks=_lacks(U55, activation),
    )


@factory
def ethos_u65(
    *,
    activation: ActivationName = "int8",
    per_channel: bool = True,
    is_qat: bool = False,
    eps: float = 2.0**-16,
    estimator: EstimatorName | None = None,
    weight_bits: int = 8,
    int16: bool = True,
    clamp_at_joins: bool = True,
    rest: Quantizer | None = None,
) -> BackendConfig:
    """Return the config for an Ethos-U65: executorch lowers to it as to an Ethos-U55, whose options it has."""
    return integer_config(
        "ethos_u65",
        activation=activation,
        per_channel=per_channel,
        is_qat=is_qat,
        eps=eps,
        estimator=estimator,
        weight_bits=weight_bits,
        int16=int16,
        clamp_at_joins=clamp_at_joins,
        rewrite=U65.rewrite,
        rest=rest,
        lacks=_lacks(U65, activation),
    )


@factory
def ethos_u85(
    *,
    activation: ActivationName = "int8",
    per_channel: bool = True,
    is_qat: bool = False,
    eps: float = 2.0**-16,
    estimator: EstimatorName | None = None,
    weight_bits: int = 8,
    int16: bool = True,
    clamp_at_joins: bool = True,
    rest: Quantizer | None = None,
) -> BackendConfig:
    """Return the config for an Ethos-U85, which runs the whole profile; its options are those of `ethos_u55`."""
    return integer_config(
        "ethos_u85",
        activation=activation,
        per_channel=per_channel,
        is_qat=is_qat,
        eps=eps,
        estimator=estimator,
        weight_bits=weight_bits,
        int16=int16,
        clamp_at_joins=clamp_at_joins,
        rewrite=U85.rewrite,
        rest=rest,
        lacks=_lacks(U85, activation),
    )


def _lacks(device: Device, activation: ActivationName) -> frozenset[str]:
    return device.lacks | (device.lacks_in_16_bit if activation == "int16" else frozenset())
