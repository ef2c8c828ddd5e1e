"""What a backend's passes assume, as one frozen value.

A config is data: annotators read it and know no backend. Every field is documented with its unit; an impossible
combination raises when the config is made, not later; `dataclasses.replace` changes one field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import torch
from torchao.quantization.pt2e.quantizer import Quantizer

from ..observers.errors import ConfigError
from ..observers.fields import ALLOWED, check_fields, require_names
from ..observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, Scheme
from ..observers.rules import BranchRules, JoinOutcome, JoinRules
from . import serialize
from .limits import Limits
from .ops import BATCH_NORMS, CLAMPS, ELEMENTWISE, HEADS, JOINS, MOVEMENT, NO_OPS, POOLS, SELECTS
from .rewrites import RewriteName

if TYPE_CHECKING:
    from collections.abc import Iterable

EstimatorName = Literal["minmax", "moving_average", "histogram", "percentile"]
WEIGHT_DTYPES: Final = (torch.int8, torch.uint8, torch.int16)
KNOWN_OPS: Final = frozenset(HEADS) | BATCH_NORMS | NO_OPS | MOVEMENT | SELECTS | POOLS | JOINS | ELEMENTWISE
T = TypeVar("T")


def _names(default: T, allowed: Iterable[str]) -> T:
    """Return a field of canonical names out of those `allowed`."""
    return field(default=default, metadata={ALLOWED: frozenset(allowed)})


class SymmetricActivation(Enum):
    """What becomes of a block's activation where the scheme is symmetric (zero point 0, not quant_min)."""

    SEPARATE = "separate"
    """Not fused: producer and activation are quantized apart."""
    ONE_SIDED = "one_sided"
    """Fused; the output uses the codes from 0 up, so that quant_min == zero_point == 0."""


class Spectra(Enum):
    """What becomes of squares that feed a logarithm, a root or a reciprocal, where int8 costs 15 to 40 dB."""

    KEEP = "keep"
    """Quantized like anything else; the user is told."""
    FLOAT = "float"
    """Left float."""
    WIDE = "wide"
    """Quantized to symmetric int16."""


class BiasKind(Enum):
    """How a bias is stored."""

    FLOAT = "float"
    """Not annotated: the backend quantizes it by itself, or keeps it float."""
    INT32_DERIVED = "int32_derived"
    """int32 with scale = input scale * weight scale and zero point 0."""


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """How activations are quantized.

    Args:
        scheme: codes, symmetry and scale floor.
        estimator: how a range is drawn from batches: "minmax", "moving_average", "histogram" (least squared error)
            or "percentile" (for rare wild values that carry nothing).
        percent: the share of values that "percentile" keeps at each end, in percent.
        averaging_constant: weight of the newest batch in the moving average, 0 to 1.
    """

    scheme: Scheme = INT8_AFFINE
    estimator: EstimatorName = "histogram"
    averaging_constant: float = 0.01
    percent: float = 99.9

    def __post_init__(self) -> None:
        check_fields(self, "activation")
        if not 0.0 < self.averaging_constant <= 1.0:
            raise ConfigError(f"activation.averaging_constant must be in (0, 1], got {self.averaging_constant}")
        if not 50.0 < self.percent <= 100.0:
            raise ConfigError(f"activation.percent must be in (50, 100], got {self.percent}")


@dataclass(frozen=True, kw_only=True)
class WeightConfig:
    """How weights are quantized: by their own values, never by calibration data.

    Args:
        scheme: codes, symmetry and scale floor.
        per_channel: one scale per output channel instead of one per tensor.
        conv_scheme: the scheme of convolutions where it differs from that of the other ops, or None.
        allow_affine: the backend takes weights with a zero point.
        search: scale each channel's range by the factor near 1 that serves the output best; False keeps min and max.
            Per-channel weights only; not in QAT, where weights move.
    """

    scheme: Scheme = INT8_SYMMETRIC
    per_channel: bool = True
    conv_scheme: Scheme | None = None
    allow_affine: bool = False
    search: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "weight")
        affine = not self.scheme.symmetric or not (self.conv_scheme or self.scheme).symmetric
        if affine and not self.allow_affine:
            raise ConfigError("weight.scheme is affine, but this backend takes symmetric weights only (zero point 0)")
        for scheme in filter(None, (self.scheme, self.conv_scheme)):
            if scheme.dtype not in WEIGHT_DTYPES:
                listed = ", ".join(str(each) for each in WEIGHT_DTYPES)
                raise ConfigError(f"weights must be of {listed}, got a scheme of {scheme.dtype}")


@dataclass(frozen=True, kw_only=True)
class BiasConfig:
    """How biases are quantized."""

    kind: BiasKind = BiasKind.FLOAT

    def __post_init__(self) -> None:
        check_fields(self, "bias")


@dataclass(frozen=True, kw_only=True)
class BlockRules:
    """What the backend fuses into one block.

    Args:
        heads: weighted ops that it runs quantized.
        activations: clamping ops that it folds into a head's output. Before annotation clamps are spelled as one
            op each: relu for [0, inf), hardtanh for two finite ends, clamp for one end.
        residual_heads: elementwise ops whose output takes an activation too (add + relu).
        residual_activations: clamping ops that it folds into these.
        activation_heads: heads that an activation folds into; None stands for all of `heads`.
        per_tensor_heads: heads that take one weight scale per tensor only; "grouped_transposed" stands for
            transposed convolutions with groups.
        through: ops that may stand between head and activation and vanish with it.
        symmetric_activation: what to do with the activation where the scheme is symmetric.
        saturation_is_activation: the backend drops a folded activation, and the output's saturation must stand for
            it; False where it keeps the activation's bounds.
        erase_activations: erase a folded activation in `convert_pt2e`, where the output's saturation is its clamp:
            for a backend that would not look for it behind every head, or knows fewer spellings.
    """

    heads: frozenset[str] = _names(frozenset(HEADS), HEADS)
    activations: frozenset[str] = _names(CLAMPS, CLAMPS)
    residual_heads: frozenset[str] = _names(frozenset({"add", "sub", "mul"}), ELEMENTWISE)
    residual_activations: frozenset[str] = _names(CLAMPS, CLAMPS)
    activation_heads: frozenset[str] | None = _names(None, HEADS)
    per_tensor_heads: frozenset[str] = _names(frozenset(), {*HEADS, "grouped_transposed"})
    through: frozenset[str] = _names(NO_OPS, NO_OPS | MOVEMENT)
    symmetric_activation: SymmetricActivation = SymmetricActivation.ONE_SIDED
    saturation_is_activation: bool = True
    erase_activations: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "blocks")


@dataclass(frozen=True, kw_only=True)
class FixedQParams:
    """An op whose output qparams the backend dictates.

    Args:
        op: canonical name.
        scale: real units per code.
        zero_point: the code of 0.
    """

    op: str = field(metadata={ALLOWED: KNOWN_OPS})
    scale: float
    zero_point: int

    def __post_init__(self) -> None:
        check_fields(self, "fixed")
        if not 0.0 < self.scale < math.inf:
            raise ConfigError(f"fixed.scale of {self.op} must be positive and finite, got {self.scale}")


@dataclass(frozen=True, kw_only=True)
class OpRules:
    """Which of the remaining ops the backend runs quantized, and what they do to qparams.

    Args:
        own: inputs quantized, output with qparams of its own.
        shared: values moved, repeated or picked: output qparams are the input's.
        selects: as `shared`, but a part is read: a branch begins here.
        joins: several inputs become one output (a pool with one input is one too, where movement is not quantized).
        fixed: output qparams that the backend dictates.
        quantize_movement: annotate both sides of `shared` and `selects` ops; False leaves them in float between
            a dequantize above and a quantize below (for backends whose passes move the quantize themselves).
        constants: lift scalar operands of add, sub and mul to constants, which are quantized as activations.
        spectra: what becomes of squares that feed a logarithm, a root or a reciprocal.
        table_headroom: the most headroom of what a logarithm, a root or a reciprocal reads, or None for the scheme's:
            where the backend computes them from a table of few entries with straight lines between them, each entry
            that headroom takes is missed where these functions are steep. Only beyond the largest value seen: where
            the estimator averages or cuts, the scheme's headroom stays.
        global_pools_only: mean and adaptive_avg_pool2d are quantized only where they reduce H and W of [N, C, H, W]
            to 1 x 1.
    """

    own: frozenset[str] = _names(ELEMENTWISE, KNOWN_OPS)
    shared: frozenset[str] = _names(MOVEMENT | NO_OPS | POOLS, KNOWN_OPS)
    selects: frozenset[str] = _names(SELECTS, SELECTS)
    joins: frozenset[str] = _names(JOINS, JOINS | ELEMENTWISE | POOLS)
    fixed: tuple[FixedQParams, ...] = ()
    quantize_movement: bool = True
    constants: bool = True
    spectra: Spectra = Spectra.FLOAT
    table_headroom: float | None = None
    global_pools_only: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "ops")
        if self.table_headroom is not None and not self.table_headroom >= 1.0:
            raise ConfigError(f"ops.table_headroom must be at least 1, got {self.table_headroom}")
        fixed = [each.op for each in self.fixed]
        require_names("ops.fixed", fixed, self.own)
        listed = [op for names in (self.own, self.shared, self.selects, self.joins) for op in names]
        twice = sorted({op for op in listed if listed.count(op) > 1} | {op for op in fixed if fixed.count(op) > 1})
        if twice:
            raise ConfigError(f"ops lists {', '.join(twice)} under two rules, or one twice; keep one")


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """All that quantmark knows of one backend.

    Args:
        name: the backend, as `configs.<name>` makes it.
        activation: how activations are quantized.
        weight: how weights are quantized.
        bias: how biases are quantized.
        blocks: what is fused.
        branches: how branch families are treated.
        joins: how joins are treated.
        ops: which other ops are quantized.
        limits: what the runtime can't do although lowering takes it (for the checks).
        marker: a key under `node.meta["custom"]` by which the backend's partitioner knows a quantized node, or None.
        rewrite: what the backend's own package is to take apart before annotation (see `rewrites.py`), or None.
        is_qat: place fake-quantize modules instead of observers.
        on_uncalibrated: "error" raises where an observer saw no data, or NaN/inf; "warn" warns, leaves a tensor
            without data float and goes by the finite values of the others.
        rest: another quantizer for whatever is left, run after ours; None leaves it float.
    """

    name: str = "custom"
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    weight: WeightConfig = field(default_factory=WeightConfig)
    bias: BiasConfig = field(default_factory=BiasConfig)
    blocks: BlockRules = field(default_factory=BlockRules)
    branches: BranchRules = field(default_factory=BranchRules)
    joins: JoinRules = field(default_factory=JoinRules)
    ops: OpRules = field(default_factory=OpRules)
    limits: Limits = field(default_factory=Limits)
    marker: str | None = None
    rewrite: RewriteName | None = None
    is_qat: bool = False
    on_uncalibrated: Literal["error", "warn"] = "error"
    rest: Quantizer | None = None

    def __post_init__(self) -> None:
        check_fields(self, "")
        if not self.name:
            raise ConfigError("a config needs a name")
        overlap = self.blocks.heads & (self.ops.shared | self.ops.selects | self.ops.joins)
        if overlap:
            raise ConfigError(f"blocks.heads and ops both claim {', '.join(sorted(overlap))}; keep one")
        for name in ("hoist_through", "covering"):
            require_names(f"branches.{name}", getattr(self.branches, name), MOVEMENT | SELECTS | NO_OPS)
        scheme, dtypes = self.activation.scheme, self.limits.activation_dtypes
        if dtypes and scheme.dtype not in dtypes:
            listed = ", ".join(map(str, dtypes))
            raise ConfigError(f"{self.name} runs activations of {listed}, but activation.scheme is of {scheme.dtype}")
        if JoinOutcome.UNFOLD in self.joins.outcomes and not self.blocks.erase_activations:
            raise ConfigError("joins.outcomes lists UNFOLD, which needs blocks.erase_activations")
        for fixed in self.ops.fixed:
            if not scheme.quant_min <= fixed.zero_point <= scheme.quant_max:
                raise ConfigError(
                    f"ops.fixed gives {fixed.op} the zero point {fixed.zero_point}, but the codes of "
                    f"activation.scheme are {scheme.quant_min}..{scheme.quant_max}"
                )

    @property
    def table_headroom(self) -> float | None:
        """`ops.table_headroom`, where the estimator's ranges hold all that was seen (with so many codes)."""
        return self.ops.table_headroom if self.activation.estimator in {"minmax", "histogram"} else None

    def with_scheme(self, scheme: Scheme) -> BackendConfig:
        """Return this config with another activation scheme."""
        return replace(self, activation=replace(self.activation, scheme=scheme))

    def to_json(self) -> str:
        """Return the config as JSON text, one key per field, sorted.

        Raises:
            ConfigError: if `rest` holds a quantizer, which is an object and no data.
        """
        return serialize.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> BackendConfig:
        """Return the config that `to_json` wrote.

        Raises:
            ConfigError: naming the JSON path of what is wrong ("$.blocks.heads[3]") and what may stand there.
        """
        return serialize.loads(cls, text)
