"""One HTML page on what was decided and found: it holds all that it shows, and needs neither network nor scripts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from .axis import Axis
from .style import GROUP_COLOURS, STYLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..checks import Report
    from ..observers.rules import Decision
    from .explanation import Explanation, FusedBlock, Op

_MODULES: Final = 16  # foldable lists of ops, at most, unless the model has more modules side by side


def page(found: Explanation, report: Report | None = None, *, title: str = "") -> str:
    """Return an explanation as one HTML page, with the findings of the checks if there are any."""
    heading = title or "quantmark"
    decisions = [_decision(found, decision) for decision in found.decisions]
    parts = [
        _header(found, report, heading),
        _findings(report) if report is not None else "",
        _messages(found.messages),
        *(_decided(decisions) if decisions else []),
        _blocks(found),
        _modules(found),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}: quantization</title><style>{STYLE}</style></head>\n"
        f'<body><input type="checkbox" id="log" aria-label="logarithmic axes"><main>\n{body}\n</main></body></html>\n'
    )


def _header(found: Explanation, report: Report | None, heading: str) -> str:
    seen, cells = found.observed
    state = "all ranges observed" if seen == cells else f"{seen} of {cells} activations observed"
    verdict = ""
    if report is not None:
        verdict = _chip("safe", "good") if report.is_safe else _chip("unsafe", "error")
    tiles = "".join(f"<li><b>{count}</b><span>{what}</span></li>" for what, count in found.counts().items() if count)
    return (
        f'<header><div class="head"><h1>{escape(heading)}</h1>{verdict}</div>'
        f'<p class="soft">for {escape(found.backend or "no global config")}, {len(found.ops)} ops, {state}</p>'
        f'<ul class="tiles">{tiles}</ul></header>'
    )


def _findings(report: Report) -> str:
    rows = [
        (
            _chip(finding.severity.value, finding.severity.value),
            f"<code>{escape(finding.code)}</code>",
            _place(finding.node, finding.module_path),
            f"{escape(finding.message)}. <span class=soft>{escape(finding.mend)}.</span>",
        )
        for finding in report.findings
    ]
    table = _table(("", "code", "node", "finding"), rows) if rows else ""
    return f"<h2>Findings</h2><p class=soft>{escape(report.summary())}</p>{table}"


def _messages(messages: tuple[str, ...]) -> str:
    items = "".join(f'<div class="card look">{escape(message)}</div>' for message in messages)
    return f"<h2>Messages</h2>{items}" if items else ""


# -- decisions ------------------------------------------------------------------------------------------------


def _decided(cards: list[str]) -> list[str]:
    switch = '<label for="log" class="switch" aria-hidden="true"><span>linear</span><span>log</span></label>'
    return [f'<div class="title"><h2>Branches and joins</h2>{switch}</div>', *cards]


def _decision(found: Explanation, decision: Decision) -> str:
    rejected = "".join(
        f"<li>not <b>{escape(outcome.lower())}</b>: {escape(why)}</li>" for outcome, why in decision.rejected
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in decision.notes)
    more = f"<ul>{rejected}{notes}</ul>" if rejected or notes else ""
    loss = (
        f'<span class="chip">worst predicted loss {decision.worst_loss_db:.2f} dB</span>' if decision.losses_db else ""
    )
    look = _chip("costs more than its budget", "warning") if decision.finding else ""
    return (
        f'<section class="card{" look" if decision.finding else ""}"><div class="head">'
        f"<h3><code>{escape(decision.where)}</code></h3>{_chip(decision.kind)}"
        f"{_chip(decision.outcome.value, 'outcome')}{loss}{look}</div>"
        f"<p>{escape(decision.reason)}</p>{more}{_plot(found, decision)}</section>"
    )


def _plot(found: Explanation, decision: Decision) -> str:
    """Return the members' ranges as bars on one axis, linear and logarithmic, coloured by group."""
    if not decision.ranges:
        return ""
    ranges = [range_ for _, range_ in decision.ranges]
    linear, log = Axis.of(ranges), Axis.of(ranges, log=True)
    group_of = _group_numbers(found, decision)
    losses = dict(decision.losses_db)
    rows = []
    for name, (low, high) in decision.ranges:
        index = group_of.get(name)
        colour = "float-bar" if index is None else f"g{index % GROUP_COLOURS}"
        places = f"--a:{linear.percent(low):.2f};--w:{linear.percent(high) - linear.percent(low):.2f};"
        places += f"--la:{log.percent(low):.2f};--lw:{log.percent(high) - log.percent(low):.2f}"
        group = (
            "float" if index is None else f'<b class="t{index % GROUP_COLOURS}">{_group_name(found, name, index)}</b>'
        )
        loss = f"{losses[name]:.2f} dB" if name in losses and index is not None else ""
        rows.append(
            f'<div class="row"><code class="name" title="{escape(name)}">{escape(_label(name))}</code>'
            f'<div class="track">{_zero(linear, log)}<div class="bar {colour}" style="{places}"></div></div>'
            f'<div class="numbers"><span>[{low:.4g}, {high:.4g}]</span><span class="group">{group}</span>'
            f'<span class="loss">{loss}</span></div></div>'
        )
    ticks = "".join(_ticks(linear, "linear")) + "".join(_ticks(log, "log"))
    rows.append(f'<div class="row"><span class="name"></span><div class="axis">{ticks}</div></div>')
    return f'<div class="plot">{"".join(rows)}</div>'


def _group_name(found: Explanation, cell: str, number: int) -> str:
    """Return "group 1", with its dtype where that is not int8."""
    numbers = next((group.numbers for group in found.groups.values() if cell in group.cells), None)
    dtype = "" if numbers is None or numbers.dtype == "int8" else f"{numbers.dtype} "
    return f"{dtype}group {number + 1}"


def _group_numbers(found: Explanation, decision: Decision) -> dict[str, int]:
    """Return the number of each quantized member's group, from 0: the decision's groups first, then any others."""
    group_of = {cell: name for name, group in found.groups.items() for cell in group.cells}
    members = [name for group in decision.groups for name in group]
    members += [name for name, _ in decision.ranges if name not in members]
    numbers: dict[str, int] = {}
    for name in members:
        if name in group_of:
            numbers.setdefault(group_of[name], len(numbers))
    return {name: numbers[group_of[name]] for name in members if name in group_of}


def _zero(linear: Axis, log: Axis) -> str:
    return f'<div class="zero" style="--a:{linear.percent(0.0):.2f};--la:{log.percent(0.0):.2f}"></div>'


def _ticks(axis: Axis, kind: str) -> Iterator[str]:
    for tick in axis.ticks():
        yield f'<span class="tick {kind}" style="--a:{axis.percent(tick):.2f}">{tick:g}</span>'


def _label(cell: str) -> str:
    """Return the name of a cell without what only tells schemes apart."""
    return cell.partition("@")[0]


# -- blocks and ops -------------------------------------------------------------------------------------------


def _blocks(found: Explanation) -> str:
    rows = [
        (
            _place(block.output, block.module),
            escape(block.title),
            f"<span class=mono>{escape(block.contract)}</span>" if block.contract else "<span class=soft>none</span>",
            _holds(block),
            _qparams(found, block.group),
            f"<span class=soft>{escape(block.unfused)}</span>" if block.unfused else "",
        )
        for block in found.blocks
    ]
    if not rows:
        return ""
    headings = ("output", "block", "contract", "saturation", "output qparams", "not fused, because")
    kept = [index for index in range(len(headings)) if index < 5 or any(row[5] for row in rows)]
    return f"<h2>Blocks</h2>{_table([headings[i] for i in kept], ([row[i] for i in kept] for row in rows))}"


def _holds(block: FusedBlock) -> str:
    if not block.contract:
        return ""
    if block.holds is None:
        return _chip("not observed" if block.group else "float")
    return _chip("is the clamp", "good") if block.holds else _chip("is not the clamp", "error")


def _qparams(found: Explanation, name: str) -> str:
    group = found.groups.get(name)
    if group is None or group.numbers is None:
        return f"<span class=soft>{'float' if not name else 'not observed'}</span>"
    numbers = group.numbers
    text = f"<span class=mono>{escape(str(numbers))}</span>"
    if numbers.channels > 1 or numbers.zero_point is None:
        return text
    low = numbers.scale * (numbers.quant_min - numbers.zero_point)
    high = numbers.scale * (numbers.quant_max - numbers.zero_point)
    return f'{text}<br><span class="soft mono">[{low:.4g}, {high:.4g}]</span>'


def _modules(found: Explanation) -> str:
    legend = "".join(
        f'<span><i class="dot {kind}"></i>{text}</span>'
        for kind, text in (
            ("block", "quantized"),
            ("fused", "inside a block"),
            ("moved", "qparams pass through"),
            ("float", "float"),
        )
    )
    modules = "".join(_module(found, name, ops) for name, ops in _by_prefix(found).items())
    return f'<h2>Every op, by module</h2><div class="legend">{legend}</div>{modules}'


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


def _module(found: Explanation, name: str, ops: list[Op]) -> str:
    dots = "".join(f'<i class="dot {op.status.value}" title="{escape(op.node)}"></i>' for op in ops)
    rows = (
        (
            _place(op.node, op.module),
            escape(op.op),
            escape(op.status.value),
            _qparams(found, op.output) if op.output else "",
            escape("; ".join(op.why)),
        )
        for op in ops
    )
    count = f"{len(ops)} op{'s' if len(ops) > 1 else ''}"
    return (
        f'<details><summary><code>{escape(name or "(root)")}</code> <span class="soft">{count}</span>'
        f'<span class="strip">{dots}</span></summary>'
        f"{_table(('node', 'op', 'what', 'output', 'why'), rows)}</details>"
    )


def _place(node: str, module: str) -> str:
    inside = f"<br><span class=soft>{escape(module)}</span>" if module else ""
    return f"<code>{escape(node)}</code>{inside}"


def _chip(text: str, kind: str = "") -> str:
    return f'<span class="chip {kind}">{escape(text)}</span>'


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; the cells are HTML already."""
    head = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
