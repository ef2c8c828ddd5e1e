"""Export, prepare, calibrate, convert and check in one call, for those who want one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from .annotators.batches import Batch, as_batch, as_batches, checked, graph_inputs, is_exported, is_quantized
from .annotators.folding import part_norms
from .annotators.measure import read_ranges
from .annotators.quantizer import BackendQuantizer
from .checks import check_calibrated
from .configs.base import BackendConfig
from .observers.errors import ConfigError, InputError
from .reports.sensitivity import By, SensitivityBench
from .reports.sqnr import float_twin, measure_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .annotators.quantizer import Record
    from .checks import Report
    from .reports import Measurement, Sensitivity

T = TypeVar("T")


@dataclass(frozen=True)
class Quantized:
    """What `quantize` returns.

    Args:
        model: the converted graph, ready to be exported again and lowered.
        quantizer: what annotated it.
        report: what the checks found.
    """

    model: GraphModule
    quantizer: BackendQuantizer
    report: Report

    @property
    def record(self) -> Record:
        """What was found and decided: fused blocks, branch families, joins."""
        return self.quantizer.record


def quantize(
    model: nn.Module | ExportedProgram,
    calibration: Iterable[Tensor | Sequence[Tensor]],
    config: BackendConfig | BackendQuantizer,
    *,
    example_inputs: Sequence[Tensor] | None = None,
    dynamic_shapes: Any = None,
    strict: bool = False,
    progress: bool = True,
) -> Quantized:
    """Quantize a float model for one backend, after training, and check the result.

    The given model is left as it is, with its train or eval mode. A finding of the checks raises nothing here:
    `report.raise_if_unsafe()` does.

    Args:
        model: a float `nn.Module` (exported in eval mode), an `ExportedProgram`, or the exported module of one.
        calibration: the batches, each a tensor or a tuple or list of tensors in the order of the model's inputs. It
            may be empty only where the quantizer has all ranges beforehand.
        config: the backend's config, or a `BackendQuantizer` that holds one and rules by module or operator.
        example_inputs: what an `nn.Module` is exported with; the first batch by default.
        dynamic_shapes: which sizes vary, as `torch.export.export` takes it; by default none does.
        strict: export an `nn.Module` in strict mode.
        progress: show what is going on, and a progress bar while calibrating, where stderr is a terminal.

    Raises:
        InputError: if there are no batches, or one does not fit the model or holds NaN or infinity.
        ConfigError: if the quantizer has no config, or a config is for quantization-aware training.
    """
    how = _How(example_inputs, dynamic_shapes, strict, progress)
    prepared, quantizer = _calibrated(model, calibration, config, how)
    with _status("Converting", show=progress):
        ranges = read_ranges(prepared)
        converted = convert_pt2e(prepared)
    with _status("Checking", show=progress):
        return Quantized(converted, quantizer, check_calibrated(converted, quantizer.config, ranges))


def measure_sqnr(
    model: nn.Module | ExportedProgram,
    quantized: Quantized | GraphModule,
    batches: Iterable[Tensor | Sequence[Tensor]],
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
    progress: bool = True,
) -> Measurement:
    """Measure SQNR in dB per tensor and output: the float model against the quantized one, node by node.

    Both graphs are run on each batch; all batches count as one (sums of squares over sums of squared errors). One
    batch's float tensors are held in memory at a time. `explain(quantized.model, measured)` shows the numbers beside
    what was decided and predicted.

    Args:
        model: the float model that was quantized, as `quantize` takes it.
        quantized: what `quantize` or `convert_pt2e` returned, from any PT2E quantizer; not exported again since.
        batches: as `quantize` takes them; batches that it was not calibrated on tell more.
        dynamic_shapes: as for `quantize`.
        strict: as for `quantize`.
        progress: show a progress bar, where stderr is a terminal.

    Raises:
        InputError: if there are no batches, one does not fit the model, or the models have different outputs.
    """
    converted = quantized.model if isinstance(quantized, Quantized) else quantized
    total, items = len(batches) if isinstance(batches, Sized) else None, as_batches(batches)
    first = next(items, None)
    if first is None:
        raise InputError("there are no batches to measure SQNR on; give at least one")
    with _status("Exporting", show=progress):
        twin = float_twin(_export(model, first, dynamic_shapes, strict=strict), converted)
    bar = track(checked(chain([first], items), graph_inputs(twin), finite=False), "Measuring", total, show=progress)
    return measure_graphs(twin, converted, bar)


def sensitivity(
    model: nn.Module | ExportedProgram,
    calibration: Iterable[Tensor | Sequence[Tensor]],
    config: BackendConfig | BackendQuantizer,
    *,
    batches: Iterable[Tensor | Sequence[Tensor]] | None = None,
    by: By = "block",
    example_inputs: Sequence[Tensor] | None = None,
    dynamic_shapes: Any = None,
    strict: bool = False,
    progress: bool = True,
) -> Sensitivity:
    """Measure SQNR at the outputs with one part of the model quantized at a time, to choose what to leave float.

    The model is calibrated and converted once. For each part, its quantizations are in force and all others are passed
    over. A block, a quantized op and a join quantize what they read (weight and bias included) and what they write; a
    module, what those in it do; a family, its root and its branches without the ops that read them. So parts beside
    each other share a quantization, and their noise does not add up to that of the whole. Decisions (what
    shares qparams, what stays float) are those for the whole model. The reference is the same graph without any
    quantization, and one run of a part computes only what lies below it. Graphs within the graph (of torch.cond, scan,
    while_loop) stay as they were quantized, on both sides.

    Args:
        model: as for `quantize`.
        calibration: as for `quantize`.
        config: as for `quantize`.
        batches: what to measure on; the calibration batches by default, which are then held in memory.
        by: "block" (blocks, quantized ops and joins), "family" (branch families) or "module" (by module path).
        example_inputs: as for `quantize`.
        dynamic_shapes: as for `quantize`.
        strict: as for `quantize`.
        progress: show a progress bar, where stderr is a terminal.

    Raises:
        InputError: as `quantize`, and if there is nothing to measure on, or no float output to measure at.
    """
    if by not in get_args(By):
        raise InputError(f"by must be one of {', '.join(get_args(By))}, got {by!r}")
    if batches is None:
        as_batches(calibration)  # raises where that is no iterable
        batches = calibration = list(calibration)
    how = _How(example_inputs, dynamic_shapes, strict, progress)
    prepared, _ = _calibrated(model, calibration, config, how)
    inputs, total = graph_inputs(prepared), len(batches) if isinstance(batches, Sized) else None
    with _status("Converting", show=progress):
        bench = SensitivityBench(convert_pt2e(prepared, fold_quantize=False), by)
    steps = bench.runs(checked(as_batches(batches), inputs, finite=False))
    for _ in track(steps, "Measuring", total and total * bench.runs_per_batch, show=progress):
        pass
    return bench.sensitivity()


@dataclass(frozen=True)
class _How:
    """How to export and calibrate; the fields are arguments of `quantize`."""

    example_inputs: Sequence[Tensor] | None
    dynamic_shapes: Any
    strict: bool
    progress: bool


def _calibrated(
    model: nn.Module | ExportedProgram,
    calibration: Iterable[Tensor | Sequence[Tensor]],
    config: BackendConfig | BackendQuantizer,
    how: _How,
) -> tuple[GraphModule, BackendQuantizer]:
    """Return the prepared and calibrated model with its quantizer; see `quantize`."""
    quantizer = config if isinstance(config, BackendQuantizer) else BackendQuantizer(config)
    if quantizer.config is None or quantizer.config.is_qat:
        what = "no global config" if quantizer.config is None else "a config with is_qat=True"
        raise ConfigError(f"quantize calibrates after training, with the quantizer's global config; it has {what}")
    batches = as_batches(calibration)
    first, total = next(batches, None), len(calibration) if isinstance(calibration, Sized) else None
    if first is None and quantizer.ranges is None:
        raise InputError("calibration holds no batches; give at least one, so that ranges can be observed")
    example = first if how.example_inputs is None else as_batch(how.example_inputs, "example_inputs")
    with _status("Exporting", show=how.progress):
        exported = _export(model, example, how.dynamic_shapes, strict=how.strict)
    with _status("Annotating", show=how.progress):
        prepared = prepare_pt2e(exported, quantizer)
    items = checked(
        chain([] if first is None else [first], batches),
        graph_inputs(prepared),
        finite=quantizer.config.on_uncalibrated == "error",
    )
    with torch.no_grad():
        for index, batch in enumerate(track(items, "Calibrating", total, show=how.progress)):
            _run(prepared, batch, index)
    return prepared, quantizer


def _run(prepared: GraphModule, batch: Batch, index: int) -> None:
    """Calibrate with a batch."""
    try:
        prepared(*batch)
    except (RuntimeError, IndexError) as error:  # what torch raises for dtypes and indices that don't fit
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"the model can't run batch {index}: {first}") from error


def track(items: Iterable[T], what: str, total: int | None = None, *, show: bool = True) -> Iterator[T]:
    """Yield the items under a progress bar on stderr; without one where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as bar:
        yield from bar.track(items, total=total, description=what)


@contextmanager
def _status(what: str, *, show: bool) -> Iterator[None]:
    """Say what is going on, where stderr is a terminal."""
    console = Console(stderr=True)
    with console.status(what) if show and console.is_terminal else nullcontext():
        yield


def _export(
    model: nn.Module | ExportedProgram, example: Batch | None, dynamic_shapes: Any, *, strict: bool
) -> GraphModule:
    """Return an exported module that may be changed: the caller keeps the given one."""
    if isinstance(model, ExportedProgram):
        exported = model.module()
    elif isinstance(model, GraphModule) and is_exported(model):
        tensors = chain(model.parameters(), model.buffers())
        exported = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    elif isinstance(model, nn.Module):
        if example is None:
            raise InputError("without calibration batches, example_inputs must say what the model takes")
        _check_signature(model, example)
        with _eval_mode(model):
            exported = _export_module(model, example, dynamic_shapes, strict=strict).module()
    else:
        raise InputError(f"the model must be an nn.Module or an ExportedProgram, got {type(model).__name__}")
    if not isinstance(exported, GraphModule):
        raise InputError(f"the exported model must be a graph module, got {type(exported).__name__}")
    if is_quantized(exported.graph):
        raise InputError("the model is quantized already; give the float model")
    _own_buffers(exported)
    part_norms(exported)
    return exported


def _export_module(model: nn.Module, example: Batch, dynamic_shapes: Any, *, strict: bool) -> ExportedProgram:
    """Export a module; where that fails because the module itself can't run the batch, say so."""
    try:
        return torch.export.export(model, example, dynamic_shapes=dynamic_shapes, strict=strict)
    except Exception:
        try:
            with torch.no_grad():
                model(*example)
        except Exception as error:  # noqa: BLE001  (whatever the user's own module raises)
            first = next(iter(str(error).splitlines()), "") or type(error).__name__
            shapes = ", ".join(f"{tuple(value.shape)} {value.dtype}" for value in example)
            raise InputError(
                f"batch 0 ({shapes}) is not what {type(model).__name__} takes: {first}. "
                "Give batches of the model's own inputs"
            ) from None
        raise


def _own_buffers(exported: GraphModule) -> None:
    """Give the module buffers of its own: calibration runs it, and a model may write into them (caches, counters)."""
    copies: dict[int, Tensor] = {}
    for module in exported.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())


def _check_signature(model: nn.Module, example: Batch) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*example)
    except TypeError as error:
        raise InputError(
            f"batch 0 holds {len(example)} tensor(s), but {type(model).__name__}.forward takes {signature}: {error}. "
            "A batch holds the model's inputs in order, without labels"
        ) from None


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and each of its modules back to its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
