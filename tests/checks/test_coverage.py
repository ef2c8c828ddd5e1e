"""Float islands, graphs in which nothing is quantized, and graphs that can't be looked into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantmark import UnsafeModelError, configs
from quantmark.checks import Severity, check
from support.flow import calls, export, minmax_config, quantize
from support.planting import bypass, quantize_after, set_qparams, the

X = (torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)),)
GENERIC = minmax_config()
XNNPACK = configs.xnnpack(estimator="minmax")


class Island(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b((y.sigmoid().permute(0, 1, 3, 2).exp() - 1.0).cos())


def test_nothing_is_quantized() -> None:
    report = check(export(Island().eval(), X))
    (found,) = report.findings
    assert (found.code, found.severity) == ("QM601", Severity.ERROR)
    with pytest.raises(UnsafeModelError, match="nothing is quantized"):
        report.raise_if_unsafe()


def test_nothing_is_quantized_because_all_is_nested() -> None:
    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                return torch.relu(x).exp()

    (found,) = check(export(Hidden(), X)).findings
    assert found.code == "QM601"
    assert "2 ops are in nested graphs" in found.message


def test_an_island() -> None:
    graph = quantize(Island().eval(), X, GENERIC).converted
    assert check(graph, GENERIC).findings == ()  # sigmoid, exp, sub, cos: each between its own pairs
    for name in ("sigmoid", "permute", "exp", "sub"):
        bypass(quantize_after(the(graph, name)))
    (found,) = check(graph, GENERIC).findings
    assert (found.code, found.node, found.severity) == ("QM603", "sigmoid", Severity.INFO)
    assert found.message == "4 ops run in float between quantized ones: sigmoid, exp, sub, cos"
    assert found.numbers == {"ops": 4.0}


def test_an_op_that_the_backend_runs_in_float() -> None:
    graph = quantize(Island().eval(), X, GENERIC).converted
    found = check(graph, XNNPACK).findings
    assert [f.message for f in found if f.code == "QM603"] == [
        f"xnnpack runs {name} in float, between quantized ops: {name}" for name in ("sigmoid", "exp", "cos")
    ]


def test_float_ends_are_no_islands() -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            return self.conv(x.cos().sin()).cos().sin()

    assert check(quantize(Ends().eval(), X, XNNPACK).converted, XNNPACK).findings == ()


def test_both_branches_of_a_cond_are_looked_into() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            return torch.cond(x.sum() > 0, lambda t: t.relu(), lambda t: t.neg(), (y,))

    graph = quantize(Either().eval(), X, GENERIC, batches=[X, (-X[0].abs(),), (X[0].abs(),)]).converted
    assert check(graph, GENERIC).findings == ()
    bodies = [m for name, m in graph.named_modules() if name and isinstance(m, torch.fx.GraphModule)]
    (relu,) = [node for body in bodies for node in calls(body, "relu")]
    set_qparams(quantize_after(relu), scale=1.0, zero_point=0)
    assert [f.code for f in check(graph, GENERIC).findings] == ["QM301"]


def test_a_delegated_graph_is_refused() -> None:
    from executorch.exir.delegate import executorch_call_delegate

    graph = export(nn.Sequential(nn.ReLU()), X)
    relu = the(graph, "relu")
    relu.target, relu.args = executorch_call_delegate, (relu.args[0], relu.args[0])
    (found,) = check(graph).findings
    assert (found.code, found.severity) == ("QM602", Severity.ERROR)
