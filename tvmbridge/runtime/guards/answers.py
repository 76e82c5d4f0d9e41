"""The guards of answers: whether conditions on values still have their captured results.

Forward may branch on the value of a buffer, as in ``if self.initialized.item()``, or of an
argument, as in ``if mask.any()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tvmbridge.backends import is_on_host
from tvmbridge.calls.arguments import places_in
from tvmbridge.core.assumptions import Answer
from tvmbridge.core.called_in_mode import without_gradients
from tvmbridge.core.torch_private import pytree


class AnswerGuard:
    """Evaluates again the conditions on buffers that forward evaluated during capture.

    It compares values, not versions: code often sets flags without a new version
    (``flag.data.copy_(...)``).

    Args:
        answers: the conditions, with the buffers that they read and their captured results.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = [answer for answer in answers if answer.names]
        self.names = tuple(sorted({name for each in self._answers for name in each.names}))
        # Copies of the buffers at the last check that found all answers unchanged.
        self._last: dict[str, torch.Tensor] = {}

    def changed(self, find: Callable[[str], torch.Tensor | None]) -> str | None:
        """Return a text that names a buffer whose answer has changed; None if none has.

        ``find`` returns the present buffer of a name, or None.
        """
        if not self._answers:
            return None
        now: dict[str, torch.Tensor] = {}
        for name in self.names:
            tensor = find(name)
            if type(tensor) is not torch.Tensor or not is_on_host(tensor.device):
                return f"the buffer {name}, whose value forward asks for,"
            now[name] = tensor
        if self._last and all(_alike(now[name], last) for name, last in self._last.items()):
            return None
        for answer in self._answers:
            # Compared as text, because NaN is equal to NaN here.
            if without_gradients(_asked, answer, now) != repr(answer.value):
                which = ", ".join(sorted(answer.names))
                return f"what forward asks of the buffer {which}"
        self._last = {name: tensor.detach().clone() for name, tensor in now.items()}
        return None


class ArgumentAnswers:
    """Evaluates the conditions on the arguments of a call. On a GPU it waits once.

    - ``outcomes``: the captured results, each with the place of its arguments and its order.

    Args:
        answers: the conditions; those on buffers are left out.
        structure: the structure of the arguments of a call.
    """

    def __init__(self, answers: Sequence[Answer], structure: pytree.TreeSpec) -> None:
        self._answers = [answer for answer in answers if answer.arguments]
        self.outcomes = tuple((a.arguments, a.value) for a in self._answers)
        self._expected = [answer.value for answer in self._answers]
        self._positions: dict[str, int] = {}
        if self._answers:
            read = frozenset[str]().union(*(answer.arguments for answer in self._answers))
            places = enumerate(places_in(structure))
            self._positions = {place: position for position, place in places if place in read}

    def hold(self, leaves: Sequence[Any]) -> bool:
        """Whether all conditions have their captured results for the ``leaves`` of a call."""
        if not self._answers:
            return True
        given = {place: leaves[position] for place, position in self._positions.items()}
        try:
            return bool(without_gradients(self._results, given) == self._expected)
        except Exception:  # A condition may raise that the call itself would not reach.
            return False

    def _results(self, given: Mapping[str, torch.Tensor]) -> Any:
        asked = [answer.ask(given).reshape(()).ne(0) for answer in self._answers]
        if len(asked) == 1:
            return [bool(asked[0])]
        return torch.stack([each.to(asked[0].device) for each in asked]).tolist()


def _asked(answer: Answer, now: dict[str, torch.Tensor]) -> str | None:
    """Return the present answer as text; None if evaluating it raises an error."""
    try:
        return repr(answer.ask(now))
    except Exception:
        return None


def _alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype is other.dtype and torch.equal(tensor, other)
