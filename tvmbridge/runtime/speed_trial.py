"""Speed trials: does compiled code serve calls faster than the module's own forward?

The first calls of an entry alternate between compiled code and the module's own forward, and each
call is timed. No call runs twice, so a trial changes neither random draws nor buffers nor hooks.
If compiled code is slower, the module's own forward serves all later calls. The verdict is kept on
this machine under the key of the code.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tvmbridge.backends import backend_of
from tvmbridge.calls.surroundings import in_checkpoint
from tvmbridge.core.profiling import profiling
from tvmbridge.core.torch_private import pytree, queue_callback
from tvmbridge.core.turns import another_compiles
from tvmbridge.kernels.table import keep_answer, known_answer
from tvmbridge.runtime.background import child_compiles
from tvmbridge.runtime.native_aside import NativeCalls

try:
    import resource

    resource.RUSAGE_THREAD  # noqa: B018 - macOS lacks it
except (ImportError, AttributeError):
    resource = None  # type: ignore[assignment]

# Compiled code may take this many times the own forward's time before it is replaced.
_SLOWER = 1.03


class SpeedVerdict(NamedTuple):
    """Median seconds of a call by compiled code and by the module's own forward.

    In training the seconds include those of the backward pass. ``own`` is None for calls so long
    that the module's own forward was not timed.
    """

    compiled: float
    own: float | None

    @property
    def pays(self) -> bool:
        """Whether compiled code is fast enough to serve the calls."""
        return self.own is None or self.compiled <= _SLOWER * self.own

    @classmethod
    def parsed(cls, text: str) -> SpeedVerdict | None:
        """Parse a verdict from the text that ``str()`` returns; None for any other text."""
        try:
            compiled, own = map(float, text.split())
        except ValueError:
            return None
        valid = all(math.isfinite(s) and s > 0 for s in (compiled, own))
        return cls(compiled, own) if valid else None

    def __str__(self) -> str:
        return f"{self.compiled!r} {self.own!r}"

    def text(self) -> str:
        """Return a sentence with both times and the side that serves the calls."""
        if self.own is None:
            return (
                f"a call takes {_shown(self.compiled)} by compiled code: too long to have calls "
                "served by the module's own forward to time it"
            )
        serves = "compiled code" if self.pays else "the module's own forward"
        return (
            f"a call takes {_shown(self.compiled)} by compiled code and {_shown(self.own)} by the "
            f"module's own forward, so {serves} serves"
        )


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


VARIABLE = "TVMBRIDGE_ONLY_IF_FASTER"
# A trial ends early if compiled code takes less than this part of the own forward's time.
_CLEARLY_FASTER = 0.8
_EARLY = 3
_SAMPLES = 5
# The most samples of each kind, taken if the medians and the minima give different verdicts.
_MOST_SAMPLES = 10
# The most samples of a trial that are dropped because another process had the processor meanwhile:
# on a busy machine it took the time of a whole sample, and decided trials of short calls.
_MOST_DROPPED = 10
# A call of compiled code that takes more seconds than this may end its trial after one sample of
# each kind, if it takes less than this part of the own forward's time: the cost of a call beside
# its kernels matters less, and a trial slows a program down.
_MEDIUM = 1e-3
_FASTER = 0.9
# The most calls up to one backward pass that are of one kind.
_MOST_CALLS = 64


def only_if_faster_now(option: bool) -> bool:
    """Whether calls are timed: by ``TVMBRIDGE_ONLY_IF_FASTER`` if it is set, else by ``option``."""
    named = os.environ.get(VARIABLE)
    return option if not named else named not in ("0", "off", "false", "no")


@dataclass
class _Sample:
    """Timed calls of one kind: one call, or in training all calls up to a backward pass.

    A backward pass of both kinds of calls would tell nothing of either.

    - ``calls``: the number of calls; ``forward``: their seconds.
    - ``backward``: seconds of the backward pass; None: it has not run.
    - ``interrupted``: whether another process has had the processor meanwhile.
    """

    by_code: bool
    calls: int = 0
    forward: float = 0.0
    backward: float | None = None
    interrupted: bool = False


class SpeedTrial:
    """Times calls by compiled code and by the module's own forward, and decides which serves.

    Args:
        question: the key under which the decision is kept on disk; None: it is not kept there.
        device: the device of the code; a GPU is synchronised before and after each timed call.
        conclude: called once with the times and the decision.
        trains: whether calls probably have a backward pass. Then the first calls are not timed
            until one has ended.
        rests: the number of calls that compiled code serves before the trial begins.
    """

    def __init__(
        self,
        question: str | None,
        device: torch.device,
        conclude: Callable[[SpeedVerdict], None],
        trains: bool = False,
        rests: int = 0,
    ) -> None:
        self._question = question
        self._device = device
        self._conclude = conclude
        self._samples: dict[bool, list[_Sample]] = {True: [], False: []}
        self._latest = _Sample(True)
        self._dropped = 0
        self._trains = trains
        self._rests = rests
        # Whether the next backward pass may have calls that are not timed, and how many more calls
        # may wait for its end.
        self._mixed = True
        self._waits = _MOST_CALLS if trains else 0
        self._has_backward = False
        self._warm_up = [*[True] * backend_of(device).warm_up, False]
        self._first = math.inf  # seconds of the shortest of the first calls by compiled code
        self._running = threading.Lock()
        # Calls that the module's own forward served, during the trial and after it.
        self.timed_calls = 0
        self._aside_calls = 0
        self.passed_on = NativeCalls()
        answer = None if question is None else known_answer(question)
        self.verdict = None if answer is None else SpeedVerdict.parsed(answer)

    @property
    def steps_aside(self) -> bool:
        """Whether the module's own forward serves the calls of this entry."""
        return self.verdict is not None and not self.verdict.pays

    @property
    def aside_calls(self) -> int:
        """Return the number of calls that the module's own forward served after the verdict."""
        return self._aside_calls + self.passed_on.calls

    def count_aside(self) -> None:
        """Count a call that the module's own forward serves after the verdict."""
        self._aside_calls += 1

    def serve(self, code: Callable[[], Any], own: Callable[[], Any], before: float = 0.0) -> Any:
        """Serve one call by ``code`` or by ``own``, and time it while the trial lasts.

        Args:
            before: seconds that the guards took, which count as time of compiled code.
        """
        if self.steps_aside:
            return self.serve_aside(own)
        if self.verdict is not None or _disturbed() or not self._running.acquire(blocking=False):
            return code()
        try:
            return self._timed(code, own, before)
        finally:
            self._running.release()

    def serve_aside(self, own: Callable[[], Any]) -> Any:
        """Serve a call by the module's own forward after the verdict, and count it."""
        self.count_aside()
        return own()

    def _timed(self, code: Callable[[], Any], own: Callable[[], Any], before: float) -> Any:
        self._decide()
        if self.verdict is not None:
            return code() if self.verdict.pays else self.serve_aside(own)
        if self._rests:
            self._rests -= 1
            return code()
        if not self._warm_up and self._mixed and self._waits:
            self._waits -= 1
            return code()
        sample = _Sample(self._warm_up[0]) if self._warm_up else self._next()
        backend_of(self._device).synchronize(self._device)
        switches, started = _switches(), time.perf_counter()
        results = code() if sample.by_code else own()
        backend_of(self._device).synchronize(self._device)
        seconds = time.perf_counter() - started
        sample.interrupted |= _switches() != switches
        if not sample.by_code:
            self.timed_calls += 1
        self._time_backward(sample, results)
        if self._warm_up:
            self._mixed = True
            self._leave_long_calls(seconds if sample.by_code else None)
            return results
        if not sample.calls:
            self._samples[sample.by_code].append(sample)
            self._latest = sample
        sample.calls += 1
        sample.forward += seconds + before if sample.by_code else seconds
        return results

    def _leave_long_calls(self, seconds: float | None) -> None:
        """Measure the first call; end the trial if compiled code takes long for one call."""
        del self._warm_up[0]
        if seconds is None:
            return
        self._first = min(self._first, seconds)
        if self._warm_up[0] is False and self._first > backend_of(self._device).long_call:
            self.verdict = SpeedVerdict(self._first, None)
            self._conclude(self.verdict)

    def _next(self) -> _Sample:
        """Return the sample that the next call belongs to."""
        if self._is_open():
            return self._latest
        return _Sample(len(self._samples[True]) <= len(self._samples[False]))

    def _is_open(self) -> bool:
        """Whether the backward pass of the latest sample is still to come."""
        latest = self._latest
        return self._has_backward and latest.backward is None and 0 < latest.calls < _MOST_CALLS

    def _decide(self) -> None:
        """Set the verdict if there are enough samples."""
        if self._is_open():
            return
        self._drop_interrupted()
        counts = [len(samples) for samples in self._samples.values()]
        early, clearly_faster = (1, _FASTER) if self._first > _MEDIUM else (_EARLY, _CLEARLY_FASTER)
        if min(counts) < early or counts[0] != counts[1]:
            return
        with_backward = all(
            sum(s.backward is not None for s in samples) >= early
            for samples in self._samples.values()
        )
        found, least = (self._verdict(of, with_backward) for of in (statistics.median, min))
        assert found.own is not None
        assert least.own is not None
        if min(counts) < _SAMPLES and (
            found.compiled > clearly_faster * found.own
            or least.compiled > clearly_faster * least.own
        ):
            return
        if found.pays != least.pays and min(counts) < _MOST_SAMPLES:
            return
        self.verdict = found
        self._samples = {True: [], False: []}
        certain = found.pays == least.pays and (with_backward or not self._trains)
        if self._question is not None and certain:
            keep_answer(self._question, str(found))
        self._conclude(found)

    def _drop_interrupted(self) -> None:
        """Drop samples in which another process had the processor, unless there are too many."""
        for by_code, samples in self._samples.items():
            kept = [s for s in samples if not s.interrupted]
            if self._dropped + len(samples) - len(kept) <= _MOST_DROPPED:
                self._dropped += len(samples) - len(kept)
                self._samples[by_code] = kept

    def _verdict(self, of: Callable[[list[float]], float], with_backward: bool) -> SpeedVerdict:
        """Return the verdict that compares ``of`` (median or min) the seconds of both kinds."""
        found = []
        for samples in (self._samples[True], self._samples[False]):
            seconds = of([s.forward / s.calls for s in samples])
            if with_backward:
                seconds += of([s.backward / s.calls for s in samples if s.backward is not None])
            found.append(seconds)
        return SpeedVerdict(*found)

    def _time_backward(self, sample: _Sample, results: Any) -> None:
        """Register hooks that write the seconds of the backward pass into ``sample``.

        The time runs from the first node of ``results`` that executes to the end of the whole
        pass. It is measured in the same way for both kinds of calls, so work of other modules in
        the pass counts equally.
        """
        leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        begun: list[float] = []
        switches: list[int] = []

        def end() -> None:
            backend_of(self._device).synchronize(self._device)
            sample.interrupted |= switches != [_switches()]
            if sample.backward is None:
                sample.backward = time.perf_counter() - begun[0]
            if not self._has_backward:  # this pass may be one of both kinds of calls
                self._has_backward, self._samples = True, {True: [], False: []}
            self._mixed = False

        def begin(_: Any) -> None:
            if not begun:
                backend_of(self._device).synchronize(self._device)
                switches.append(_switches())
                begun.append(time.perf_counter())
                queue_callback(end)

        for node in {leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None}:
            node.register_prehook(begin)


def _switches() -> int:
    """Return how often this thread had to give up the processor; 0 where that is not known."""
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _disturbed() -> bool:
    """Whether a call must be served by code now, or other work would falsify its time.

    A checkpoint repeats a call in backward, and the same code must serve both.
    """
    if profiling() or another_compiles() or child_compiles() or in_checkpoint():
        return True
    if torch.are_deterministic_algorithms_enabled():  # results must not depend on times
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
