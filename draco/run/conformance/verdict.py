"""What a check finds, and what is decided from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["BARS", "COPY_BARS", "Bars", "Finding", "Verdict"]


@dataclass(frozen=True, slots=True)
class Bars:
    """Largest differences from plain rows that are still rounding."""

    logprobs: float  #: mean |Δ log p| of a token, nats
    gradients: float  #: ‖Δg‖ / ‖g‖


#: by dtype of the base weights; docs/models.md has the measured figures behind them
BARS = {
    torch.float32: Bars(1e-4, 1e-3),
    torch.bfloat16: Bars(0.1, 0.5),
    torch.float16: Bars(0.02, 0.1),
}
#: of copies, which are float32 and small
COPY_BARS = Bars(1e-5, 1e-4)


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table."""

    name: str
    passed: bool | None  #: None: a remark, or nothing that could be tried
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check."""

    kind: Literal["packed", "unpacked", "refused"]
    reason: str  #: why not packed, or why refused; empty for packed
    ragged: bool  #: rollouts of different lengths may be decoded in one pass
    findings: tuple[Finding, ...]

    def line(self) -> str:
        """In one line."""
        return self.kind + (f": {self.reason}" if self.reason else "")

    def table(self, title: str) -> Table:
        """All findings, and the verdict as the last row."""
        from rich.table import Table
        from rich.text import Text

        made = Table(title=title, title_justify="left")
        for column in ("check", "", "found"):
            made.add_column(column, overflow="fold")
        for finding in self.findings:
            mark = "–" if finding.passed is None else "ok" if finding.passed else "NO"
            made.add_row(finding.name, mark, Text(finding.detail))
        made.add_section()
        made.add_row("verdict", "NO" if self.kind == "refused" else "ok", Text(self.line()))
        return made

    def to_json(self) -> dict[str, Any]:
        """For the cache."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Verdict:
        """What `to_json` made.

        Raises:
            TypeError, KeyError: it is something else.
        """
        return cls(**{**content, "findings": tuple(Finding(**f) for f in content["findings"])})
