"""The page's only script: tables that sort, and links that open what they lead to. The page is whole without it."""

from __future__ import annotations

import base64
import hashlib
from typing import Final

SCRIPT: Final = """
"use strict";
const key = (row, column) => {
  const cell = row.cells[column], value = cell.dataset.v;
  return value === undefined ? cell.textContent.trim() : value === "" ? NaN : Number(value.replace("inf", "Infinity"));
};
const compare = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, "en", {numeric: true});
for (const table of document.querySelectorAll("table.sort")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], original = [...body.rows];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const next = {none: "ascending", ascending: "descending", descending: "none"}[head.getAttribute("aria-sort")];
      heads.forEach(other => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", next);
      const sign = next === "descending" ? -1 : 1, last = value => Number.isNaN(value) || value === "";
      const rows = next === "none" ? original : original.map(row => [key(row, column), row]).sort(([a], [b]) =>
        last(a) || last(b) ? last(a) - last(b) : sign * compare(a, b)).map(([, row]) => row);
      body.append(...rows);
    });
  });
}
const reveal = () => {
  const target = document.getElementById(location.hash.slice(1)), box = target && target.closest("details");
  if (box && !box.open) {
    box.open = true;
    target.scrollIntoView({block: "center"});
  }
};
addEventListener("hashchange", reveal);
reveal();
"""

_HASH: Final = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()

POLICY: Final = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'; base-uri 'none'"
"""What a browser lets the page do: show its own style, run this script, load nothing."""
