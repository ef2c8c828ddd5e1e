"""`check`: hold a quantized graph against what its backend's passes assume."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from ..configs.base import BackendConfig
from ..observers.errors import InputError
from ..observers.fields import got, require
from ..observers.table import RangeTable
from . import blocks, branches, calibration, contract, coverage, limits, observed, requantize, weights
from .findings import Finding, Report
from .program import erased_activation, open_programs
from .qdq import Facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx import GraphModule, Node

    from ..observers.table import Entry
    from .kinds import Kind
    from .program import Program

KINDS: Final[tuple[Kind, ...]] = (
    blocks.KIND,
    contract.KIND,
    calibration.KIND,
    observed.KIND,
    requantize.KIND,
    coverage.KIND,
    branches.KIND,
    limits.KIND,
    weights.KIND,
)
CODES: Final[Mapping[str, str]] = {code: meaning for kind in KINDS for code, meaning in kind.codes.items()}


def check(
    model: object,
    config: BackendConfig | None = None,
    ranges: RangeTable | None = None,
    *,
    suppress: Iterable[str] = (),
) -> Report:
    """Return what the output of any PT2E quantizer does wrong, or could do better, on a backend.

    Args:
        model: a GraphModule from `convert_pt2e`, an ExportedProgram of it, or an edge program (manager) before
            delegation.
        config: the backend's config. None stands for any backend: every fusion that one of them does is assumed,
            and an activation behind a weighted op to be dropped in favour of saturation.
        ranges: what `observe_ranges` measured on the float model, against which the qparams are held.
        suppress: patterns of findings to leave out: "QM201", "QM201:relu_*" or "*:relu_3".

    Raises:
        InputError: if an argument is of another kind, or a pattern names no code that there is.
        MissingRangeError: if no entry of the range table is for a node of the model.

    >>> check(converted, configs.xnnpack()).raise_if_unsafe()  # doctest: +SKIP
    """
    require(isinstance(suppress, Iterable), 'check() takes suppress as patterns, such as ["QM201:relu_*"]', suppress)
    patterns = (suppress,) if isinstance(suppress, str) else tuple(suppress)
    for pattern in patterns:
        require(isinstance(pattern, str), 'a pattern to suppress is text, such as "QM201:relu_*"', pattern)
        code = pattern.partition(":")[0] or "*"
        if not any(fnmatchcase(known, code) for known in CODES):
            raise InputError(f"suppress names {code!r}, which is no code; there are {', '.join(CODES)}")
    if not isinstance(config, BackendConfig | None):
        raise InputError(f"check() takes a config such as configs.xnnpack(), {got(config)}")
    if not isinstance(ranges, RangeTable | None):
        raise InputError(f"check() takes ranges as a RangeTable (see observe_ranges), {got(ranges)}")
    programs = open_programs(model)
    tops = [program for program in programs if not program.is_nested]
    findings: list[Finding] = []
    known: dict[Node, Entry] = {}
    if ranges is not None:
        findings += observed.unknown(ranges, tops, rewritten=config is not None and config.rewrite is not None)
        for program in tops:  # names in nested graphs are their own
            known |= observed.entries_of(list(program.model.graph.nodes), ranges)
    return _report(programs, config, known, findings).without(*patterns)


def check_calibrated(model: GraphModule, config: BackendConfig | None, ranges: RangeTable) -> Report:
    """Return what `check` does, with the ranges that the observers of this very graph saw."""
    erased = {node: found[0] for node in model.graph.nodes if (found := erased_activation(node))}
    names = {node: erased.get(node, node.name) for node in model.graph.nodes}
    known = {node: ranges[name] for node, name in names.items() if name in ranges}
    return _report(open_programs(model), config, known, [])


def _report(
    programs: Sequence[Program], config: BackendConfig | None, known: Mapping[Node, Entry], findings: list[Finding]
) -> Report:
    counts = {"quantizes": 0, "dequantizes": 0, "weighted ops": 0}
    for program in programs:
        facts = Facts(program, config, known)
        inside = f"{program.name}." if program.is_nested else ""
        for kind in KINDS:
            findings += [replace(found, node=inside + found.node) for found in kind.find(facts)]
        counts["quantizes"] += len(facts.quantizes)
        counts["dequantizes"] += len(facts.dequantizes)
        counts["weighted ops"] += len(facts.heads)
    return Report.of(findings, config.name if config else "", counts)
