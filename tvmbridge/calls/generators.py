"""Save, compare and restore the states of the global random number generators."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from tvmbridge.calls.own_calls import OwnCalls
from tvmbridge.core.errors import UnsupportedOperatorError

# Runs of a function, the last of which decides: a thread that draws now and then lets one pass.
_MOST_RUNS = 5


class Generators:
    """The states that the global generators of PyTorch, Python and numpy had at construction."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        # Without legacy, numpy has a state for each bit generator that a user may have set.
        self._numpy = numpy.random.get_state(legacy=False)

    def used(self) -> list[str]:
        """Return the names of the modules whose generator has another state now."""
        changed = {
            "torch": not torch.equal(torch.get_rng_state(), self._torch),
            "random": random.getstate() != self._python,
            "numpy.random": _numpy_bytes() != pickle.dumps(self._numpy),
        }
        return [name for name, differs in changed.items() if differs]

    def restore(self, may_draw_from: Callable[[str], bool] = lambda name: True) -> None:
        """Set the generators that this thread has drawn from back to the saved states.

        ``may_draw_from`` says whether this thread may have drawn from the generator of that name;
        if not, another thread has changed its state.
        """
        restoring: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.set_rng_state(self._torch),
            "random": lambda: random.setstate(self._python),
            "numpy.random": lambda: numpy.random.set_state(self._numpy),
        }
        for name in self.used():
            if may_draw_from(name):
                restoring[name]()


def _numpy_bytes() -> bytes:
    return pickle.dumps(numpy.random.get_state(legacy=False))


@contextmanager
def torch_generator_kept(own: OwnCalls) -> Iterator[None]:
    """Restore the state of PyTorch's generator on exit, if this thread may have changed it."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        changed = not torch.equal(torch.get_rng_state(), state)
        if changed and own.may_draw_from("torch"):
            torch.set_rng_state(state)


def generators_used_by(run: Callable[[], object]) -> list[str]:
    """Call ``run``, twice if other threads draw; return whose global generators it draws from."""
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
    """Refuse undeclared random draws that custom ``operators`` make in ``run``.

    Raises:
        UnsupportedOperatorError: random numbers were drawn. All declared draws are made before the
            compiled code runs, so a draw within it would get other numbers than in eager PyTorch.
    """
    names = ", ".join(operators)
    if not names:
        run()
    elif used := generators_used_by(run):
        raise UnsupportedOperatorError(
            f"an operator that was registered ({names}) draws from {', '.join(used)} without "
            "saying so by the tag nondeterministic_seeded"
        )
