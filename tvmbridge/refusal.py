"""Why a module cannot be captured, told in the user's terms: the sample, or a line of forward."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tvmbridge.errors import CaptureError
from tvmbridge.standins import run_apart, stand_in, tensors_replaced

# Frames of these packages are not the user's.
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


def raise_if_forward_refuses(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Tell a bad sample from a module that cannot be captured; state and generators are kept."""
    actor = stand_in(module) or module
    try:
        with tensors_replaced(actor, {}):
            run_apart(actor, args, kwargs)
    except Exception as error:
        raise CaptureError(
            f"the forward of {type(module).__name__} refuses this sample input "
            f"({type(error).__name__}: {first_paragraph(error)}); pass arguments it accepts"
        ) from error


def first_paragraph(error: BaseException | None) -> str:
    """The first paragraph of an error's text, or its type where it has none."""
    text = str(error or "").strip()
    return text.split("\n\n")[0] if text else type(error).__name__


def user_line(error: BaseException) -> str | None:
    """The innermost source line of the user's that the failing trace passed through."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(_NOT_THE_USERS)
    ]
    if not frames:
        return None
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name} ({frame.line})"
