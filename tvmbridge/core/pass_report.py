"""A graph pass's report on the candidates that it found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PassReport:
    """A pass's report on its candidates.

    - ``rewrites``: how many candidates the pass rewrote.
    - ``declined``: one sentence for each candidate that it left unchanged, with the reason.
    """

    rewrites: int = 0
    declined: list[str] = field(default_factory=list)

    def rewrote(self, count: int = 1) -> None:
        """Add ``count`` rewritten candidates."""
        self.rewrites += count

    def decline(self, candidate: str, reason: str) -> None:
        """Record a candidate that is left unchanged, with the reason."""
        self.declined.append(f"{candidate}: {reason}")
