"""Batches and models as users give them: held against what the model takes, with an error that names what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from ..observers.errors import InputError
from ..observers.observer import TOLERATE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Graph, GraphModule, Node

Batch = tuple[Tensor, ...]


def is_exported(model: GraphModule) -> bool:
    """Tell an exported module from one that was traced symbolically, which holds no values and calls modules."""
    inputs = graph_inputs(model)
    return bool(inputs) and all("val" in node.meta for node in inputs)


def is_quantized(graph: Graph) -> bool:
    """Tell whether a graph holds a quantize or dequantize."""
    return any(getattr(node.target, "namespace", "") == "quantized_decomposed" for node in graph.nodes)


def as_batches(calibration: object) -> Iterator[Batch]:
    """Return the batches of an iterable, each as a tuple of tensors.

    Raises:
        InputError: if it is none; and on the way, if a batch is none.
    """
    if isinstance(calibration, (Tensor, str, bytes, dict)) or not isinstance(calibration, Iterable):
        raise InputError(
            f"calibration must be an iterable of batches, got {type(calibration).__name__}; for one batch pass [batch]"
        )
    return (as_batch(batch, f"batch {index}") for index, batch in enumerate(calibration))


def as_batch(batch: object, name: str) -> Batch:
    """Return a batch as a tuple of tensors; `name` is what messages call it."""
    if isinstance(batch, Tensor):
        return (batch,)
    if not isinstance(batch, (tuple, list)):
        raise InputError(f"{name} is a {type(batch).__name__}; a batch is a tensor, or a tuple or list of tensors")
    for position, value in enumerate(batch):
        if not isinstance(value, Tensor):
            raise InputError(f"{name}, input {position} is a {type(value).__name__}; every input must be a tensor")
    return tuple(batch)


def checked(batches: Iterable[Batch], inputs: list[Node], *, finite: bool) -> Iterator[Batch]:
    """Yield the batches, each checked against the model's inputs first."""
    for index, batch in enumerate(batches):
        check_batch(batch, f"batch {index}", inputs, finite=finite)
        yield batch


def graph_inputs(model: GraphModule) -> list[Node]:
    """Return the inputs of an exported module."""
    return [node for node in model.graph.nodes if node.op == "placeholder"]


def check_batch(batch: Batch, name: str, inputs: list[Node], *, finite: bool) -> None:
    """Raise if a batch is not what a model takes, or holds NaN or infinity (`finite`)."""
    if len(batch) != len(inputs):
        expected = ", ".join(node.name for node in inputs)
        raise InputError(
            f"{name} holds {len(batch)} tensor(s), but the model takes {len(inputs)} ({expected}). "
            "A batch holds the model's inputs in order, without labels"
        )
    for value, node in zip(batch, inputs, strict=True):
        where = f"{name}, input {node.name}"
        wanted = node.meta.get("val")
        if isinstance(wanted, Tensor):
            _check_input(value, wanted, where)
        if finite and value.is_floating_point() and not bool(value.isfinite().all()):
            bad = int((~value.isfinite()).sum())
            raise InputError(
                f"{where} holds {bad} NaN or infinite value(s); mend or drop the batch, or {TOLERATE} "
                "to go by the finite values"
            )


def _check_input(value: Tensor, wanted: Tensor, where: str) -> None:
    """Compare with what the model was exported for; sizes that vary fit any."""
    sizes: tuple[object, ...] = tuple(wanted.shape)
    fits = value.dim() == wanted.dim() and all(
        not isinstance(size, int) or size == given for size, given in zip(sizes, value.shape, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, sizes))
        raise InputError(
            f"{where} has shape {tuple(value.shape)}, expected ({expected}). Sizes that differ between batches "
            "(a smaller last batch, say) must be named in dynamic_shapes, or such batches dropped"
        )
    if value.dtype != wanted.dtype:
        raise InputError(f"{where} has dtype {value.dtype}, expected {wanted.dtype}")
    if value.device != wanted.device:
        raise InputError(f"{where} is on device {value.device}, expected {wanted.device}")
