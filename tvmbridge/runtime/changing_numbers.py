"""Changing numbers: Python numbers among the arguments that calls change become inputs of the code.

The first call compiles for its numbers as constants. A second call that differs in numbers alone,
or in numbers and sizes, compiles code that takes these numbers as inputs, and serves further
values. Where forward needs a number's value (a branch, a size, an index), it stays a constant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.errors import NumberReadError, first_line
from tvmbridge.core.number_inputs import NumberRange
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.torch_private import pytree
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.specialization import Specialization

logger = logging.getLogger(__name__)

# The name of an argument and the class of its number.
_Key: TypeAlias = tuple[str, type]

# The most signatures with numbers as inputs: one for each kind (int, float) of two numbers.
_MOST_SIGNATURES = 4


class ChangingNumbers:
    """Decides which numbers of a call become inputs of code that is compiled for it.

    - ``why``: by the name of an argument and the class of a number, why it stays a constant.
    """

    def __init__(self) -> None:
        self.why: dict[_Key, str] = {}
        self._failed: set[frozenset[_Key]] = set()

    def signature(
        self,
        known: Sequence[Specialization],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        forward: Callable[..., Any],
    ) -> tuple[Signature, Arguments] | None:
        """Return a signature that takes changed numbers as inputs, and a call's arguments for it.

        Return None if the call differs in no number from the ``known`` ones, or in more than
        numbers and sizes, or if its numbers stay constants. Return None as well if code takes the
        numbers as inputs, and does not serve their values: more such code would not either.
        """
        if sum(bool(s.signature.numbers) for s in known) >= _MOST_SIGNATURES:
            return None
        if any(s.signature.lacks_value(args, kwargs) for s in known):
            return None
        for specialization in reversed(known):
            like = specialization.signature
            found = like.changed_numbers(args, kwargs)
            if found is None:
                continue
            positions, arguments = found
            leaves = pytree.tree_leaves((tuple(arguments[0]), dict(arguments[1])))
            keys = {i: (like.names[i], type(leaves[i])) for i in sorted(positions)}
            free = {i: key for i, key in keys.items() if key not in self.why}
            if not free or frozenset(free.values()) in self._failed:
                continue
            numbers = {i: NumberRange(kind) for i, (_, kind) in free.items()}
            if not all(known.holds(leaves[i]) for i, known in numbers.items()):
                continue
            given, named = arguments
            return Signature(tuple(given), named, forward, numbers), arguments
        return None

    def failed(self, signature: Signature, error: Exception) -> None:
        """Note that no code takes the numbers of ``signature`` as inputs, because of ``error``."""
        keys = {i: (signature.names[i], r.kind) for i, r in signature.numbers.items()}
        leaves = error.leaves if isinstance(error, NumberReadError) else frozenset()
        for i in leaves & keys.keys():
            self.why[keys[i]] = first_line(error)
        if not leaves & keys.keys():
            self._failed.add(frozenset(keys.values()))
        names = ", ".join(name for name, _ in keys.values())
        logger.info("numbers %s stay constants: %s", names, first_line(error))

    def deciding(
        self, known: Sequence[Specialization], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str | None:
        """Return why an integer is no input, if a call differs in it from one of ``known``.

        TorchDynamo takes such an integer, a size or an index, as a symbol.
        """
        for like in (specialization.signature for specialization in known):
            for i in (like.changed_numbers(args, kwargs) or ((), None))[0]:
                why = self.why.get((like.names[i], int))
                if why is not None:
                    return f"argument `{like.names[i]}` is no input of the code, because {why}"
        return None

    def explained(self, why: Reason) -> Reason:
        """Return the reason of a fallback, completed by why a number is no input of the code."""
        if why.kind is not Kind.CONSTANT or not why.detail:
            return why
        known = (text for (name, _), text in self.why.items() if f"`{name}`" in why.detail)
        text = next(known, None)
        if text is None:
            return why
        return replace(why, detail=f"{why.detail}; it is no input, because {text}")
