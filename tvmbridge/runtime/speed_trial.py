"""Speed trials: does compiled code serve calls faster than the module's own forward?

The first calls of an entry alternate between compiled code and the module's own forward, and each
is timed. Every one of them is a call of the user's: nothing runs twice, so random draws, buffers
and hooks are those of one call. Where compiled code is slower, the module's own forward serves
from then on. The verdict is kept on this machine, by the key of the code.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.profiling import profiling
from tvmbridge.core.torch_private import pytree, queue_callback
from tvmbridge.core.turns import another_compiles
from tvmbridge.graph_capture.surroundings import in_checkpoint
from tvmbridge.kernels.table import keep_answer, known_answer
from tvmbridge.runtime.background import child_compiles
from tvmbridge.runtime.verdict import SpeedVerdict

VARIABLE = "TVMBRIDGE_ONLY_IF_FASTER"
# A trial ends early where compiled code takes less than this part of the other time.
_CLEARLY_FASTER = 0.8
_EARLY = 3
_SAMPLES = 5
# So many are taken where their median and their least say the contrary.
_MOST_SAMPLES = 10
# Seconds of a call by compiled code from which on nothing is timed: what a call costs beside its
# kernels decides for short calls alone, and a trial would slow a program down by its long ones.
_LONG = 1e-3
# The first calls of code are not timed, nor the first of the own forward: libraries prepare
# their kernels at these, and on a GPU the fourth call is captured as a CUDA graph.
_CODE_FIRST = {"cpu": 2, "cuda": 4}


def only_if_faster_now(option: bool) -> bool:
    """Whether calls are timed: the variable ``TVMBRIDGE_ONLY_IF_FASTER`` wins over the option."""
    named = os.environ.get(VARIABLE)
    return option if not named else named not in ("0", "off", "false", "no")


@dataclass
class _Sample:
    """One timed call: seconds of forward, and of its backward pass once that has run."""

    forward: float
    backward: float | None = None


class SpeedTrial:
    """The trial of one compiled entry.

    question: what the verdict is kept under on this machine; None: it is kept in this object only.
    device: where the code runs; a GPU is waited for before and after each timed call.
    conclude: is called with the verdict when a trial reaches it.
    """

    def __init__(
        self,
        question: str | None,
        device: torch.device,
        conclude: Callable[[SpeedVerdict], None],
    ) -> None:
        self._question = question
        self._device = device
        self._conclude = conclude
        self._samples: dict[bool, list[_Sample]] = {True: [], False: []}
        self._warm_up = [*[True] * _CODE_FIRST.get(device.type, 2), False]
        self._first = math.inf  # seconds of the shortest of the first calls by compiled code
        self._running = threading.Lock()
        # Calls of the trial, and calls after it, that the module's own forward served.
        self.timed_calls = 0
        self.aside_calls = 0
        answer = None if question is None else known_answer(question)
        self.verdict = None if answer is None else SpeedVerdict.parsed(answer)

    @property
    def steps_aside(self) -> bool:
        """Whether the module's own forward serves the calls of this entry."""
        return self.verdict is not None and not self.verdict.pays

    def serve(self, code: Callable[[], Any], own: Callable[[], Any], before: float = 0.0) -> Any:
        """The results of one call, which ``code`` or ``own`` serves, as the trial needs it.

        Args:
            code: serves the call by compiled code.
            own: serves it by the module's own forward.
            before: seconds of guards, which a call of compiled code has waited for.
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
        """The results of a call that the module's own forward serves after the verdict."""
        self.aside_calls += 1
        return own()

    def _timed(self, code: Callable[[], Any], own: Callable[[], Any], before: float) -> Any:
        self._decide()
        if self.verdict is not None:
            return code() if self.verdict.pays else self.serve_aside(own)
        by_code = self._warm_up[0] if self._warm_up else self._code_is_next()
        self._wait_for_device()
        started = time.perf_counter()
        results = code() if by_code else own()
        self._wait_for_device()
        seconds = time.perf_counter() - started
        if not by_code:
            self.timed_calls += 1
        if self._warm_up:
            self._leave_long_calls(seconds if by_code else None)
            return results
        sample = _Sample(seconds + before if by_code else seconds)
        self._samples[by_code].append(sample)
        self._time_backward(sample, results)
        return results

    def _leave_long_calls(self, seconds: float | None) -> None:
        """End a first call, and the trial where compiled code takes long for a call."""
        del self._warm_up[0]
        if seconds is None:
            return
        self._first = min(self._first, seconds)
        if self._warm_up[0] is False and self._first > _LONG:
            self.verdict = SpeedVerdict(self._first, None)
            self._conclude(self.verdict)

    def _code_is_next(self) -> bool:
        return len(self._samples[True]) <= len(self._samples[False])

    def _decide(self) -> None:
        """Reach the verdict where there are samples enough."""
        counts = [len(samples) for samples in self._samples.values()]
        if min(counts) < _EARLY or counts[0] != counts[1]:
            return
        with_backward = all(
            sum(s.backward is not None for s in samples) >= _EARLY
            for samples in self._samples.values()
        )
        found, least = (self._verdict(of, with_backward) for of in (statistics.median, min))
        assert found.own is not None
        if min(counts) < _SAMPLES and found.compiled > _CLEARLY_FASTER * found.own:
            return
        if found.pays != least.pays and min(counts) < _MOST_SAMPLES:
            return
        self.verdict = found
        self._samples = {True: [], False: []}
        if self._question is not None:
            keep_answer(self._question, str(found))
        self._conclude(found)

    def _verdict(self, of: Callable[[list[float]], float], with_backward: bool) -> SpeedVerdict:
        """What ``of`` the seconds of each kind of calls says."""
        found = []
        for samples in (self._samples[True], self._samples[False]):
            seconds = of([s.forward for s in samples])
            if with_backward:
                seconds += of([s.backward for s in samples if s.backward is not None])
            found.append(seconds)
        return SpeedVerdict(*found)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _time_backward(self, sample: _Sample, results: Any) -> None:
        """Have the backward pass from ``results`` note its seconds in ``sample``.

        It begins at the first node of ``results`` that runs, and ends with the whole pass: in both
        kinds of calls, so that what else the pass computes does not decide.
        """
        leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        begun: list[float] = []

        def end() -> None:
            self._wait_for_device()
            if sample.backward is None:
                sample.backward = time.perf_counter() - begun[0]

        def begin(_: Any) -> None:
            if not begun:
                self._wait_for_device()
                begun.append(time.perf_counter())
                queue_callback(end)

        for node in {leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None}:
            node.register_prehook(begin)


def _disturbed() -> bool:
    """Whether a call made now would be timed beside other work, or must be served by code.

    A checkpoint repeats a call in backward, and both must be served in the same way.
    """
    if profiling() or another_compiles() or child_compiles() or in_checkpoint():
        return True
    if torch.are_deterministic_algorithms_enabled():  # results must not depend on times
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
