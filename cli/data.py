"""Calibration data from files: .npz, .safetensors, .pt (tensors only), or a folder of them, each file a batch.

Arrays are named as the model's inputs, or come in their order (a .pt with a list; the arrays of `np.savez(a, b)`; a
single array for a single input). Where a model takes a fixed number of rows and a file holds a multiple of it, the
file is cut into batches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..observers.errors import InputError
from ..observers.fields import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.export import ExportedProgram

    Arrays = dict[str, Tensor] | list[Tensor]

SUFFIXES: Final = (".npz", ".pt", ".safetensors")
_POSITION: Final = re.compile(r"(?:arr_)?(\d+)")


@dataclass(frozen=True)
class Input:
    """One tensor that a model takes.

    Args:
        name: of the argument.
        dtype: of the tensor.
        sizes: its shape; (low, high) where a size varies.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[int | tuple[float, float], ...]

    @property
    def shape(self) -> str:
        """The shape in words, as in "(1..8, 3, 32, 32)"."""
        return f"({', '.join(str(s) if isinstance(s, int) else _interval(s) for s in self.sizes)})"

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Tell whether a tensor of the shape fits."""
        return len(shape) == len(self.sizes) and all(
            size == wanted if isinstance(wanted, int) else wanted[0] <= size <= wanted[1]
            for size, wanted in zip(shape, self.sizes, strict=True)
        )


def _interval(size: tuple[float, float]) -> str:
    low, high = size
    return f"{low:g}.." + (f"{high:g}" if high < 2**31 else "")


def model_inputs(program: ExportedProgram) -> list[Input]:
    """Return what a program takes.

    Raises:
        InputError: if it takes anything but tensors, one by one and by position.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values = [nodes[n].meta.get("val") if isinstance(n, str) else n for n in program.graph_signature.user_inputs]
    positional = torch.utils._pytree.tree_structure((tuple(range(len(values))), {}))
    if program.call_spec.in_spec != positional or not all(isinstance(value, Tensor) for value in values):
        raise InputError("the model takes more than tensors by position; export it with a flat tuple of tensors")
    names = [str(name) for name in program.graph_signature.user_inputs]
    return [
        Input(name, value.dtype, tuple(_size(size, program) for size in value.shape))
        for name, value in zip(names, values, strict=True)
        if isinstance(value, Tensor)
    ]


def _size(size: Any, program: ExportedProgram) -> int | tuple[float, float]:
    if isinstance(size, int):
        return size
    found = program.range_constraints.get(size.node.expr)
    return (float(found.lower), float(found.upper)) if found is not None else (0.0, float("inf"))


class Calibration:
    """The batches of a file or folder, read one file at a time, each checked against the model's inputs.

    Raises:
        InputError: on making it, if there is nothing to read; on reading, naming the file and what is wrong with it.
    """

    def __init__(self, path: Path, inputs: list[Input]) -> None:
        if not path.exists():
            raise InputError(f"there is no calibration data {path}")
        files = sorted(f for f in path.iterdir() if not f.name.startswith(".")) if path.is_dir() else [path]
        self.files = [file for file in files if file.suffix in SUFFIXES]
        self.ignored = [file for file in files if file.suffix not in SUFFIXES]
        self.inputs = inputs
        if not self.files:
            kinds = ", ".join(SUFFIXES)
            what = f"the folder {path} holds no such file" if path.is_dir() else f"got {path}"
            raise InputError(f"calibration data is {kinds} or a folder of them; {what}")

    @property
    def note(self) -> str:
        """What should be said about the folder, or ""."""
        names = ", ".join(file.name for file in self.ignored[:3])
        return f"not read: {len(self.ignored)} other file(s) ({names})" if self.ignored else ""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches, in the order of the files' names."""
        for file in self.files:
            yield from _batches(file, self.inputs)


def _batches(file: Path, inputs: list[Input]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches of one file."""
    ordered = _in_order(file, _read(file), inputs)
    tensors = [_typed(file, tensor, each) for tensor, each in zip(ordered, inputs, strict=True)]
    pieces = _pieces(tensors, inputs)
    for tensor, each in zip(tensors, inputs, strict=True):
        where, shape = f"{file}: {each.name}", tuple(tensor.shape)
        if not tensor.numel():
            raise InputError(f"{where} is empty, of shape {shape}")
        if pieces == 1 and not each.takes(shape):
            raise InputError(f"{where} has shape {shape}, the model takes {each.shape}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            rows = (~tensor.isfinite()).flatten(1).any(1).nonzero().flatten() if tensor.dim() > 1 else None
            first = f", first in row {int(rows[0])}" if rows is not None and rows.numel() else ""
            raise InputError(f"{where} holds {count} NaN or infinite value(s){first}; mend or drop them")
    yield from zip(*(tensor.chunk(pieces) for tensor in tensors), strict=True)


def _pieces(tensors: list[Tensor], inputs: list[Input]) -> int:
    """Return into how many batches the tensors are cut: more than one only where that makes all of them fit."""
    first, wanted = tensors[0], inputs[0].sizes[:1]
    if not first.dim() or not wanted or not isinstance(wanted[0], int) or wanted[0] < 1:
        return 1
    pieces = first.shape[0] // wanted[0]
    for tensor, each in zip(tensors, inputs, strict=True):
        rows = tensor.shape[0] if tensor.dim() else 0
        if not pieces or rows % pieces or not each.takes((rows // pieces, *tensor.shape[1:])):
            return 1
    return pieces


def _typed(file: Path, tensor: Tensor, wanted: Input) -> Tensor:
    """Return the tensor in the model's dtype, where that changes no more than the precision."""
    kinds = [(d.is_floating_point, d.is_complex, d is torch.bool) for d in (tensor.dtype, wanted.dtype)]
    if kinds[0] != kinds[1]:
        raise InputError(f"{file}: {wanted.name} is of {tensor.dtype}, the model takes {wanted.dtype}")
    typed = tensor.to(wanted.dtype)
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    if is_whole and not (typed.numpy() == tensor.numpy()).all():  # integers wrap around without a word
        raise InputError(f"{file}: {wanted.name} holds values that {wanted.dtype}, which the model takes, can't hold")
    return typed


def _in_order(file: Path, arrays: Arrays, inputs: list[Input]) -> list[Tensor]:
    """Return the arrays in the order of the model's inputs."""
    names, count = [each.name for each in inputs], len(arrays)
    listed = ", ".join(names)
    if not count:
        raise InputError(f"{file} holds no arrays; the model takes {listed}")
    if isinstance(arrays, dict) and (len(names) > 1 or count > 1 or names[0] in arrays):
        positions = [_POSITION.fullmatch(name) for name in arrays]
        if not all(positions) or set(arrays) & set(names):
            return _by_name(file, arrays, names)
        arrays = [arrays[name] for name in sorted(arrays, key=lambda name: int(name.removeprefix("arr_")))]
    if count != len(names):
        raise InputError(f"{file} holds {count} array(s), the model takes {len(names)} ({listed})")
    return list(arrays.values()) if isinstance(arrays, dict) else arrays


def _by_name(file: Path, arrays: dict[str, Tensor], names: list[str]) -> list[Tensor]:
    missing = [name for name in names if name not in arrays]
    more = [name for name in arrays if name not in names]
    if missing:
        hint = nearest(missing[0], more)
        raise InputError(f"{file} lacks {', '.join(missing)}; it holds {', '.join(arrays)}{hint}")
    if more:
        raise InputError(f"{file} holds {', '.join(more)}, which the model doesn't take; it takes {', '.join(names)}")
    return [arrays[name] for name in names]


def _read(file: Path) -> Arrays:
    try:
        if file.suffix == ".npz":
            return _read_npz(file)
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(file))
        return _read_pt(file)
    except (InputError, KeyboardInterrupt, MemoryError):
        raise
    except OSError as error:
        raise InputError(f"{file} can't be read: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001  (whatever the readers stumble over in a file of another kind)
        if file.suffix == ".pt":  # torch's own words are an essay on weights_only, or a number
            why = "it holds other things than tensors, or torch.save did not write it; save a tensor, a tuple or a dict"
        else:
            why = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        raise InputError(f"{file} is no {file.suffix} of plain arrays: {why}") from None


def _read_npz(file: Path) -> Arrays:
    import numpy as np

    with np.load(file, allow_pickle=False) as archive:
        if not hasattr(archive, "files"):
            raise InputError(f"{file} is no .npz, which np.savez writes")
        return {name: torch.from_numpy(np.ascontiguousarray(archive[name])) for name in archive.files}


def _read_pt(file: Path) -> Arrays:
    found = torch.load(file, map_location="cpu", weights_only=True)
    found = [found] if isinstance(found, Tensor) else found
    items = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else [None]
    if not all(isinstance(item, Tensor) for item in items):
        raise InputError(f"{file} must hold a tensor, a list of tensors, or a dict of them, and nothing else")
    return {str(n): t for n, t in found.items()} if isinstance(found, dict) else list(found)
