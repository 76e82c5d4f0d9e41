"""Changing attributes: Python numbers in modules become inputs of the code.

Forward may read a number that changes between calls: an annealed temperature that the script sets,
also in a configuration, or a counter that forward itself increments. Code compiled for one value
serves no other. Where forward only computes with the number, code takes it as an input; otherwise
it stays a constant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from torch import nn

from tvmbridge.core.errors import BridgeError, NumberReadError, StateWrittenError, first_line
from tvmbridge.core.number_inputs import is_number
from tvmbridge.core.number_places import label_of, number_in
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.types import NumberKey
from tvmbridge.graph_capture.trace.held_numbers import numbers_wanted

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class ChangingAttributes:
    """Decides which numbers in a module are inputs of the code compiled for it.

    The numbers are in attributes, or in containers and plain objects that attributes hold.

    - ``why``: by a place, why its number stays a constant.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._wanted: set[NumberKey] = set()
        self.why: dict[NumberKey, str] = {}

    def want(self, keys: Iterable[NumberKey]) -> bool:
        """Make numbers inputs of the code that is compiled from now on; return whether any is new.

        Numbers that are known to stay constants are left out.
        """
        new = {key for key in keys if key not in self.why} - self._wanted
        self._wanted |= new
        return bool(new)

    def compiled(self, compile_: Callable[[], Result]) -> Result:
        """Return the result of ``compile_``, which captures the module with numbers as inputs.

        A number that a capture cannot take as an input becomes a constant, and ``compile_`` is
        called again. A number that forward reads and writes becomes an input.
        """
        while True:
            try:
                with numbers_wanted(self._module, frozenset(self._wanted)):
                    return compile_()
            except NumberReadError as error:
                if not self._leave(error.attributes & self._wanted, error):
                    raise
            except StateWrittenError as error:
                if not self.want(filter(self._is_number, error.attributes)):
                    raise self._explained(error) from error
            except BridgeError as error:
                if not self._leave(frozenset(self._wanted), error):
                    raise

    def explained(self, why: Reason) -> Reason:
        """Return the reason of a fallback, completed by why a number is no input of the code."""
        for key, text in self.why.items():
            label = f"the attribute {label_of(key[:2])}"
            if why.kind is Kind.CHANGED and why.detail == label:
                what = f"{label} ({label_of(key)} is no input, because {text})"
                return replace(why, detail=what)
        return why

    def _is_number(self, key: NumberKey) -> bool:
        try:
            owner = self._module.get_submodule(key[0])
        except AttributeError:
            return False
        return is_number(number_in(owner, key[1:]))

    def _leave(self, keys: frozenset[NumberKey], error: Exception) -> bool:
        """Leave the numbers of ``keys`` constants, because of ``error``; return whether any is."""
        self._wanted -= keys
        for key in keys:
            self.why[key] = first_line(error)
            logger.info("the attribute %s stays constant: %s", label_of(key), first_line(error))
        return bool(keys)

    def _explained(self, error: StateWrittenError) -> StateWrittenError:
        known = [
            f"{label_of(key)} is no input of the code, because {self.why[key]}"
            for key in sorted(error.attributes & self.why.keys(), key=label_of)
        ]
        return StateWrittenError("; ".join((str(error), *known)), error.attributes)
