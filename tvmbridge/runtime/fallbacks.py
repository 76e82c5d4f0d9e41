"""Fallbacks: calls that the module's own forward serves, counted and logged by their reasons."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import Counter
from collections.abc import Mapping

from tvmbridge.core.errors import FallbackError
from tvmbridge.graph_capture.observe.plain import OPEN_IT, UNSEEN
from tvmbridge.runtime.guards.spelling import CONSTANT, STRUCTURE, TENSOR, Mismatch
from tvmbridge.runtime.verdict import SpeedVerdict

logger = logging.getLogger(__name__)

ON_FALLBACK = ("warn", "silent", "raise")

# The most reasons that are counted separately; all others are counted as _FURTHER.
_MOST_REASONS = 64
_FURTHER = "further reasons"
# The most summaries of deleted modules that are kept until the process ends.
_MOST_GONE = 32
_gone: list[str] = []

_ADD = "call add_tvm_dispatch with these arguments too"
_AGAIN = "call add_tvm_dispatch again, which compiles for the module as it is now"
_FREEZE = "call add_tvm_dispatch with freeze=True again"
_THAW = "call the module in eval mode under torch.no_grad(), or dispatch it without freeze=True"
_PLAIN_NAMES = "pass str(name) in place of np.str_, an enum member or another subclass of str"
# Advice by a text that the reason contains; the first match counts.
_ADVICE = (
    ("the shape of an input", f"pad inputs to one shape, or {_ADD}"),
    ("outside of what dynamic_shapes", "give the Dim wider bounds; sizes of 0 and 1 run in eager"),
    ("that one Dim stands for", "give them Dims of different names"),
    ("does not fit the arguments", "name in dynamic_shapes the arguments that calls have"),
    ("the dtype of an input", f"convert the input, or {_ADD}"),
    ("the device of an input", "move the input to the device that code is compiled for"),
    ("the name of a keyword", _PLAIN_NAMES),
    (STRUCTURE, f"pass the same arguments in each call, or {_ADD}"),
    (TENSOR, f"pass the same kinds of arguments in each call, or {_ADD}"),
    (CONSTANT, f"if it is a number that changes, pass a 0-dimensional tensor; otherwise {_ADD}"),
    (UNSEEN, OPEN_IT),
    ("hooks", "remove the hooks, or dispatch the submodules, whose own hooks are called"),
    ("forked", "call add_tvm_dispatch in the new process"),
    ("shallow copy or a replica", "use DistributedDataParallel, or deepcopy the module"),
    ("being traced", "call remove_tvm_dispatch before the module is traced"),
    ("checkpoint", "dispatch the submodules that the checkpoint calls"),
    ("max_specializations", "raise the option max_specializations"),
    ("was frozen", _FREEZE),
    ("weights are frozen", _THAW),
    ("copy of a frozen", _FREEZE),
    ("changed", _AGAIN),
    ("replaced", _AGAIN),
    ("removed", _AGAIN),
    ("untied", _AGAIN),
    ("requires_grad", _AGAIN),
    ("laid out", "make the input contiguous"),
    ("is active", "call the module outside of it, where calls are many"),
)
# The reason for a call with the keyword ``np.str_("scale")``, for example.
OTHER_NAMES = "the name of a keyword argument is not a plain str, and forward can see its class"
_OTHERWISE = "tvmbridge.explain(module, sample) says what would become of it"
# The example of a reason about which the user need not do anything.
_SETTLES = "forward sets it at the first call, and further calls find it set"
# The reason for calls whose code is being compiled in another process, and its example.
COMPILING = "its code is being compiled in the background"
_COMES = "further calls are served once it is ready"
_SERVES_ANYWAY = "only_if_faster=False has compiled code serve them (docs/when_it_pays.md)"
_PASSING = (_SETTLES, _COMES)


def advice(reason: str) -> str:
    """Return what the user can do about calls that fall back for ``reason``."""
    if reason.startswith(("train", "eval")):  # the mode of a compilation that failed
        return _OTHERWISE
    return next((text for part, text in _ADVICE if part in reason), _OTHERWISE)


def worst(counts: Mapping[str, int], examples: Mapping[str, str]) -> str | None:
    """Return the most frequent reason that the user can do something about; None if there is none.

    Args:
        counts: the number of calls by reason.
        examples: details of the first call by reason.
    """
    open_ones = [reason for reason in counts if examples.get(reason) not in _PASSING]
    return max(open_ones, key=lambda reason: counts[reason], default=None)


class Tally:
    """Counts and logs the fallbacks of one dispatched module.

    - ``counts``: the number of calls by reason.
    - ``examples``: details of the first call by reason. Details vary from call to call, so only
      the first are kept.

    Args:
        name: the name of the module, for messages.
        on_fallback: ``"warn"`` logs the first call of each reason, ``"silent"`` logs none, and
            ``"raise"`` raises an error instead of running the module's own forward.
    """

    def __init__(self, name: str, on_fallback: str = "warn") -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.on_fallback = on_fallback
        self._name = name
        self._told: set[str] = set()
        self._counting = threading.Lock()

    def note(self, why: str | Mismatch, *, settling: bool = False) -> None:
        """Count a call that the module's own forward will serve, and log it by ``on_fallback``.

        Args:
            why: the reason.
            settling: whether forward sets state in this call that later calls find set. The first
                such call is not logged and raises no error.

        Raises:
            FallbackError: ``on_fallback`` is ``"raise"``.
        """
        reason, detail = why if isinstance(why, Mismatch) else (why, "")
        with self._counting:
            if reason not in self.counts and len(self.counts) >= _MOST_REASONS:
                reason, detail = _FURTHER, reason
            settling = settling and reason not in self.counts
            self.counts[reason] += 1
            if settling:
                self.examples[reason] = _SETTLES
            elif self.examples.get(reason, _SETTLES) == _SETTLES:
                self.examples[reason] = detail
            told = settling or reason in self._told
            if self.on_fallback == "warn" and not settling:
                self._told.add(reason)
        text = f"{reason} ({detail})" if detail else reason
        if self.on_fallback == "raise" and not settling:
            raise FallbackError(f"{self._name} is not served by TVM: {text}; {advice(reason)}")
        if self.on_fallback != "warn" or told:
            return
        logger.warning(
            "%s runs its own forward, not code compiled by TVM: %s; %s (told once; dispatch_report "
            "counts such calls)",
            self._name,
            text,
            advice(reason),
        )

    def note_compiling(self) -> None:
        """Count a call that the own forward serves because its code is still being compiled."""
        with self._counting:
            told = COMPILING in self._told
            self._told.add(COMPILING)
            self.counts[COMPILING] += 1
            self.examples[COMPILING] = _COMES
        if not told:
            logger.info("%s runs its own forward: %s", self._name, COMPILING)

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
        reason = worst(self.counts, self.examples)
        if reason is None:
            return None
        fallen = sum(self.counts.values())
        detail = f" ({self.examples[reason]})" if self.examples[reason] else ""
        return (
            f"{self._name}: TVM served {served} of {served + fallen} calls "
            f"({share(served, fallen):.0%}); {self.counts[reason]} ran the module's own forward "
            f"because {reason}{detail}; {advice(reason)}"
        )

    @property
    def to_be_summed_up(self) -> bool:
        """Whether a summary is due when the module is deleted or the process ends."""
        return self.on_fallback == "warn" and bool(self.counts)

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
