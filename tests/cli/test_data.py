"""Calibration data from files: every form that is taken, and every error in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quantmark.cli.data import Calibration, Input, model_inputs
from quantmark.observers.errors import InputError

X, MASK = Input("x", torch.float32, (2, 3)), Input("mask", torch.int64, ((1.0, 8.0), 4))
A, B = torch.arange(6.0).reshape(2, 3), torch.ones(5, 4, dtype=torch.int64)

Write = Callable[[Path], object]


def read(path: Path, *inputs: Input) -> list[tuple[Tensor, ...]]:
    return list(Calibration(path, list(inputs)))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("named.npz", lambda p: np.savez(p, mask=B.numpy(), x=A.numpy())),
        ("in_order.npz", lambda p: np.savez(p, A.numpy(), B.numpy())),
        ("named.safetensors", lambda p: save_file({"x": A, "mask": B}, p)),
        ("named.pt", lambda p: torch.save({"mask": B, "x": A}, p)),
        ("in_order.pt", lambda p: torch.save([A, B], p)),
        ("less_precise.npz", lambda p: np.savez(p, x=A.double().numpy(), mask=B.int().numpy())),
    ],
)
def test_each_form_is_read_in_the_order_of_the_models_inputs(tmp_path: Path, name: str, write: Write) -> None:
    write(tmp_path / name)
    ((x, mask),) = read(tmp_path / name, X, MASK)
    assert torch.equal(x, A)
    assert torch.equal(mask, B)
    assert (x.dtype, mask.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("values", "dtype"), [([300, 1], np.int64), ([-1, 1], np.int64), ([2**63, 1], np.uint64), ([2, 1], np.int8)]
)
def test_integers_do_not_wrap_around(tmp_path: Path, values: list[int], dtype: type[np.generic]) -> None:
    wanted = torch.int64 if dtype is np.uint64 else torch.uint8
    np.savez(tmp_path / "a.npz", image=np.array([values], dtype))
    image = Input("image", wanted, (1, 2))
    if dtype is np.int8:
        ((got,),) = read(tmp_path / "a.npz", image)
        assert torch.equal(got, torch.tensor([values], dtype=wanted))
    else:
        with pytest.raises(InputError, match=f"image holds values that {wanted}, which the model takes, can't hold"):
            read(tmp_path / "a.npz", image)


def test_a_single_array_needs_no_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=A.numpy())
    torch.save(A, tmp_path / "b.pt")
    assert torch.equal(read(tmp_path / "a.npz", X)[0][0], A)
    assert torch.equal(read(tmp_path / "b.pt", X)[0][0], A)


def test_a_folder_is_read_by_name_one_file_a_batch(tmp_path: Path) -> None:
    for index in range(3):
        torch.save(A + index, tmp_path / f"{2 - index}.pt")
    (tmp_path / "labels.csv").write_text("1,2")
    (tmp_path / ".hidden").write_text("")
    found = Calibration(tmp_path, [X])
    assert [float(x[0, 0]) for (x,) in found] == [2.0, 1.0, 0.0]
    assert found.note == "not read: 1 other file(s) (labels.csv)"


def test_more_rows_than_the_model_takes_are_cut_into_batches(tmp_path: Path) -> None:
    torch.save(torch.arange(18.0).reshape(6, 3), tmp_path / "a.pt")
    found = read(tmp_path / "a.pt", X)
    assert [tuple(x.shape) for (x,) in found] == [(2, 3)] * 3
    assert float(found[2][0][0, 0]) == 12.0


def _npz(**arrays: Tensor) -> Write:
    return lambda path: np.savez(path, **{name: tensor.numpy() for name, tensor in arrays.items()})


NAN = torch.tensor([[0.0, 1.0, 2.0], [float("nan"), float("inf"), 0.0]])


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.npz", _npz(x=A), "lacks mask; it holds x"),
        ("a.npz", _npz(x=A, maks=B), "lacks mask; it holds x, maks; nearest: maks"),
        ("a.npz", _npz(x=A, mask=B, labels=B), "holds labels, which the model doesn't take; it takes x, mask"),
        ("a.npz", _npz(x=A[:, :2], mask=B), r"x has shape \(2, 2\), the model takes \(2, 3\)"),
        ("a.npz", _npz(x=A, mask=B.repeat(2, 1)), r"mask has shape \(10, 4\), the model takes \(1..8, 4\)"),
        ("a.npz", _npz(x=NAN, mask=B), r"x holds 2 NaN or infinite value\(s\), first in row 1; mend or drop them"),
        ("a.npz", _npz(x=A[:0], mask=B), r"x is empty, of shape \(0, 3\)"),
        ("a.npz", _npz(x=A, mask=B.float()), "mask is of torch.float32, the model takes torch.int64"),
        ("a.npz", _npz(), r"holds no arrays; the model takes x, mask"),
        ("a.npz", lambda p: p.write_text("no zip"), "is no .npz of plain arrays"),
        ("a.npz", lambda p: np.savez(p, x=np.array([{}])), "is no .npz of plain arrays: Object arrays"),
        ("a.pt", lambda p: torch.save([A], p), r"holds 1 array\(s\), the model takes 2 \(x, mask\)"),
        ("a.pt", lambda p: torch.save({"x": 1}, p), "must hold a tensor, a list of tensors, or a dict of them"),
        ("a.pt", lambda p: torch.save(nn.Linear(1, 1), p), "is no .pt of plain arrays"),
        ("a.pt", lambda p: p.write_bytes(b""), "is no .pt of plain arrays|can't be read"),
        ("a.safetensors", lambda p: p.write_text("no header"), "is no .safetensors of plain arrays"),
        ("a.csv", lambda p: p.write_text("1,2"), "calibration data is .npz, .pt, .safetensors or a folder of them"),
        ("a", lambda p: p.mkdir(), "holds no such file"),
        ("a", lambda _: None, "there is no calibration data"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(tmp_path: Path, name: str, write: Write, message: str) -> None:
    write(tmp_path / name)
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path / name, X, MASK)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (tmp_path / "sprung").touch, ()

    torch.save({"x": Trap()}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"is no \.pt of plain arrays"):
        read(tmp_path / "a.pt", X)
    assert not (tmp_path / "sprung").exists()


class Two(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.sum() + mask.sum()


class Nested(nn.Module):
    def forward(self, pair: dict[str, Tensor]) -> Tensor:
        return pair["x"] + 1.0


def test_inputs_are_read_off_the_program() -> None:
    rows = torch.export.Dim("rows", min=1, max=8)
    program = torch.export.export(Two(), (A, B), dynamic_shapes=({}, {0: rows}))
    assert model_inputs(program) == [X, MASK]
    assert MASK.shape == "(1..8, 4)"
    with pytest.raises(InputError, match="flat tuple of tensors"):
        model_inputs(torch.export.export(Nested(), ({"x": A},)))
    with pytest.raises(InputError, match="flat tuple of tensors"):
        model_inputs(torch.export.export(Two(), (A,), {"mask": B}))
