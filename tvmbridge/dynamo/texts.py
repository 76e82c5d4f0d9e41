"""The text of numbers in f-strings, which TorchDynamo makes without its format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.torch_private import dynamo_formatting, dynamo_variables

_CONVERSIONS = ("", "!s", "!r", "!a")


def formats_kept() -> AbstractContextManager[Any]:
    """Let TorchDynamo format numbers that are inputs of a captured function as Python does.

    Up to PyTorch 2.13 it takes the input itself for its text: ``f"{loss:.3f}"`` has all digits.
    """
    if torch.__version__ >= "2.14":
        return nullcontext()
    return patched_here(*dynamo_formatting(), _formatted)


def _formatted(genuine: Callable[..., None], translator: Any, spec: Any, flags: int) -> None:
    variables, value = dynamo_variables(), translator.stack[-1]
    if not isinstance(value, variables.SymNodeVariable) or not value.source:
        return genuine(translator, spec, flags)
    translator.pop()
    text = f"{{{_CONVERSIONS[flags & 3]}:{spec.as_python_constant()}}}"
    translator.push(variables.StringFormatVariable.create(text, [value], {}))
    return None
