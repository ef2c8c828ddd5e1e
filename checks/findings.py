"""What a check says: findings with stable codes, gathered in a report. Data alone; no graph is held."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from ..observers.errors import UnsafeModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SCHEMA: Final = 1


class Severity(Enum):
    """How much a finding matters."""

    ERROR = "error"
    """Unsafe: the lowered model computes something else than the converted graph, or does not load."""
    WARNING = "warning"
    """Accuracy is lost that another choice would keep."""
    INFO = "info"
    """Right, but worth knowing: an op stays float, a fusion is missed."""


_ORDER: Final = {severity: index for index, severity in enumerate(Severity)}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a checked graph does wrong or could do better.

    Args:
        code: stable, such as "QM201"; `checks.CODES` says what each stands for.
        severity: how much it matters.
        node: name of the node at fault: an op, or the value that is quantized. In the branch of a cond or the like that
            graph's name comes first ("true_graph_0.relu").
        module_path: the module that the node comes from, "" where that is not known.
        message: what is wrong, in one sentence.
        mend: how to mend it, in one sentence.
        numbers: what it was measured by: scales in real units per code, zero points in codes, losses in dB.
    """

    code: str
    severity: Severity
    node: str
    module_path: str
    message: str
    mend: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the finding in one line."""
        place = f"{self.node} (in {self.module_path})" if self.module_path else self.node
        numbers = ", ".join(f"{name}={value:.6g}" for name, value in self.numbers.items())
        return f"{self.code} {place}: {self.message}{f' [{numbers}]' if numbers else ''}. {self.mend}."

    def matches(self, pattern: str) -> bool:
        """Tell whether a pattern names the finding: "QM201", "QM201:relu_*" or "*:relu_3" (shell wildcards)."""
        code, _, node = pattern.partition(":")
        return fnmatchcase(self.code, code or "*") and fnmatchcase(self.node, node or "*")


@dataclass(frozen=True)
class Report:
    """All findings on one model, the worst first.

    Args:
        findings: what was found and not suppressed.
        backend: name of the config that the model was held against, "" for none.
        counts: what was looked at: "quantizes", "dequantizes", "weighted ops".
        suppressed: how many findings were left out on request.
    """

    findings: tuple[Finding, ...]
    backend: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    suppressed: int = 0

    @classmethod
    def of(cls, findings: Iterable[Finding], backend: str, counts: Mapping[str, int]) -> Report:
        """Make a report: errors first, each severity in the order of its codes, then as found."""
        found = sorted(findings, key=lambda finding: (_ORDER[finding.severity], finding.code))
        return cls(tuple(found), backend, counts)

    @property
    def is_safe(self) -> bool:
        """Tell whether no finding is an error."""
        return not self.at(Severity.ERROR)

    def at(self, severity: Severity) -> tuple[Finding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity is severity)

    def codes(self) -> list[str]:
        """Return the codes that were found, each once, in order."""
        return sorted({finding.code for finding in self.findings})

    def without(self, *patterns: str) -> Report:
        """Return the report without the findings that any of the patterns names (see `Finding.matches`)."""
        kept = tuple(f for f in self.findings if not any(f.matches(pattern) for pattern in patterns))
        return replace(self, findings=kept, suppressed=self.suppressed + len(self.findings) - len(kept))

    def raise_if_unsafe(self) -> Report:
        """Raise if a finding is an error, and return the report otherwise.

        Raises:
            UnsafeModelError: with every error, how to mend it, and how to suppress it.
        """
        errors = self.at(Severity.ERROR)
        if errors:
            lines = "\n".join(f"  {error}" for error in errors)
            raise UnsafeModelError(
                f"{len(errors)} unsafe finding{'s' if len(errors) > 1 else ''}:\n{lines}\n"
                f'What is meant can be suppressed: check(..., suppress=["{errors[0].code}:{errors[0].node}"]).'
            )
        return self

    def to_json(self) -> str:
        """Return the report as JSON; numbers that JSON lacks (inf, nan) are written as strings."""
        content = {
            "schema": SCHEMA,
            "backend": self.backend,
            "safe": self.is_safe,
            "counts": dict(self.counts),
            "suppressed": self.suppressed,
            "findings": [
                {
                    "code": finding.code,
                    "severity": finding.severity.value,
                    "node": finding.node,
                    "module_path": finding.module_path,
                    "message": finding.message,
                    "mend": finding.mend,
                    "numbers": {n: v if math.isfinite(v) else str(v) for n, v in finding.numbers.items()},
                }
                for finding in self.findings
            ],
        }
        return json.dumps(content, indent=2, allow_nan=False)

    def __str__(self) -> str:
        """Return the report as a plain table with a summary below."""
        rows = [(f.severity.value, f.code, f.node, f.module_path, f.message) for f in self.findings]
        lines = []
        if rows:
            rows.insert(0, ("severity", "code", "node", "module", "finding"))
            widths = [max(len(row[column]) for row in rows) for column in range(4)]
            lines = ["  ".join([*map(str.ljust, row, widths), row[4]]) for row in rows]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        """Return one line: how many findings of which severity, and what was looked at."""
        found = Counter(finding.severity for finding in self.findings)
        parts = [f"{found[s]} {s.value}{'s' if found[s] != 1 and s is not Severity.INFO else ''}" for s in Severity]
        looked = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        text = ", ".join(parts) + (f"; looked at {looked}" if looked else "")
        return text + (f"; {self.suppressed} suppressed" if self.suppressed else "")
