"""Reports: order, suppression, JSON, text; and the forms in which a model may come."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import quantmark
from quantmark import InputError, UnsafeModelError, configs
from quantmark.checks import CODES, KINDS, Finding, Report, Severity, check
from support.flow import minmax_config, quantize
from support.planting import quantize_after, set_qparams, the

X = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)
GENERIC = minmax_config()


@cache
def _converted() -> GraphModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU6(), nn.Flatten(), nn.Linear(64, 4))
    return quantize(model.eval(), X, GENERIC).converted


@pytest.fixture
def graph() -> GraphModule:
    """A graph with two broken contracts and a warning."""
    graph = copy.deepcopy(_converted())
    set_qparams(quantize_after(the(graph, "relu")), zero_point=0, scale=0.02)
    set_qparams(quantize_after(the(graph, "hardtanh")), zero_point=-100)
    set_qparams(quantize_after(the(graph, "flatten")), scale=2.0**-12, zero_point=-100)
    return graph


def make(code: str, severity: Severity, node: str = "n", **numbers: float) -> Finding:
    return Finding(code=code, severity=severity, node=node, module_path="", message="m", mend="d", numbers=numbers)


def test_codes_are_unique_and_of_their_kind() -> None:
    assert len(CODES) == sum(len(kind.codes) for kind in KINDS)
    assert all(len(code) == 5 and code.startswith("QM") and meaning for code, meaning in CODES.items())


def test_the_worst_comes_first(graph: GraphModule) -> None:
    report = check(graph, GENERIC)
    assert [(f.code, f.node, f.severity.value) for f in report.findings] == [
        ("QM201", "relu", "error"),
        ("QM201", "hardtanh", "error"),
        ("QM303", "flatten", "warning"),
        ("QM501", "flatten", "warning"),
    ]
    assert report.findings[0].module_path == "1"
    assert not report.is_safe
    assert report.codes() == ["QM201", "QM303", "QM501"]


def test_an_unsafe_model_raises_with_every_error_and_how_to_go_on(graph: GraphModule) -> None:
    with pytest.raises(UnsafeModelError) as caught:
        check(graph, GENERIC).raise_if_unsafe()
    text = str(caught.value)
    assert text.startswith("2 unsafe findings:\n  QM201 relu (in 1): zero point 0 is not quant_min")
    assert "QM201 hardtanh (in 3)" in text
    assert "QM303" not in text
    assert 'suppress=["QM201:relu"]' in text
    clean = check(_converted(), GENERIC)
    assert clean.raise_if_unsafe() is clean


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        (["QM201"], ["QM303", "QM501"]),
        (["QM201:relu"], ["QM201", "QM303", "QM501"]),
        (["*:flatten"], ["QM201", "QM201"]),
        ([":flatten"], ["QM201", "QM201"]),
        (["QM2*:hard*", "QM5*"], ["QM201", "QM303"]),
        (["QM*"], []),
    ],
)
def test_suppression(graph: GraphModule, patterns: list[str], left: list[str]) -> None:
    report = check(graph, GENERIC, suppress=patterns)
    assert [f.code for f in report.findings] == left
    assert report.suppressed == 4 - len(left)
    assert f"{report.suppressed} suppressed" in str(report)
    assert check(graph, GENERIC).without(*patterns) == report
    if len(patterns) == 1:
        assert check(graph, GENERIC, suppress=patterns[0]) == report


def test_a_code_that_there_is_not_is_an_error(graph: GraphModule) -> None:
    with pytest.raises(InputError, match="'QM999', which is no code; there are QM101, QM102"):
        check(graph, GENERIC, suppress=["QM999"])


def test_json() -> None:
    findings = (make("QM302", Severity.ERROR, scale=math.inf), make("QM401", Severity.WARNING, loss_db=3.5))
    content = json.loads(Report.of(findings, "xnnpack", {"quantizes": 3}).to_json())
    assert content["schema"] == 1
    assert (content["backend"], content["safe"], content["suppressed"]) == ("xnnpack", False, 0)
    assert content["counts"] == {"quantizes": 3}
    assert [f["numbers"] for f in content["findings"]] == [{"scale": "inf"}, {"loss_db": 3.5}]
    assert set(content["findings"][0]) == {"code", "severity", "node", "module_path", "message", "mend", "numbers"}


def test_text() -> None:
    report = Report.of([make("QM501", Severity.INFO), make("QM201", Severity.ERROR, "a_long_name")], "", {"blocks": 2})
    assert str(report).splitlines() == [
        "severity  code   node         module  finding",
        "error     QM201  a_long_name          m",
        "info      QM501  n                    m",
        "1 error, 0 warnings, 1 info; looked at 2 blocks",
    ]
    assert str(Report(())) == "0 errors, 0 warnings, 0 info"
    assert str(make("QM501", Severity.INFO, loss_db=1.0)) == "QM501 n: m [loss_db=1]. d."


def test_every_form_of_a_model_says_the_same(graph: GraphModule) -> None:
    from executorch.exir import to_edge

    exported = torch.export.export(graph, X)
    edge = to_edge(exported)
    reports = [check(form, GENERIC) for form in (graph, exported, edge, edge.exported_program())]
    seen = [[(f.code, f.severity, f.module_path, f.numbers) for f in r.findings if f.code != "QM303"] for r in reports]
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert [r.counts["weighted ops"] for r in reports] == [3, 3, 3, 3]


@pytest.mark.parametrize("model", [nn.ReLU(), None, "model.pt2"])
def test_anything_else_is_refused(model: object) -> None:
    with pytest.raises(InputError, match="needs a converted GraphModule"):
        check(model)


def test_the_backend_is_named() -> None:
    assert check(_converted(), configs.xnnpack()).backend == "xnnpack"
    assert check(_converted()).backend == ""


def test_a_finding_in_a_branch_says_which() -> None:
    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.cond(
                x.sum() > 0, lambda v: self.conv(v).relu(), lambda v: self.conv(-v).relu(), (x,)
            )
            return y

    result = quantmark.quantize(Branched().eval(), [(X[0],), (-X[0],)], GENERIC, progress=False)
    assert result.report.findings == ()
    branch = result.model.false_graph_0
    assert isinstance(branch, GraphModule)
    set_qparams(quantize_after(the(branch, "relu")), zero_point=0)
    (found,) = check(result.model, GENERIC).findings
    assert (found.code, found.node) == ("QM201", "false_graph_0.relu")
    assert check(result.model, GENERIC, suppress=["QM201:false_graph_0.*"]).findings == ()


def test_every_code_is_planted_somewhere() -> None:
    """A code that no test of the checks names can't be told from one that is never found."""
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert [code for code in CODES if f'"{code}"' not in tests] == []
