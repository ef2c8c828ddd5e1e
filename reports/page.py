"""One HTML page on what was decided, measured and found: it holds all that it shows, and needs no network."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

from .decisions import decision_card
from .explanation import Status
from .html import Cell, chip, decibel_cell, heading, place, qparams, table
from .measured import decibels
from .overview import level, overview
from .script import POLICY, SCRIPT
from .style import STYLE
from .words import ROOT, counted, said

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..checks import Report
    from .explanation import Explanation, FusedBlock, Op
    from .measured import Measurement
    from .sensitive import Sensitivity

_MODULES: Final = 16  # foldable lists of ops, at most, unless the model has more modules side by side
_SHOWN: Final = frozenset({Status.BLOCK, Status.QUANTIZED, Status.JOINED})  # the ops that have a row of SQNR


def page(
    found: Explanation, report: Report | None = None, sensitivity: Sensitivity | None = None, *, title: str = ""
) -> str:
    """Return an explanation as one HTML page.

    Args:
        found: what `explain` returned; SQNR stands beside the predicted losses where it holds what was measured.
        report: what the checks found, to be listed.
        sensitivity: what each part costs by itself, to be listed.
        title: of the page, the name of the model say.
    """
    name = title or "quantmark"
    modules = _by_prefix(found)
    anchors = {op.node: f"op{index}" for index, op in enumerate(found.ops)}
    module_of = {op.node: module or ROOT for module, ops in modules.items() for op in ops} if len(modules) > 1 else {}
    headings = module_of | {block.output: module_of[block.members[0][0]] for block in found.blocks if module_of}
    sections = {
        "Findings": _findings(report) if report is not None else "",
        "Messages": _messages(found.messages),
        "Accuracy": _accuracy(found, found.measured) if found.measured is not None else "",
        "Sensitivity": _sensitivity(sensitivity) if sensitivity is not None else "",
        "Graph": _graph(found, anchors, headings),
        "Branches and joins": _decided(found),
        "Blocks": _blocks(found),
        "Every op": _modules(found, modules, anchors),
    }
    present = {heading: section for heading, section in sections.items() if section}
    body = "\n".join([_header(found, report, name), _contents(present), *present.values()])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: quantization</title><style>{STYLE}</style></head>\n"
        f'<body><input type="checkbox" id="log" aria-label="logarithmic axes"><main>\n{body}\n</main>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _header(found: Explanation, report: Report | None, name: str) -> str:
    seen, cells = found.observed
    state = "all ranges observed" if seen == cells else f"{seen} of {cells} activations observed"
    verdict = ""
    if report is not None:
        verdict = chip("safe", "good") if report.is_safe else chip("unsafe", "error")
    tiles = "".join(f"<li><b>{n}</b><span>{said(n, what)}</span></li>" for what, n in found.counts().items() if n)
    measured = found.measured
    if measured is not None and measured.outputs:
        several = "lowest SQNR of an output" if len(measured.outputs) > 1 else "SQNR of the output"
        worst = decibels(measured.worst_db)
        unit = " dB" if math.isfinite(measured.worst_db) else ""
        tile = f'<li class="first"><b class="{level(measured.worst_db)}">{worst}{unit}</b><span>{several}</span></li>'
        tiles = tile + tiles
    return (
        f'<header><div class="head"><h1>{escape(name)}</h1>{verdict}</div>'
        f'<p class="soft">for {escape(found.backend or "no global config")}, {counted(len(found.ops), "ops")}, '
        f'{state}</p><ul class="tiles">{tiles}</ul></header>'
    )


def _anchor(text: str) -> str:
    return text.lower().replace(" ", "-")


def _contents(sections: dict[str, str]) -> str:
    links = "".join(f'<a href="#{_anchor(text)}">{text}</a>' for text in sections)
    return f'<nav aria-label="Sections">{links}</nav>'


def _findings(report: Report) -> str:
    rows = []
    for finding in report.findings:
        mend = escape(finding.mend[:1].upper() + finding.mend[1:])
        rows.append(
            (
                chip(finding.severity.value, finding.severity.value),
                f"<code>{escape(finding.code)}</code>",
                place(finding.node, finding.module_path),
                f"{escape(finding.message)}. <span class=soft>{mend}.</span>",
            )
        )
    listed = (
        table(("severity", "code", "node", "finding"), rows, label="Findings", sort=True, wide=True) if rows else ""
    )
    return f"{heading('Findings', 'findings')}<p class=soft>{escape(report.summary())}</p>{listed}"


def _messages(messages: tuple[str, ...]) -> str:
    items = "".join(f'<div class="card look">{escape(message)}</div>' for message in messages)
    return f"{heading('Messages', 'messages')}{items}" if items else ""


def _decided(found: Explanation) -> str:
    if not found.decisions:
        return ""
    switch = '<label for="log" class="switch" aria-hidden="true"><span>linear</span><span>log</span></label>'
    title = f'<div class="title">{heading("Branches and joins", "branches-and-joins")}{switch}</div>'
    return "\n".join([title, *(decision_card(found, index) for index in range(len(found.decisions)))])


# -- accuracy -------------------------------------------------------------------------------------------------


def _accuracy(found: Explanation, measured: Measurement) -> str:
    about = (
        "Signal to quantization noise, float graph against quantized graph, "
        f"on {counted(measured.batches, 'batches')}. Rounding alone: what the tensor's own rounding would leave "
        "if all else were float. 6.02 dB is one bit."
    )
    listed = table(
        ("tensor", "what", "read as", "SQNR dB", "rounding alone dB"),
        _sqnr_rows(found, measured),
        label="SQNR per output, block and op",
        sort=True,
    )
    return f"{heading('Accuracy', 'accuracy')}<p class=soft>{about}</p>{listed}"


def _sqnr_rows(found: Explanation, measured: Measurement) -> Iterator[tuple[Cell | str, ...]]:
    titles = {block.output: block.title for block in found.blocks}
    ops = {op.node: op for op in found.ops}
    for output in measured.outputs:
        module = ops[output.node].module if output.node in ops else ""
        what = f"<b>output {output.index}</b>"
        yield place(output.node, module), what, "", decibel_cell(output.sqnr_db, meter=True), Cell("", math.nan)
    for op in found.ops:
        if op.status not in _SHOWN:
            continue
        readings = measured.readings(op.node)
        for each in [reading for reading in readings if reading.numbers is not None] or readings:
            yield (
                place(op.node, op.module),
                escape(titles.get(op.node, op.op)),
                f"<span class=mono>{escape(str(each.numbers))}</span>"
                if each.numbers
                else "<span class=soft>float</span>",
                decibel_cell(each.sqnr_db, meter=True),
                decibel_cell(each.rounding_db),
            )


def _sensitivity(found: Sensitivity) -> str:
    together = (decibel_cell(db, meter=True) for db in found.together_db)
    rows: list[list[Cell | str]] = [["<b>all together</b>", "", *together]]
    for part in found.parts:
        name = place(part.name, part.module) if part.kind != "module" else f"<code>{escape(part.name or ROOT)}</code>"
        rows.append([name, escape(part.title), *(decibel_cell(db, meter=True) for db in part.outputs_db)])
    about = (
        f"SQNR in dB at the outputs with one {found.by} quantized at a time and all else float, on "
        f"{counted(found.batches, 'batches')}; the worst first."
    )
    headings = (found.by, "what", *found.outputs)
    listed = table(headings, rows, label="Sensitivity", sort=True)
    return f"{heading('Sensitivity', 'sensitivity')}<p class=soft>{about}</p>{listed}"


# -- graph ----------------------------------------------------------------------------------------------------


_KINDS: Final = (
    ("block", "fused block"),
    ("quantized", "quantized op"),
    ("shared", "shares its qparams"),
    ("moved", "qparams pass through"),
    ("joined", "join"),
    ("float", "float"),
)


def _graph(found: Explanation, anchors: dict[str, str], headings: dict[str, str]) -> str:
    if not found.ops:
        return ""
    marks = "".join(f'<span><i class="key {kind}"></i>{text}</span>' for kind, text in _KINDS)
    lines = '<span><i class="line f"></i>read in float</span><span><i class="line r"></i>requantized</span>'
    return (
        f'{heading("Graph", "graph")}<div class="legend">{marks}{lines}</div>'
        f'<div class="scroll map-box" role=region tabindex=0 aria-label="Graph">'
        f"{overview(found, anchors, headings)}</div>"
    )


# -- blocks and ops -------------------------------------------------------------------------------------------


def _blocks(found: Explanation) -> str:
    if not found.blocks:
        return ""
    headings = ["output", "block", "contract", "saturation", "output qparams"]
    unfused, measured = any(block.unfused for block in found.blocks), found.measured
    headings += ["SQNR dB"] * (measured is not None) + ["not fused, because"] * unfused
    rows = []
    for block in found.blocks:
        row: list[Cell | str] = [
            place(block.output, block.module),
            escape(block.title),
            f"<span class=mono>{escape(block.contract)}</span>" if block.contract else "<span class=soft>none</span>",
            _holds(block),
            qparams(found, block.group),
        ]
        row += [decibel_cell(measured.of(block.output))] if measured is not None else []
        row += [f"<span class=soft>{escape(block.unfused)}</span>"] if unfused else []
        rows.append(row)
    return f"{heading('Blocks', 'blocks')}{table(headings, rows, label='Blocks', sort=True, wide=True)}"


def _holds(block: FusedBlock) -> str:
    if not block.contract:
        return ""
    if block.holds is None:
        return chip("not observed" if block.group else "float")
    return chip("is the clamp", "good") if block.holds else chip("is not the clamp", "error")


def _by_prefix(found: Explanation) -> dict[str, list[Op]]:
    """Return the ops by the first parts of their module's path: as many as make no more than `_MODULES` groups."""
    groups: dict[str, list[Op]] = {}
    for depth in range(max((op.module.count(".") + 1 for op in found.ops), default=1), 0, -1):
        groups = {}
        for op in found.ops:
            groups.setdefault(".".join(op.module.split(".")[:depth]), []).append(op)
        if len(groups) <= _MODULES:
            break
    return groups


def _modules(found: Explanation, modules: dict[str, list[Op]], anchors: dict[str, str]) -> str:
    legend = "".join(
        f'<span><i class="dot {kind}"></i>{text}</span>'
        for kind, text in (
            ("block", "quantized"),
            ("fused", "inside a block"),
            ("moved", "qparams pass through"),
            ("float", "float"),
        )
    )
    listed = "".join(_module(found, name, ops, anchors) for name, ops in modules.items())
    return f'{heading("Every op, by module", "every-op")}<div class="legend">{legend}</div>{listed}'


def _module(found: Explanation, name: str, ops: list[Op], anchors: dict[str, str]) -> str:
    dots = "".join(f'<i class="dot {op.status.value}" title="{escape(op.node)}"></i>' for op in ops)
    measured = found.measured
    headings = ["node", "op", "what", "output", *(["SQNR dB"] if measured is not None else []), "why"]
    rows = []
    for op in ops:
        row: list[Cell | str] = [place(op.node, op.module), escape(op.op), escape(op.status.value)]
        row.append(qparams(found, op.output) if op.output else "")
        row += [decibel_cell(measured.of(op.node))] if measured is not None else []
        rows.append([*row, escape("; ".join(op.why))])
    label = name or ROOT
    listed = table(headings, rows, label=f"Ops of {label}", ids=[anchors[op.node] for op in ops], sort=True, wide=True)
    return (
        f'<details><summary><code>{escape(label)}</code> <span class="soft">{counted(len(ops), "ops")}</span>'
        f'<span class="strip">{dots}</span></summary>{listed}</details>'
    )
