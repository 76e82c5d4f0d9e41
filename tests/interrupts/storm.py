"""Interrupt steps at random moments, and check the state afterwards.

A *storm* is a long sequence of such interrupts.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

# The most bytes by which the memory of the process may grow in a storm.
_GROWTH = 48 << 20
_CHECK_EVERY = 25


@dataclass(frozen=True)
class Subject:
    """The code that a storm interrupts, with its checks.

    - ``step``: runs compiled code that calls PyTorch's kernels.
    - ``check``: asserts that the next call is right.
    - ``after``: asserts invariants after each interrupt, before the next step.
    """

    step: Callable[[], object]
    check: Callable[[], None]
    after: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Outcome:
    """The counts of a storm.

    - ``interrupts``: interrupts that arrived as ``KeyboardInterrupt``.
    - ``steps``: steps that ran to their end.
    """

    interrupts: int
    steps: int


@contextmanager
def interrupting() -> Iterator[None]:
    """A context in which the alarm signal raises ``KeyboardInterrupt``."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted_often(step: Callable[[], object], seconds: float, seed: int = 0) -> Iterator[int]:
    """Interrupt steps at random moments for ``seconds``, one interrupt at a time.

    Yield, after each interrupt, the number of steps that finished since the previous one.
    """
    draw = random.Random(seed)
    span = 6 * _duration(step)
    end = time.monotonic() + seconds
    steps = 0
    with interrupting():
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, span))
                for _ in range(12):
                    step()
                    steps += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                yield steps
                steps = 0


def storm(subject: Subject, seconds: float, seed: int = 0) -> Outcome:
    """Interrupt the steps of ``subject`` at random moments for ``seconds``.

    Raises:
        AssertionError: a result or some state is wrong after an interrupt, or memory has grown.
    """
    interrupts = steps = 0
    memory = psutil.Process().memory_info().rss
    for more in interrupted_often(subject.step, seconds, seed):
        steps += more
        interrupts += 1
        assert torch.is_grad_enabled(), "an interrupt has turned gradients off"
        subject.after()
        if interrupts % _CHECK_EVERY == 0:
            subject.check()
    subject.check()
    grown = psutil.Process().memory_info().rss - memory
    assert grown < _GROWTH, f"{grown >> 20} MiB more memory after {interrupts} interrupts"
    return Outcome(interrupts, steps)


def _duration(step: Callable[[], object]) -> float:
    """Return the time of a step, in seconds, after a warm-up.

    The first steps may take ten times as long, and most alarms would come after the steps.
    """
    return min(_timed(step) for _ in range(6))


def _timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(20):
        step()
    return (time.perf_counter() - start) / 20
