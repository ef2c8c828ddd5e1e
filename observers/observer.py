"""The observers that torchao places: they gather a range, and ask their plan for qparams.

An observer does not decide by itself. It belongs to a *component*: the part of the plan whose cells can end up
with common qparams. When qparams are asked for, the component is resolved from what all of its observers saw:

    observer.calculate_qparams() -> component.assignment(cell) -> resolve(plan, ranges of all its observers)

All tensors are registered buffers; the component is plain Python and travels with `copy.deepcopy` and pickling.
"""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Final, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torchao.quantization.pt2e.observer import ObserverBase

from .errors import InputError, NonFiniteError, QuantmarkError, SharingConflictError, UncalibratedError
from .estimators import Estimator, KeepsDtypes, MinMaxEstimator
from .fields import require
from .plan import Plan
from .qparams import QParams, Scheme, choose_channel_qparams, choose_qparams
from .ranges import Range
from .resolution import Assignment, Resolution, resolve
from .weights import channel_ranges

OnUncalibrated = Literal["error", "warn"]
TOLERATE: Final = 'use dataclasses.replace(config, on_uncalibrated="warn")'
_BFLOAT16_ROUNDING: Final = 2.0**-8  # by so much of itself a bound may move when it is rounded to the model's dtype


class UncalibratedWarning(UserWarning):
    """A tensor was left float because its observer saw no data, or had NaN/inf left out (`on_uncalibrated="warn"`)."""


class Component:
    """A part of a plan that is decided together, with the observers of its cells.

    Args:
        plan: cells, families and joins that hang together.
        on_uncalibrated: "error" raises where an observer saw no data or NaN/inf; "warn" leaves the cell float, or goes
            by the finite values.
        registry: all observers of the model, so that an error can name every one that saw no data.
    """

    def __init__(
        self, plan: Plan, on_uncalibrated: OnUncalibrated = "error", registry: list[RangeObserver] | None = None
    ) -> None:
        self.plan = plan
        self.on_uncalibrated = on_uncalibrated
        self.observers: dict[str, RangeObserver] = {}
        self.registry = registry if registry is not None else []
        self.frozen: Resolution | None = None
        self._resolved: Resolution | None = None
        self._resolved_parts: dict[int, Resolution] = {}
        self._warned: set[str] = set()

    @cached_property
    def _parts(self) -> tuple[Plan, ...]:
        return self.plan.components(following=False)

    @cached_property
    def _part_of(self) -> dict[str, int]:
        return {name: index for index, part in enumerate(self._parts) for name in part.cells}

    @property
    def tolerant(self) -> bool:
        """Whether a tensor without data, or with some that is not finite, is no error."""
        return self.on_uncalibrated == "warn"

    def add(self, observer: RangeObserver) -> None:
        """Take in the observer of a cell."""
        self.observers[observer.cell.name] = observer
        self.registry.append(observer)
        self.touch(observer.cell.name)

    def touch(self, cell: str) -> None:
        """Note that the observer of a cell changed, so that the next question is answered afresh."""
        self._resolved = None
        if self._resolved_parts:
            self._resolved_parts.pop(self._part_of[cell], None)

    def freeze(self) -> None:
        """Keep today's decisions, whatever is observed from now on (for the end of a training)."""
        self.frozen = self.resolution()

    def resolution(self) -> Resolution:
        """Return the decisions that follow from what was observed so far."""
        if self.frozen:
            return self.frozen
        if self._resolved is None:
            self._resolved = self._resolve(self.plan)
        return self._resolved

    def _resolve(self, plan: Plan) -> Resolution:
        observers = {name: self.observers[name] for name in plan.cells if name in self.observers}
        ranges = {name: r for name, observer in observers.items() if (r := observer.known_range())}
        exact = {name: exact_range(observers[name].estimator) or r for name, r in ranges.items()}
        return resolve(plan, ranges, exact)

    def _assigned(self, cell: str) -> Assignment:
        """Return what `resolution` assigns to a cell, from the part of the plan that bears on it alone.

        In training every fake-quantize asks at every step: resolving the whole plan each time would cost its square.
        """
        if self.frozen:
            return self.frozen.assignments.get(cell) or Assignment(cell, None)
        follows = self.plan.cells[cell].follows & self.plan.cells.keys()
        if any(self._assigned(each).qparams is None for each in follows):
            return Assignment(cell, None)
        index = self._part_of[cell]
        if index not in self._resolved_parts:
            self._resolved_parts[index] = self._resolve(self._parts[index])
        return self._resolved_parts[index].assignments.get(cell) or Assignment(cell, None)

    def assignment(self, observer: RangeObserver) -> Assignment:
        """Return what the observer's cell ends up with.

        Raises:
            UncalibratedError: if it saw no data and `on_uncalibrated` is "error".
            NonFiniteError: if it saw NaN or infinity and `on_uncalibrated` is "error".
            SharingConflictError: if it saw values that its activation can't write.
        """
        trouble = observer.trouble()
        if trouble is not None:
            if not self.tolerant or isinstance(trouble, SharingConflictError):
                raise trouble
            if observer.cell.name not in self._warned:
                self._warned.add(observer.cell.name)
                done = "left float" if observer.known_range() is None else "went by the finite values"
                warnings.warn(f"{done}: {trouble}", UncalibratedWarning, stacklevel=3)
        return self._assigned(observer.cell.name)


class RangeObserver(KeepsDtypes, ObserverBase):
    """Observe one cell with one range for the whole tensor.

    Args:
        dtype, quant_min, quant_max, qscheme, is_dynamic: as torchao passes them from the spec.
        component: the part of the plan that decides.
        cell: name of the cell in the component's plan.
        estimator: how a range is drawn from batches; min-max if None.
        preset: an estimator that has seen the data already (from a `RangeTable`), or None.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        quant_min: int,
        quant_max: int,
        qscheme: torch.qscheme,
        is_dynamic: bool = False,
        *,
        component: Component,
        cell: str,
        estimator: Estimator | None = None,
        preset: Estimator | None = None,
    ) -> None:
        super().__init__(dtype=dtype, is_dynamic=is_dynamic)
        self.quant_min, self.quant_max, self.qscheme = quant_min, quant_max, qscheme
        self.component = component
        self.cell = component.plan.cells[cell]
        self.estimator = estimator if estimator is not None else MinMaxEstimator()
        self.preset = preset is not None
        self._known: tuple[int, Range | None] | None = None
        self._seen = 0
        component.add(self)
        if preset is not None:
            self.fill(preset)

    @property
    def scheme(self) -> Scheme:
        """How the cell is turned into integers, unless a decision widens it."""
        return self.cell.scheme

    def forward(self, x: Tensor) -> Tensor:
        """Take in one batch and return it unchanged; empty and non-float tensors are passed over.

        So are fake ones: `scan` runs its body on them once, to know the shapes. Once frozen, it takes in nothing.
        """
        known = self.preset or self.component.frozen
        if not known and x.is_floating_point() and not isinstance(x, FakeTensor) and x.numel():
            self.estimator.update(x.detach())
            self._note_change()
        return x

    def fill(self, estimator: Estimator) -> None:
        """Take over what another estimator saw, instead of being calibrated."""
        self.estimator.absorb(estimator)
        self._note_change()

    def known_range(self) -> Range | None:
        """Return the range observed so far, or None where there is none to speak of."""
        if self._known is None or self._known[0] != self._seen:
            found = self.estimator.range(self.scheme)
            if found is None and self.cell.fixed:
                found = self.cell.fixed.representable
            self._known = (self._seen, found)
        return self._known[1]

    def trouble(self) -> QuantmarkError | None:
        """Return the error that qparams asked for now deserve, or None."""
        if self.cell.fixed:
            return None
        bad = int(self.estimator.nonfinite_batches)
        if bad:
            return NonFiniteError(
                f"{self.cell.where}: {bad} batch(es) held NaN or infinity; mend the calibration data"
                + ("" if self.component.tolerant else f", or {TOLERATE} to go by the finite values")
            )
        if self.known_range() is None:
            return _uncalibrated(self)
        return self._breach()

    def _breach(self) -> SharingConflictError | None:
        """Return the error that values beyond the cell's contract deserve: they come from somewhere else."""
        seen, contract = exact_range(self.estimator), self.cell.contract
        if seen is None or seen.clamp(contract.widened(_BFLOAT16_ROUNDING)) == seen:
            return None
        return SharingConflictError(
            f"{self.cell.where}: values {seen} reached the observer of an activation bounded to "
            f"({contract.lower}, {contract.upper}): another quantizer made a different tensor share its qparams. Pass "
            "that quantizer as the config's `rest` instead of composing it after this one"
        )

    def assignment(self) -> Assignment:
        """Return what the component decided for this cell."""
        return self.component.assignment(self)

    def calculate_qparams(self, **kwargs: object) -> tuple[Tensor, Tensor]:  # noqa: ARG002  (torchao's signature)
        """Return scale (float32, [1]) and zero_point (int64, [1]) on the observer's device.

        Raises:
            UncalibratedError, NonFiniteError: see `Component.assignment`.
        """
        qparams = self.assignment().qparams or self._by_itself()
        device = self.estimator.min_val.device
        scale = torch.tensor([qparams.scale], dtype=torch.float32, device=device)
        return scale, torch.tensor([qparams.zero_point], dtype=torch.int64, device=device)

    def _by_itself(self) -> QParams:
        """Return harmless qparams for a cell that is left float: nothing reads them but shape checks."""
        return choose_qparams(self.known_range() or Range(0.0, 0.0), self.scheme)

    def _note_change(self) -> None:
        self._seen += 1
        self.component.touch(self.cell.name)

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._note_change()

    def extra_repr(self) -> str:
        """Show the cell and what was seen."""
        return f"cell={self.cell.name}, range={self.known_range()}"


class PerChannelRangeObserver(RangeObserver):
    """Observe one weight with one range per output channel.

    Args:
        ch_axis: the axis of the weight that runs over output channels.
        channels: its length.
        once: observe the first batch only (a weight that does not change between batches).
        search: scale each channel's range by the factor near 1 that rounds it best (`weights.channel_ranges`).
        The others are those of `RangeObserver`.
    """

    channel_min: Tensor
    channel_max: Tensor

    def __init__(
        self,
        dtype: torch.dtype,
        quant_min: int,
        quant_max: int,
        qscheme: torch.qscheme,
        is_dynamic: bool = False,
        *,
        ch_axis: int,
        channels: int,
        component: Component,
        cell: str,
        once: bool = True,
        search: bool = False,
    ) -> None:
        super().__init__(dtype, quant_min, quant_max, qscheme, is_dynamic, component=component, cell=cell)
        self.ch_axis, self.once, self.search = ch_axis, once, search
        self.register_buffer("channel_min", torch.full((channels,), float("inf")))
        self.register_buffer("channel_max", torch.full((channels,), float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        """Take in the weight and return it unchanged."""
        if self.component.frozen or (self.once and self.known_range() is not None):
            return x
        values = x.detach().to(torch.float32).movedim(self.ch_axis, 0).flatten(1)
        if not isinstance(x, FakeTensor) and values.numel():
            self.estimator.reset()
            self.estimator.update(values)
            if int(self.estimator.nonfinite_batches):
                values = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            low, high = channel_ranges(values, self.scheme, search=self.search)
            self.channel_min.copy_(low)
            self.channel_max.copy_(high)
            self._note_change()
        return x

    def calculate_qparams(self, **kwargs: object) -> tuple[Tensor, Tensor]:  # noqa: ARG002  (torchao's signature)
        """Return scale (float32) and zero_point (int64), each of shape [channels]."""
        trouble = self.trouble()
        if trouble is not None and not self.component.tolerant:
            raise trouble
        if self.known_range() is None:
            return torch.ones_like(self.channel_min), torch.zeros_like(self.channel_min, dtype=torch.int64)
        return choose_channel_qparams(self.channel_min, self.channel_max, self.scheme)


class PerChannelBiasObserver(RangeObserver):
    """Derive the qparams of an int32 bias: scale = input scale * weight scale, zero_point 0 (Jacob et al. 2018).

    Args:
        ch_axis: 0.
        input_cell: the cell of the op's input, in the same component.
        weight_cell: the cell of its weight.
        channels: the bias's length where the weight has one scale per channel, else None (one scale).
        The others are those of `RangeObserver`.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        quant_min: int,
        quant_max: int,
        qscheme: torch.qscheme,
        is_dynamic: bool = False,
        *,
        ch_axis: int,
        input_cell: str,
        weight_cell: str,
        channels: int | None,
        component: Component,
        cell: str,
    ) -> None:
        super().__init__(dtype, quant_min, quant_max, qscheme, is_dynamic, component=component, cell=cell)
        self.ch_axis, self.channels = ch_axis, channels
        self.sources = (input_cell, weight_cell)

    def trouble(self) -> QuantmarkError | None:
        """Return the trouble that the input or the weight has, or None."""
        found = [self.component.observers[source].trouble() for source in self.sources]
        return next((error for error in found if error), None)

    def calculate_qparams(self, **kwargs: object) -> tuple[Tensor, Tensor]:  # noqa: ARG002  (torchao's signature)
        """Return scale (float32) and zero_point (int64): shape [channels], or [1] with one scale."""
        scales = [self.component.observers[source].calculate_qparams()[0] for source in self.sources]
        scale = scales[0] * scales[1]
        if self.channels is not None and scale.numel() not in {1, self.channels}:
            scale = scale.repeat(self.channels // scale.numel())  # a grouped transposed conv: one set for every group
        return scale, torch.zeros_like(scale, dtype=torch.int64)


def freeze(prepared: torch.nn.Module) -> int:
    """Keep the qparams and groups of a prepared model as they are now; return how many observers that holds for.

    For the end of a quantization-aware training: what is observed from now on changes nothing, and a weight that
    moves is rounded with the scales that it has now.

    Raises:
        InputError: if the model has no observers of ours.
        UncalibratedError, NonFiniteError, SharingConflictError: as `convert_pt2e` would now.
    """
    takes = "freeze takes what prepare_qat_pt2e or prepare_pt2e returned"
    require(isinstance(prepared, torch.nn.Module), takes, prepared)
    observers = [module for module in prepared.modules() if isinstance(module, RangeObserver)]
    if not observers:
        raise InputError(f"{takes}; this model has no observers of ours")
    for observer in observers:
        observer.assignment()
    for component in {id(observer.component): observer.component for observer in observers}.values():
        component.freeze()
    return len(observers)


def exact_range(estimator: Estimator) -> Range | None:
    """Return the range that holds every value that an estimator saw, or None if it saw none."""
    low, high = float(estimator.min_val), float(estimator.max_val)
    return Range(low, high) if low <= high else None


def _uncalibrated(observer: RangeObserver) -> UncalibratedError:
    silent = [o.cell.where for o in observer.component.registry if not o.cell.fixed and o.known_range() is None]
    shown = "".join(f"\n  {where}" for where in silent[:20])
    more = f"\n  ... and {len(silent) - 20} more" if len(silent) > 20 else ""
    tolerate = "" if observer.component.tolerant else f", or {TOLERATE} to leave such tensors float"
    return UncalibratedError(
        f"{observer.cell.where}: its observer saw no data. Run calibration batches through the prepared model "
        f"before convert_pt2e (a branch that no batch takes stays empty){tolerate}. "
        f"Observers without data ({len(silent)}):{shown}{more}"
    )
