"""Qparams against ranges that were measured apart: each defect planted by calibrating with other data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import quantmark
from quantmark import InputError, MissingRangeError, Range, RangeTable, configs, observe_ranges, sqnr_db
from quantmark.checks import Finding, Severity, check
from quantmark.configs import INT16_SYMMETRIC, BackendConfig
from quantmark.configs.base import BlockRules
from support.flow import minmax_config, pair_of, quantize
from support.planting import quantize_after, the

GENERIC = minmax_config()
CODES = {"QM308", "QM309", "QM310", "QM311", "QM312", "QM313"}


class Doubled(nn.Module):
    """Reads its input in one quantized op, whose output has twice the range."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x


def noise(seed: int = 0, rows: int = 64) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def converted(calibration: Tensor, config: BackendConfig = GENERIC, model: nn.Module | None = None) -> GraphModule:
    return quantize(model or Doubled(), (calibration,), config).converted


def table(data: Tensor, estimator: Any = "histogram", model: nn.Module | None = None) -> RangeTable:
    return observe_ranges(torch.export.export(model or Doubled(), (data,)), [data], estimator=estimator)


def found(graph: object, ranges: RangeTable, config: BackendConfig | None = GENERIC) -> list[Finding]:
    return [finding for finding in check(graph, config, ranges).findings if finding.code in CODES]


def told(findings: list[Finding]) -> list[tuple[str, str, Severity]]:
    return [(finding.code, finding.node, finding.severity) for finding in findings]


def test_the_table_that_it_was_calibrated_like_gives_no_finding() -> None:
    for config in (GENERIC, configs.xnnpack(), configs.xnnpack(estimator="moving_average")):
        assert found(converted(noise(), config), table(noise()), config) == []


@pytest.mark.parametrize("estimator", ["histogram", "minmax"])
def test_values_beyond_the_codes(estimator: str) -> None:
    """Clipping noise at four times the calibrated range costs what is predicted, by the histogram within 0.1 dB."""
    graph, data = converted(noise()), 4.0 * noise(1)
    findings = found(graph, table(data, estimator))
    assert told(findings) == [("QM308", "x", Severity.WARNING), ("QM308", "add", Severity.WARNING)]
    numbers = findings[0].numbers
    pair = pair_of(quantize_after(the(graph, "add").args[0].args[0].args[0]))  # type: ignore[union-attr, arg-type]
    assert numbers["beyond"] == pytest.approx(max(float(data.max()) - pair.largest, pair.smallest - float(data.min())))
    assert numbers["clipped"] == pytest.approx(0.73, abs=0.02)

    def measured(scale: float, zero_point: int) -> float:
        codes = torch.fake_quantize_per_tensor_affine(data, scale, zero_point, -128, 127)
        return float((codes - data).double().square().sum())

    whole = quantize(Doubled(), (data,), GENERIC).converted
    covers = pair_of(quantize_after(the(whole, "add").args[0].args[0].args[0]))  # type: ignore[union-attr, arg-type]
    loss = 10.0 * math.log10(measured(pair.scale, pair.zero_point) / measured(covers.scale, covers.zero_point))
    tolerance = 0.1 if estimator == "histogram" else 20.0  # spread evenly, more would lie beyond
    assert numbers["loss_db"] == pytest.approx(loss, abs=tolerance)
    assert loss > 30.0
    assert ("no histogram" in findings[0].message) == (estimator == "minmax")


def test_what_an_estimator_cuts_off_on_purpose_is_no_finding() -> None:
    """Least squared error clips the one far value of a million; a percentile clips by order, whatever it costs."""
    data = noise(rows=16384)
    data[0, 0] = 12.0
    best, percentile = configs.xnnpack(), configs.xnnpack(estimator="percentile")
    graph = converted(data, best)
    assert check(graph, best, table(data, "minmax")).at(Severity.WARNING) == ()
    assert found(graph, table(data), best) == []
    data[:, 0] = 1e4  # which squared error keeps
    graph = converted(data, percentile)
    data[0, 1] = 1e5
    assert set(told(found(graph, table(data), percentile))) <= {
        ("QM308", name, Severity.INFO) for name in ("x", "add")
    } | {("QM309", name, Severity.INFO) for name in ("x", "add")}


def test_outliers_that_a_histogram_would_cut_off() -> None:
    data = noise(rows=16384)
    data[0, 0] = 24.0
    findings = found(converted(data), table(data))
    assert told(findings) == [("QM309", "x", Severity.WARNING), ("QM309", "add", Severity.WARNING)]
    quieter = converted(data, configs.xnnpack())
    gain = sqnr_db(data + data, quieter(data)) - sqnr_db(data + data, converted(data)(data))
    assert findings[0].numbers["loss_db"] == pytest.approx(gain, abs=1.0)
    assert gain > 3.0
    assert found(converted(data), table(data, "minmax")) == []  # from minimum and maximum it can't be told


def test_a_few_values_so_large_that_they_are_worth_the_codes() -> None:
    """A heat map with one peak, or one wild sample: which, the numbers don't tell."""
    data = noise().abs()
    data[0, :3] = 1e4
    findings = found(converted(data), table(data))
    assert told(findings) == [("QM309", "x", Severity.INFO), ("QM309", "add", Severity.INFO)]
    assert findings[0].numbers["bulk_codes"] < 1.0
    assert 3.0 < findings[0].numbers["bulk_max"] < 5.0


def test_a_band_far_from_0() -> None:
    """Values in 100..101 keep 2.5 steps of int8; int16 has room enough."""
    data = torch.linspace(100.0, 101.0, 4096).reshape(64, 64)
    graph = converted(data)
    for estimator in ("minmax", "histogram"):
        findings = found(graph, table(data, estimator))
        assert told(findings) == [("QM310", "x", Severity.WARNING), ("QM310", "add", Severity.WARNING)]
        assert findings[0].numbers["codes"] == pytest.approx(255 / 101, rel=1e-3)
    varying = sqnr_db(data + data - 201.0, graph(data) - 201.0)
    assert findings[0].numbers["kept_db"] == pytest.approx(8.0, abs=0.1)
    assert findings[0].numbers["kept_db"] == pytest.approx(varying, abs=4.0)
    wide = minmax_config(INT16_SYMMETRIC)
    assert found(converted(data, wide), table(data), wide) == []
    assert found(converted(data - 100.5), table(data - 100.5)) == []


@pytest.mark.parametrize(
    ("value", "calibrated", "severity"),
    [(0.0, 0.0, Severity.WARNING), (2.0, 2.0, Severity.INFO), (2.0, 1.0, Severity.WARNING)],
)
def test_one_value_throughout(value: float, calibrated: float, severity: Severity) -> None:
    data = torch.full((4, 4), value)
    findings = found(converted(torch.full((4, 4), calibrated)), table(data))
    assert told(findings) == [("QM311", "x", severity), ("QM311", "add", severity)]
    assert ("beyond" in findings[0].numbers) == (value != calibrated)


def test_codes_that_nothing_uses() -> None:
    findings = found(converted(100.0 * noise()), table(noise()))
    assert told(findings) == [("QM312", "x", Severity.WARNING), ("QM312", "add", Severity.WARNING)]
    assert findings[0].numbers["loss_db"] == pytest.approx(40.0, abs=0.1)


class Joined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.tanh(), 30.0 * x.sigmoid()], 1)


def test_what_shares_with_larger_tensors_was_decided() -> None:
    graph = converted(noise(), model=Joined())
    findings = found(graph, table(noise(), model=Joined()))
    assert {finding.severity for finding in findings} <= {Severity.INFO}
    assert ("QM312", "tanh") in {(finding.code, finding.node) for finding in findings}


def test_a_requantized_tensor_is_known_by_its_own_name() -> None:
    class Requantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(1, 1, 1, bias=False)
            nn.init.ones_(self.a.weight)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.a(x))
            return torch.cat([y, x], 1).tanh() + (y - x)

    data = noise().reshape(1, 1, 64, 64)
    graph = quantize(Requantized(), (data,), GENERIC).converted
    ranges = observe_ranges(torch.export.export(Requantized(), (data,)), [data])
    assert found(graph, ranges) == []
    wider = RangeTable({name: ranges[name] if name != "relu" else ranges[name].merge(HUGE) for name in ranges})
    assert {node for code, node, _ in told(found(graph, wider)) if code == "QM308"} == {"relu"}


def test_an_op_whose_activation_was_erased_has_the_activations_range() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    config = minmax_config(blocks=BlockRules(erase_activations=True))
    graph = converted(noise(), config, model)
    assert "relu" not in {node.name for node in graph.graph.nodes}
    assert check(graph, config, table(noise(), model=model)).findings == ()
    assert [code for code, *_ in told(found(graph, table(4.0 * noise(), model=model)))] == ["QM308"] * 3


@pytest.mark.parametrize("config", [configs.xnnpack(), configs.cadence(), configs.xnnpack(estimator="minmax")])
def test_quantize_reports_what_it_observed(config: BackendConfig) -> None:
    """Without a table: by what the observers saw."""
    data = torch.linspace(100.0, 101.0, 4096).reshape(64, 64)
    result = quantmark.quantize(Doubled(), [data], config, progress=False)
    assert told(list(result.report.findings)) == [("QM310", name, Severity.WARNING) for name in ("x", "add")]
    assert quantmark.quantize(Doubled(), [noise()], config, progress=False).report.findings == ()


def test_names_in_nested_graphs_are_their_own() -> None:
    class Branched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + x
            return torch.cond(y.sum() > 0.0, lambda v: v + 100.0 * v, lambda v: v - v, (y,)).sigmoid()  # type: ignore[no-any-return]

    result = quantmark.quantize(Branched(), [noise(), -noise()], configs.xnnpack(), progress=False)
    assert [f for f in result.report.findings if f.code in CODES] == []
    ranges = observe_ranges(torch.export.export(Branched(), (noise(),)), [noise()])
    assert found(result.model, ranges, configs.xnnpack()) == []


HUGE = RangeTable.of({"relu": (0.0, 1e3)})["relu"]


def test_a_stale_table() -> None:
    graph = converted(noise())
    stale = table(noise()).merge(RangeTable.of({"conv2d_7": (0.0, 1.0)}))
    (finding,) = found(graph, stale)
    assert (finding.code, finding.severity) == ("QM313", Severity.WARNING)
    assert "1 of 3 entries of the range table are for nodes that the graph lacks: conv2d_7" in finding.message
    with pytest.raises(MissingRangeError, match=r"no entry of the range table is for a node .*it names conv2d_7"):
        check(graph, GENERIC, RangeTable.of({"conv2d_7": Range(0.0, 1.0)}))
    assert found(graph, RangeTable()) == []


def test_every_form_of_a_model_is_known_by_the_first_names(tmp_path: Any) -> None:
    """Exporting again, saving, and the edge name nodes afresh; a table knows those of the float model."""
    from executorch.exir import to_edge

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    graph, ranges = converted(noise(), model=model), table(4.0 * noise(), model=model)
    exported = torch.export.export(graph, (noise(),))
    torch.export.save(exported, tmp_path / "model.pt2")
    forms = [graph, exported, torch.export.load(tmp_path / "model.pt2"), exported.module(), to_edge(exported)]
    seen = [[(f.code, f.severity, f.numbers) for f in found(form, ranges)] for form in forms]
    assert [code for code, *_ in seen[0]] == ["QM308"] * 4
    for each in seen[1:]:
        assert each == seen[0]


def test_other_things_than_a_config_and_a_table_are_refused() -> None:
    graph = converted(noise())
    wrong: list[tuple[Any, Any, str]] = [
        (3, None, r"check\(\) takes a config such as configs.xnnpack\(\), got 3 \(int\)"),
        (configs.xnnpack, None, r"got the function xnnpack itself: call it, xnnpack\(\)"),
        (None, {"x": (0, 1)}, r"check\(\) takes ranges as a RangeTable \(see observe_ranges\), got \{'x': \(0, 1\)\}"),
    ]
    for config, ranges, message in wrong:
        with pytest.raises(InputError, match=message):
            check(graph, config, ranges)
