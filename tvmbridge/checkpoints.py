"""Checkpoints of PyTorch within forward: what they compute again, compiled code computes once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.hoist import is_random
from tvmbridge.patches import patched_here


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Checkpointed functions run once, without recomputation: the gradients are the same."""
    place = torch.utils.checkpoint
    with (
        patched_here(place.CheckpointFunction, "apply", _plain_reentrant),
        patched_here(place, "_checkpoint_without_reentrant_generator", _plain_generator),
    ):
        yield


def _plain_reentrant(genuine: Any, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """Call ``function``; as in the original, gradients flow only if an argument wants one."""
    connected = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    with (
        torch.set_grad_enabled(connected and torch.is_grad_enabled()),
        _drawn_once(preserve_rng_state),
    ):
        return function(*args)


def _plain_generator(
    genuine: Any, function: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any
) -> Iterator[None]:
    with _drawn_once(preserve_rng_state):
        yield


def _drawn_once(preserves_rng_state: bool) -> AbstractContextManager[Any]:
    """Within it draws are refused that eager PyTorch repeats in backward, with other numbers."""
    again = torch.is_grad_enabled() and not preserves_rng_state
    return _RefusedDraws() if again else nullcontext()


class _RefusedDraws(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random(func, args, kwargs or {}):
            raise UnsupportedOperatorError(
                f"forward draws by {func} within checkpoint(preserve_rng_state=False), which "
                "computes the gradient with other numbers than forward drew"
            )
        return func(*args, **(kwargs or {}))
