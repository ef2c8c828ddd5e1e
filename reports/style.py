"""The look of the page: one style sheet, light and dark, for wide and narrow windows, without scripts."""

from typing import Final

GROUP_COLOURS: Final = 8

STYLE: Final = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1b2230; --soft: #5a6475; --line: #e0e4ea;
  --track: #eef1f5; --zero: #7d8899; --red: #b3261e; --red-bg: #fbe9e7; --amber: #8a5a00; --amber-bg: #fdf1d8;
  --green: #1e6b3a; --green-bg: #e3f3e8; --accent: #2458c5;
  --g0: #3367d6; --g1: #c4541a; --g2: #1a7f4f; --g3: #8e44ad; --g4: #8f6800; --g5: #0b7586; --g6: #c2306b;
  --g7: #6b7a1f; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161d; --card: #1a2029; --ink: #e6eaf0; --soft: #9aa5b5;
  --line: #2c3542; --track: #232b36; --zero: #6f7c8f; --red: #ff9a8f; --red-bg: #43211f; --amber: #f2c46d;
  --amber-bg: #3b2f17; --green: #86d9a3; --green-bg: #1b3626; --accent: #8db2ff;
  --g0: #7aa5ff; --g1: #f0935c; --g2: #5cc795; --g3: #c58be0; --g4: #e0b84a; --g5: #56c5d6; --g6: #f07fae;
  --g7: #b3c258; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); line-height: 1.45;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 18px 0 0; font-size: .9rem; }
a { color: var(--accent); text-decoration-thickness: 1px; text-underline-offset: 3px; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 4px; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
p { margin: 6px 0; }
code, .mono { font-family: ui-monospace, "SF Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .87em;
  overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(124px, 1fr)); gap: 10px;
  margin: 18px 0 0; padding: 0; list-style: none; }
.tiles li { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 8px 14px; }
.tiles b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: .82rem; }
.tiles .first { border-color: var(--accent); }
.low { color: var(--red); } .mid { color: var(--amber); } .high { color: var(--green); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px;
  margin: 0 0 14px; }
.card.look { border-left: 4px solid var(--amber); }
.head { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: baseline; }
.chip { border-radius: 999px; padding: 1px 10px; font-size: .8rem; background: var(--track); color: var(--soft);
  white-space: nowrap; }
.chip.outcome { background: var(--accent); color: var(--card); font-weight: 600; }
.chip.error { background: var(--red-bg); color: var(--red); font-weight: 600; }
.chip.warning { background: var(--amber-bg); color: var(--amber); font-weight: 600; }
.chip.good { background: var(--green-bg); color: var(--green); font-weight: 600; }
.plot { margin-top: 12px; }
.row { display: grid; grid-template-columns: minmax(90px, 190px) 1fr 286px; gap: 4px 14px; align-items: center;
  padding: 3px 0; }
.row > .numbers { font-variant-numeric: tabular-nums; font-size: .84rem; color: var(--soft); display: grid;
  grid-template-columns: 1fr 66px 68px; gap: 10px; white-space: nowrap; }
.measured .row { grid-template-columns: minmax(90px, 190px) 1fr 430px; }
.measured .numbers { grid-template-columns: 1fr 66px 68px 68px 58px; }
.numbers .loss { text-align: right; color: var(--ink); }
.numbers .group { text-align: right; }
.titles .numbers, .titles .numbers .loss { color: var(--soft); font-size: .76rem; }
.track { position: relative; height: 18px; background: var(--track); border-radius: 4px; }
.bar, .zero, .tick { position: absolute; }
.bar { top: 3px; bottom: 3px; left: calc(var(--a) * 1%); width: calc(var(--w) * 1%); min-width: 3px;
  border-radius: 3px; }
.zero { top: -3px; bottom: -3px; width: 1px; background: var(--zero); left: calc(var(--a) * 1%); }
.axis { position: relative; height: 18px; font-size: .74rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.tick { left: calc(var(--a) * 1%); transform: translateX(-50%); white-space: nowrap; }
.tick.log { display: none; }
#log:checked ~ main .bar { left: calc(var(--la) * 1%); width: calc(var(--lw) * 1%); }
#log:checked ~ main .zero { left: calc(var(--la) * 1%); }
#log:checked ~ main .tick.log { display: inline; }
#log:checked ~ main .tick.linear { display: none; }
#log { position: absolute; opacity: 0; pointer-events: none; }
.switch { display: inline-flex; border: 1px solid var(--line); border-radius: 999px; overflow: hidden;
  cursor: pointer;
  font-size: .82rem; background: var(--card); user-select: none; }
.switch span { padding: 3px 12px; }
.switch span:first-child, #log:checked ~ main .switch span:last-child { background: var(--accent);
  color: var(--card); }
#log:checked ~ main .switch span:first-child { background: none; color: inherit; }
#log:focus-visible ~ main .switch { outline: 2px solid var(--accent); outline-offset: 2px; }
.title { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; margin: 36px 0 12px; }
.title h2 { margin: 0; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.scroll.tall { max-height: 620px; overflow: auto; }
.scroll thead th { position: sticky; top: 0; background: var(--card); z-index: 1; box-shadow: 0 1px var(--line); }
table { border-collapse: collapse; width: 100%; font-size: .89rem; }
th, td { text-align: left; padding: 7px 12px; border-top: 1px solid var(--line); vertical-align: top; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; white-space: nowrap; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; margin: 0; cursor: pointer; }
th button::after { content: "\\2195"; opacity: .45; margin-left: 6px; }
th[aria-sort=ascending] button::after { content: "\\2191"; opacity: 1; }
th[aria-sort=descending] button::after { content: "\\2193"; opacity: 1; }
tr:target td { background: var(--amber-bg); }
td > code { white-space: nowrap; }
.db { font-weight: 600; }
.meter { display: block; width: 90px; height: 4px; border-radius: 2px; background: var(--track); margin-top: 5px; }
.meter i { display: block; height: 4px; border-radius: 2px; background: currentColor; }
td.num { font-variant-numeric: tabular-nums; white-space: nowrap; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 0 0 8px; }
summary { cursor: pointer; display: flex; flex-wrap: wrap; gap: 4px 10px; align-items: center; }
summary::before { content: "\\25B8"; color: var(--soft); width: .7em; }
details[open] > summary::before { content: "\\25BE"; }
summary::-webkit-details-marker { display: none; }
details:not(.card) > summary { padding: 8px 14px; }
details.card:not([open]) { padding-top: 9px; padding-bottom: 9px; margin-bottom: 8px; }
details .scroll { border: 0; border-radius: 0; border-top: 1px solid var(--line); }
details .strip { margin-left: auto; display: flex; flex-wrap: wrap; gap: 2px; }
.dot { width: 9px; height: 14px; border-radius: 2px; background: var(--zero); }
.dot.block, .dot.fused, .dot.quantized { background: var(--g2); }
.dot.fused { opacity: .55; }
.dot.moved, .dot.joined { background: var(--g0); }
.dot.float { background: var(--g4); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .82rem; color: var(--soft); margin: 0 0 10px; }
.map-box { padding: 12px; width: fit-content; max-width: 100%; }
.map { display: flex; flex-wrap: wrap; gap: 12px 18px; }
.map svg { display: block; flex: none;
  font: 11px ui-monospace, "SF Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.map text { fill: var(--ink); }
.map .m { fill: var(--soft); }
.map .h { fill: var(--soft); font-weight: 700; }
.map .d { text-anchor: end; font-weight: 700; }
.map .d.low { fill: var(--red); } .map .d.mid { fill: var(--amber); } .map .d.high { fill: var(--green); }
.map a:hover text { text-decoration: underline; }
.map .e { fill: none; stroke: var(--zero); stroke-width: 1.4; }
.map .e.f { stroke: var(--g4); stroke-dasharray: 3 2; }
.map .e.r { stroke: var(--red); stroke-width: 2; }
.map .k { stroke: var(--card); stroke-width: 1; fill: var(--zero); }
.map .k.block, .map .k.quantized { fill: var(--g2); }
.map .k.shared, .map .k.moved, .map .k.joined { fill: var(--g0); }
.map .k.float { fill: var(--card); stroke: var(--g4); stroke-width: 2; }
.key { width: 10px; height: 10px; background: var(--g2); border-radius: 50%; }
.key.block { border-radius: 2px; }
.key.shared, .key.moved { background: var(--g0); }
.key.moved { width: 6px; height: 6px; vertical-align: 1px !important; }
.key.joined { background: var(--g0); border-radius: 0; transform: rotate(45deg); width: 8px; height: 8px; }
.key.float { background: var(--card); border: 2px solid var(--g4); }
.line { width: 18px; height: 0; border-top: 2px solid var(--red); vertical-align: 3px !important; }
.line.f { border-top: 2px dashed var(--g4); }
.legend i { display: inline-block; vertical-align: -2px; margin-right: 5px; }
.float-bar { background: none; border: 1.5px dashed var(--soft); }
@media (max-width: 760px) { main { padding: 18px 12px 40px; } .wide table { min-width: 600px; }
  .tiles { grid-template-columns: repeat(auto-fill, minmax(104px, 1fr)); gap: 8px; }
  .tiles li { padding: 6px 10px; } .row { grid-template-columns: 1fr; }
  .row > .name:empty, .row.titles { display: none; } .measured .row { grid-template-columns: 1fr; }
  .row > .numbers, .measured .numbers { display: flex; flex-wrap: wrap; gap: 2px 14px; }
  .numbers .loss:not(:empty)::before { content: attr(data-t) " "; color: var(--soft); }
  .card { padding: 12px; } th, td { padding: 6px 8px; } }
""" + "".join(f".g{n} {{ background: var(--g{n}); }} .t{n} {{ color: var(--g{n}); }}\n" for n in range(GROUP_COLOURS))
