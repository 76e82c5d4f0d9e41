"""The outcome of checking a program."""

from __future__ import annotations

import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The outcome of checking a program.

    - ``result``: one of

      - *right*: compiled code served the program and agrees with eager PyTorch.
      - *refused*: tvmbridge refused the program, or fell back to eager PyTorch.
      - *wrong*: compiled code does not agree.
      - *error*: dispatch or compiled code raised another error.
      - *invalid*: eager PyTorch raises, or the program cannot be judged.
      - *overflown*: as *wrong*, but intermediate results overflow.
      - *crash*, *timeout*: the worker process died; only the parent process sets these.

    - ``reason``: why the result is not *right*.
    - ``joint``: the source of the joint function; empty without gradients.
    - ``seconds``: the time that the check took.
    """

    result: str
    reason: str = ""
    joint: str = ""
    seconds: float = 0.0


def text_of(error: BaseException) -> str:
    """Return an error's type, message and last two stack frames as text."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    places = "; ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in frames)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]} ({places})"
