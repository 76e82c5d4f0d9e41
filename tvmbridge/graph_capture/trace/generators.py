"""Save, compare and restore the states of the global random number generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy
import torch

from tvmbridge.core.errors import UnsupportedOperatorError


class Generators:
    """The states that the global generators of PyTorch, Python and numpy had at construction."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()

    def used(self) -> list[str]:
        """Return the names of the modules whose generator has another state now."""
        changed = {
            "torch": not torch.equal(torch.get_rng_state(), self._torch),
            "random": random.getstate() != self._python,
            "numpy.random": repr(numpy.random.get_state()) != repr(self._numpy),
        }
        return [name for name, differs in changed.items() if differs]

    def restore(self) -> None:
        """Set the generators back to the saved states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)


@contextmanager
def no_draws_by(operators: Iterable[str]) -> Iterator[None]:
    """Refuse random draws within the context, and restore the generators on exit.

    Args:
        operators: the names of custom operators, which may draw without declaring it; if there
            are none, nothing is checked.

    Raises:
        UnsupportedOperatorError: random numbers were drawn. All declared draws are made before the
            compiled code runs, so a draw within it would get other numbers than in eager PyTorch.
    """
    names = ", ".join(operators)
    if not names:
        yield
        return
    generators = Generators()
    try:
        yield
        used = generators.used()
    finally:
        generators.restore()
    if used:
        raise UnsupportedOperatorError(
            f"an operator that was registered ({names}) draws from {', '.join(used)} without "
            "saying so by the tag nondeterministic_seeded"
        )
