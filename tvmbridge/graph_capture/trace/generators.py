"""Random number generators: their states saved, compared and restored."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy
import torch

from tvmbridge.core.errors import UnsupportedOperatorError


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

    def restore(self) -> None:
        """Restore these states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)


@contextmanager
def no_draws_by(operators: Iterable[str]) -> Iterator[None]:
    """Refuses random draws within it by custom ``operators``, which do not declare them.

    Raises:
        UnsupportedOperatorError: random numbers were drawn. All draws of compiled code are made
            before it runs, so that one within it would stand in another place of the sequence.
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
