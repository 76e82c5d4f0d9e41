"""Random number generators: their states saved, compared and restored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.graph_capture.trace.own_calls import OwnCalls

# Runs of a function, the last of which decides: a thread that draws now and then lets one pass.
_MOST_RUNS = 5


class Generators:
    """The states of the global generators, of PyTorch, Python and numpy, as they are now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()

    def used(self) -> list[str]:
        """The modules whose generator has another state now."""
        changed = {
            "torch": not torch.equal(torch.get_rng_state(), self._torch),
            "random": random.getstate() != self._python,
            "numpy.random": repr(numpy.random.get_state()) != repr(self._numpy),
        }
        return [name for name, differs in changed.items() if differs]

    def restore(self, may_draw_from: Callable[[str], bool] = lambda name: True) -> None:
        """Restore the states of generators that are in another one, and this thread used.

        Another thread may have drawn from a generator that this one ``may_draw_from``, or not.
        """
        restoring: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.set_rng_state(self._torch),
            "random": lambda: random.setstate(self._python),
            "numpy.random": lambda: numpy.random.set_state(self._numpy),
        }
        for name in self.used():
            if may_draw_from(name):
                restoring[name]()


@contextmanager
def torch_generator_kept(own: OwnCalls) -> Iterator[None]:
    """Restores the state of PyTorch's generator, unless another thread may have changed it."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        changed = not torch.equal(torch.get_rng_state(), state)
        if changed and own.may_draw_from("torch"):
            torch.set_rng_state(state)


def generators_used_by(run: Callable[[], object]) -> list[str]:
    """The modules whose global generator ``run`` draws from; it is called once more or several
    times where another thread may have drawn instead.
    """
    used: list[str] = []
    for _ in range(_MOST_RUNS):
        generators, own = Generators(), OwnCalls()
        try:
            run()
            used = generators.used()
        finally:
            generators.restore(own.may_draw_from)
        if not used or own.is_alone():
            break
    return used


def refuse_draws_by(operators: Iterable[str], run: Callable[[], object]) -> None:
    """Refuse random draws that ``run`` makes by custom ``operators``, which do not declare them.

    Raises:
        UnsupportedOperatorError: random numbers were drawn. All draws of compiled code are made
            before it runs, so that one within it would stand in another place of the sequence.
    """
    names = ", ".join(operators)
    if not names:
        run()
    elif used := generators_used_by(run):
        raise UnsupportedOperatorError(
            f"an operator that was registered ({names}) draws from {', '.join(used)} without "
            "saying so by the tag nondeterministic_seeded"
        )
