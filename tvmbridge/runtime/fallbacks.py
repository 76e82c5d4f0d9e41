"""Fallbacks: calls that the module's own forward serves, counted and logged by their reasons."""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from tvmbridge.core.errors import FallbackError
from tvmbridge.core.locks import Lock
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.runtime.native_aside import NativeCalls
from tvmbridge.runtime.speed_trial import SpeedVerdict

logger = logging.getLogger(__name__)

ON_FALLBACK = ("warn", "silent", "raise")

# The most reasons that are counted separately; all others are counted as Kind.FURTHER.
_MOST_REASONS = 64
# The most summaries of deleted modules that are kept until the process ends.
_MOST_GONE = 32
_gone: list[str] = []
# After so many calls a reason that cannot change is taken to last.
_LASTS = 12

_SERVES_ANYWAY = "only_if_faster=False has compiled code serve them (docs/when_it_pays.md)"


def worst(counts: Mapping[str, int], reasons: Mapping[str, Reason]) -> str | None:
    """Return the most frequent reason for which there is advice; None if there is none."""
    open_ones = [text for text in counts if text in reasons and reasons[text].advice]
    return max(open_ones, key=lambda text: counts[text], default=None)


class Tally:
    """Counts and logs the fallbacks of one dispatched module.

    - ``reasons``: the reasons by their texts. Details vary from call to call, so only the first
      reason of a text is kept.

    Args:
        on_fallback: ``"warn"`` logs the first call of each reason, ``"silent"`` logs none, and
            ``"raise"`` raises an error instead of running the module's own forward.
    """

    # What serves the other calls, in short and in full, and the function that reports the counts.
    by, code, report = "TVM", "code compiled by TVM", "dispatch_report"

    def __init__(self, name: str, on_fallback: str = "warn") -> None:
        self._counts: Counter[str] = Counter()
        self._passed_on: dict[str, NativeCalls] = {}
        self.reasons: dict[str, Reason] = {}
        self.on_fallback = on_fallback
        self._name = name
        # Called with each reason that is counted.
        self.noted: Callable[[str], None] | None = None
        self._logged: set[str] = set()
        self._counting = Lock()

    @property
    def counts(self) -> Counter[str]:
        """Return the number of calls by the text of the reason."""
        return self._counts + Counter({t: p.calls for t, p in list(self._passed_on.items())})

    def passed_on(self, why: Reason) -> NativeCalls | None:
        """Return the counter of calls with this reason that native code passes on.

        None: so few calls had the reason that the next ones are still examined.
        """
        if self.noted is not None or self._counts[why.text] < _LASTS:
            return None
        return self._passed_on.setdefault(why.text, NativeCalls())

    def note(self, why: Reason) -> None:
        """Count a call that the module's own forward will serve, and log it by ``on_fallback``.

        A reason about which nothing need be done is no warning and raises no error.

        Raises:
            FallbackError: ``on_fallback`` is ``"raise"``.
        """
        given = why.text
        with self._counting:
            if why.text not in self._counts and len(self._counts) >= _MOST_REASONS:
                why = Reason(Kind.FURTHER, why.text)
            text = why.text
            if why.settles and text in self._counts:
                why = replace(why, settles=False)
            # Before the count: a report in another thread finds a reason for each text.
            if text not in self.reasons or self.reasons[text].settles:
                self.reasons[text] = why
            self._counts[text] += 1
            logged = why.settles or text in self._logged
            if not why.settles and (not why.advice or self.on_fallback == "warn"):
                self._logged.add(text)
        if self.noted is not None:
            self.noted(given)
        if not why.advice:
            if not logged:
                logger.info("%s runs its own forward: %s", self._name, why)
        elif self.on_fallback == "raise":
            raise FallbackError(f"{self._name} is not served by TVM: {why}; {why.advice}")
        elif self.on_fallback == "warn" and not logged:
            logger.warning(
                "%s runs its own forward, not %s: %s; %s (logged once; %s counts such calls)",
                self._name,
                self.code,
                why,
                why.advice,
                self.report,
            )

    def note_verdict(self, what: str, verdict: SpeedVerdict) -> None:
        """Log the verdict of a speed trial if the module's own forward has won it.

        ``what`` describes the calls: their mode and signature.
        """
        if verdict.pays:
            return
        level = logging.WARNING if self.on_fallback == "warn" else logging.INFO
        logger.log(level, "%s, %s: %s; %s", self._name, what, verdict.text(), _SERVES_ANYWAY)

    def summary(self, served: int) -> str | None:
        """Return one line about all calls so far; None if no reason needs attention.

        ``served`` is the number of calls that compiled code has served.
        """
        counts = self.counts
        text = worst(counts, self.reasons)
        if text is None:
            return None
        fallen, reason = sum(counts.values()), self.reasons[text]
        return (
            f"{self._name}: {self.by} served {served} of {served + fallen} calls "
            f"({share(served, fallen):.0%}); {counts[text]} ran the module's own forward "
            f"because {reason}; {reason.advice}"
        )

    @property
    def to_be_summed_up(self) -> bool:
        """Whether a summary is due when the module is deleted or the process ends."""
        return self.on_fallback == "warn" and bool(self._counts)

    def keep_summary(self, served: int) -> None:
        """Store the summary until the process ends; log nothing more for this module."""
        text = self.summary(served)
        if text is not None and len(_gone) < _MOST_GONE:
            _gone.append(text)
        self.on_fallback = "silent"


def share(served: int, fallen: int) -> float:
    """Return the share of calls that compiled code served, from 0 to 1; 0 without calls."""
    return served / (served + fallen) if served + fallen else 0.0


def forget_summaries() -> None:
    """Discard all stored summaries; a forked process did not run these calls."""
    _gone.clear()


@atexit.register
def log_summaries() -> None:
    """Log the stored summaries."""
    for text in _gone:
        logger.warning("%s", text)
    _gone.clear()
