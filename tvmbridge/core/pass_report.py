"""What a graph pass says of its candidates."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PassReport:
    """What a pass says of its candidates: how many it rewrote, which it declined and why."""

    rewrites: int = 0
    declined: list[str] = field(default_factory=list)

    def rewrote(self, count: int = 1) -> None:
        """Count rewritten candidates."""
        self.rewrites += count

    def decline(self, candidate: str, reason: str) -> None:
        """Note a candidate that is left as it is."""
        self.declined.append(f"{candidate}: {reason}")
