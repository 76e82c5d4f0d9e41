"""Speed trials of a module that runs in parts: do the parts pay beside its own forward?

Sizes of graphs and ragged data change at each call, so all calls whose tensors have about as many
elements share a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tvmbridge.calls.surroundings import in_checkpoint
from tvmbridge.core.autocast import autocast_now
from tvmbridge.core.torch_private import pytree
from tvmbridge.runtime.speed_trial import SpeedTrial, SpeedVerdict

# The most trials, and the most times that a trial begins anew because a call compiled a part.
_MOST_TRIALS = 16
_MOST_BEGINNINGS = 8

_Key = tuple[Hashable, ...]


class PartsTrials:
    """The speed trials of a module in parts, for ranges of sizes and modes.

    Args:
        conclude: called with a description of the calls and the verdict of their trial.
    """

    def __init__(self, conclude: Callable[[str, SpeedVerdict], None]) -> None:
        self._conclude = conclude
        self._known: dict[_Key, SpeedTrial] = {}
        self._beginnings: dict[_Key, int] = {}
        self._timed_before = 0  # by trials that began anew

    def of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> SpeedTrial | None:
        """Return the trial that a call belongs to; None if there are too many, or it is not timed.

        Calls inside an activation checkpoint are not timed: a later call must be served alike.
        """
        if in_checkpoint() or torch.are_deterministic_algorithms_enabled():
            return None
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        key = _key(module, leaves)
        trial = self._known.get(key)
        if trial is None and len(self._known) < _MOST_TRIALS:
            device = next((x.device for x in leaves if isinstance(x, Tensor)), torch.device("cpu"))
            trains = torch.is_grad_enabled() and (
                any(p.requires_grad for p in module.parameters())
                or any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
            )
            what = f"{'train' if module.training else 'eval'}, in parts"
            trial = self._known[key] = SpeedTrial(
                None, device, lambda verdict: self._conclude(what, verdict), trains
            )
        return trial

    def begin_anew(self, trial: SpeedTrial) -> None:
        """Drop ``trial``, a call of which has compiled a part; the next call begins another."""
        for key, known in list(self._known.items()):
            begun = self._beginnings.get(key, 0)
            if known is trial and trial.verdict is None and begun < _MOST_BEGINNINGS:
                self._beginnings[key] = begun + 1
                self._timed_before += trial.timed_calls
                del self._known[key]

    def summary(self) -> tuple[int, int, tuple[SpeedVerdict, ...]]:
        """Return the counts of calls that the own forward served, and the verdicts so far.

        The first count is of calls that were timed, the second of calls after the verdict.
        """
        trials = list(self._known.values())
        timed = self._timed_before + sum(t.timed_calls for t in trials)
        verdicts = tuple(t.verdict for t in trials if t.verdict is not None)
        return timed, sum(t.aside_calls for t in trials), verdicts


def _key(module: nn.Module, leaves: list[Any]) -> _Key:
    """Return what calls of one trial have in common; ``resembles`` in _native.cpp is as coarse."""
    return (
        module.training,
        torch.is_grad_enabled(),
        autocast_now(),
        *map(_kind, leaves),
    )


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    return leaf.dtype, leaf.device, leaf.dim(), leaf.numel().bit_length(), leaf.requires_grad
