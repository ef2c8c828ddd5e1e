"""The look of the page: one style sheet, light and dark, for wide and narrow windows, without scripts."""

from typing import Final

GROUP_COLOURS: Final = 8

STYLE: Final = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1b2230; --soft: #5a6475; --line: #e0e4ea;
  --track: #eef1f5; --zero: #9aa4b2; --red: #b3261e; --red-bg: #fbe9e7; --amber: #8a5a00; --amber-bg: #fdf1d8;
  --green: #1e6b3a; --green-bg: #e3f3e8; --accent: #2458c5;
  --g0: #3367d6; --g1: #c4541a; --g2: #1f8a57; --g3: #8e44ad; --g4: #b8860b; --g5: #0f8b9d; --g6: #c2306b;
  --g7: #6b7a1f; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161d; --card: #1a2029; --ink: #e6eaf0; --soft: #9aa5b5;
  --line: #2c3542; --track: #232b36; --zero: #5f6b7c; --red: #ff9a8f; --red-bg: #43211f; --amber: #f2c46d;
  --amber-bg: #3b2f17; --green: #86d9a3; --green-bg: #1b3626; --accent: #8db2ff;
  --g0: #7aa5ff; --g1: #f0935c; --g2: #5cc795; --g3: #c58be0; --g4: #e0b84a; --g5: #56c5d6; --g6: #f07fae;
  --g7: #b3c258; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); line-height: 1.45;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
p { margin: 6px 0; }
code, .mono { font-family: ui-monospace, "SF Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .87em;
  overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0 0; padding: 0; list-style: none; }
.tiles li { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 8px 14px;
  min-width: 104px; }
.tiles b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: .82rem; }
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
.row { display: grid; grid-template-columns: minmax(90px, 200px) 1fr 272px; gap: 4px 14px; align-items: center;
  padding: 3px 0; }
.row > .numbers { font-variant-numeric: tabular-nums; font-size: .84rem; color: var(--soft); display: grid;
  grid-template-columns: 1fr auto auto; gap: 10px; }
.numbers .loss { min-width: 60px; text-align: right; color: var(--ink); }
.numbers .group { min-width: 52px; text-align: right; }
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
table { border-collapse: collapse; width: 100%; font-size: .89rem; }
th, td { text-align: left; padding: 7px 12px; border-top: 1px solid var(--line); vertical-align: top; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; white-space: nowrap; }
td.num { font-variant-numeric: tabular-nums; white-space: nowrap; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 0 0 8px; }
details > summary { padding: 8px 14px; cursor: pointer; display: flex; flex-wrap: wrap; gap: 4px 10px;
  align-items: center; }
details .scroll { border: 0; border-radius: 0; border-top: 1px solid var(--line); }
details .strip { margin-left: auto; display: flex; flex-wrap: wrap; gap: 2px; }
.dot { width: 9px; height: 14px; border-radius: 2px; background: var(--zero); }
.dot.block, .dot.fused, .dot.quantized { background: var(--g2); }
.dot.fused { opacity: .55; }
.dot.moved, .dot.joined { background: var(--g0); }
.dot.float { background: var(--g4); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .82rem; color: var(--soft); margin: 0 0 10px; }
.legend i { display: inline-block; vertical-align: -2px; margin-right: 5px; }
.float-bar { background: none; border: 1.5px dashed var(--soft); }
@media (max-width: 760px) { main { padding: 18px 12px 40px; } .row { grid-template-columns: 1fr; }
  .row > .name:empty { display: none; } .card { padding: 12px; } th, td { padding: 6px 8px; } }
""" + "".join(f".g{n} {{ background: var(--g{n}); }} .t{n} {{ color: var(--g{n}); }}\n" for n in range(GROUP_COLOURS))
