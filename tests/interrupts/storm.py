"""Interrupts at random moments of a step, and what must be true after them."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

# Compiled code and its callbacks may hold this much more memory after a storm, in bytes.
_GROWTH = 48 << 20
_CHECK_EVERY = 25


@dataclass(frozen=True)
class Subject:
    """What is interrupted.

    step: runs compiled code that calls kernels of PyTorch's.
    check: asserts that the next call is right.
    after: asserts what must be true after each interrupt, before another step.
    """

    step: Callable[[], object]
    check: Callable[[], None]
    after: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Outcome:
    """What became of a storm.

    interrupts: how many arrived as ``KeyboardInterrupt``.
    steps: how many steps ran to their end.
    """

    interrupts: int
    steps: int


@contextmanager
def interrupting() -> Iterator[None]:
    """Within it the alarm raises ``KeyboardInterrupt``."""

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

    Yields after each interrupt how many steps had run to their end since the one before.
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
        AssertionError: what a call returned or left behind is wrong, or memory grows.
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
    """Return the time of a step, in seconds, after a warm-up."""
    for _ in range(20):
        step()
    start = time.perf_counter()
    for _ in range(20):
        step()
    return (time.perf_counter() - start) / 20
