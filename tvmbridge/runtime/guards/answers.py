"""The guard of answers: whether buffers that forward asks would answer as they did at capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tvmbridge.core.assumptions import Answer
from tvmbridge.core.called_in_mode import without_gradients


class AnswerGuard:
    """Asks again what forward asked of buffers.

    What they hold is compared, not how often they were written: flags are set past autograd
    (``flag.data.copy_(...)``) more often than not.

    Args:
        answers: of the captured forward.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.names = tuple(sorted({name for answer in answers for name in answer.names}))
        self._answers = answers
        # What the buffers held when all answers were last found to be the same.
        self._last: dict[str, torch.Tensor] = {}

    def changed(self, find: Callable[[str], torch.Tensor | None]) -> str | None:
        """What would answer otherwise now, by its name; None: nothing."""
        if not self._answers:
            return None
        now: dict[str, torch.Tensor] = {}
        for name in self.names:
            tensor = find(name)
            if type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
                return f"the buffer {name}, whose value forward asks for,"
            now[name] = tensor
        if self._last and all(_alike(now[name], last) for name, last in self._last.items()):
            return None
        for answer in self._answers:
            # Numbers that are NaN are the same answer.
            if without_gradients(_asked, answer, now) != repr(answer.value):
                which = ", ".join(sorted(answer.names))
                return f"what forward asks of the buffer {which}"
        self._last = {name: tensor.detach().clone() for name, tensor in now.items()}
        return None


def _asked(answer: Answer, now: dict[str, torch.Tensor]) -> str | None:
    """The answer of now as text; None where a buffer of another shape has none."""
    try:
        return repr(answer.ask(now))
    except Exception:
        return None


def _alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype is other.dtype and torch.equal(tensor, other)
