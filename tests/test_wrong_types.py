"""Something of another kind, given in place of what a function takes: one line that says what it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from quantmark import (
    BackendQuantizer,
    QuantmarkError,
    RangeTable,
    check,
    configs,
    fill_ranges,
    observe_ranges,
    quantize,
    sqnr_db,
)

MODEL: Any = nn.Linear(4, 3)
X = torch.randn(2, 4)
PROGRAM = torch.export.export(MODEL, (X,))
ANY: Any = configs

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a factory that was not called": (
        lambda: quantize(MODEL, [X], ANY.xnnpack),
        r"a quantizer takes a config such as configs.xnnpack\(\), or None to leave ops float; "
        r"got the function xnnpack itself: call it, xnnpack\(\)",
    ),
    "a config by name": (lambda: BackendQuantizer(ANY.__dict__["__name__"]), r"got 'quantmark.configs' \(str\)"),
    "a config for a rule": (lambda: BackendQuantizer(None).set_module_name("a", ANY.cadence), r"call it, cadence\(\)"),
    "a config for all": (
        lambda: BackendQuantizer(None).set_global(ANY.BackendConfig),
        r"class BackendConfig itself",
    ),
    "ranges of a dict": (
        lambda: BackendQuantizer(None, {"x": (0, 1)}),  # type: ignore[arg-type]
        r"BackendQuantizer takes ranges as a RangeTable \(see observe_ranges\), got \{'x': \(0, 1\)\} \(dict\)",
    ),
    "a link of one": (lambda: BackendQuantizer(None).link("a"), "link takes the names of two or more tensors, got 'a'"),
    "a link of a list": (lambda: BackendQuantizer(None).link(["a", "b"]), "link takes names of nodes, as text; got"),  # type: ignore[arg-type]
    "a number to unlink": (lambda: BackendQuantizer(None).unlink(3), "unlink takes names of nodes, as text; got 3"),  # type: ignore[arg-type]
    "an estimator by another name": (
        lambda: observe_ranges(PROGRAM, [X], estimator="histogramm"),  # type: ignore[arg-type]
        'observe_ranges takes estimator="histogram" or "minmax"; got .histogramm.',
    ),
    "a number to check": (lambda: check(ANY.xnnpack()), "check.. needs a converted GraphModule"),
    "a number to check by": (lambda: check(PROGRAM, 3), r"got 3 \(int\)"),  # type: ignore[arg-type]
    "JSON without an end": (lambda: RangeTable.from_json("[" * 100_000), "it is nested too deeply"),
    "JSON that is a table": (lambda: RangeTable.from_json(ANY), "takes the text of a file, got .*module"),
    "bytes of another kind": (lambda: RangeTable.from_json(b"\xff\x00"), "the range table is no JSON"),  # type: ignore[arg-type]
    "a table of nothing": (
        lambda: RangeTable.of(None),  # type: ignore[arg-type]
        r"RangeTable.of takes a mapping of node names to \(min, max\), got None \(NoneType\)",
    ),
    "a name of another kind": (
        lambda: BackendQuantizer(None).set_module_name(3, None),  # type: ignore[arg-type]
        r"set_module_name takes a module's path, or a compiled pattern of one; got 3 \(int\)",
    ),
    "a type by name": (
        lambda: BackendQuantizer(None).set_module_type("Linear", None),  # type: ignore[arg-type]
        "set_module_type takes a class, such as nn.Linear; got 'Linear'",
    ),
    "an operator by number": (lambda: BackendQuantizer(None).set_operator_type(3, None), "set_operator_type takes an"),
    "a filter by name": (
        lambda: BackendQuantizer(None).set_filter("relu", None),  # type: ignore[arg-type]
        "set_filter takes a function of a node; got 'relu'",
    ),
    "a model to fill that is not prepared": (
        lambda: fill_ranges(MODEL, RangeTable()),
        "fill_ranges takes what prepare_pt2e returned; got a Linear",
    ),
    "a dict to fill by": (
        lambda: fill_ranges(PROGRAM.module(), {}),  # type: ignore[arg-type]
        "fill_ranges takes a RangeTable .*; got {}",
    ),
    "a table merged with nothing": (lambda: RangeTable().merge(ANY), "a RangeTable merges with others; got"),
    "a number suppressed": (lambda: check(PROGRAM, suppress=3), "takes suppress as patterns"),  # type: ignore[arg-type]
    "numbers suppressed": (lambda: check(PROGRAM, suppress=[3]), "is text, such as"),  # type: ignore[list-item]
    "numbers compared": (lambda: sqnr_db(1.0, X), "compares two tensors; got 1.0"),  # type: ignore[arg-type]
    "a module that is not exported": (
        lambda: observe_ranges(MODEL, [X]),
        r"takes an exported model: pass torch.export.export\(model, inputs\), or its .module\(\); got a Linear",
    ),
    "a traced module": (lambda: observe_ranges(symbolic_trace(MODEL), [X]), r"takes an exported model"),
    "no batches but a tensor": (lambda: observe_ranges(PROGRAM, X), r"for one batch pass \[batch\]"),
    "no batches at all": (lambda: observe_ranges(PROGRAM, 3), "iterable of batches, got int"),  # type: ignore[arg-type]
    "a batch of another width": (
        lambda: observe_ranges(PROGRAM, [X, X[:, :3]]),
        r"batch 1, input input_1 has shape \(2, 3\), expected \(2, 4\)",
    ),
    "a first batch of another width": (
        lambda: quantize(MODEL, [X[:, :3]], configs.xnnpack(), progress=False),
        r"batch 0 \(\(2, 3\) torch.float32\) is not what Linear takes: mat1 and mat2 shapes cannot be multiplied",
    ),
    "a first batch of another dtype": (
        lambda: quantize(MODEL, [X.double()], configs.xnnpack(), progress=False),
        r"the model can't run batch 0: mat1 and mat2 must have the same dtype",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_it_is_a_named_error_of_one_line(kind: str) -> None:
    call, message = WRONG[kind]
    with pytest.raises(QuantmarkError) as caught:
        call()
    assert re.search(message, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


def test_what_export_itself_can_not_do_stays_its_own_error() -> None:
    class Stubborn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if float(x.sum()) > 0.0 else -x

    with pytest.raises(Exception, match="data-dependent") as caught:
        quantize(Stubborn(), [X], configs.xnnpack(), progress=False)
    assert not isinstance(caught.value, QuantmarkError)
