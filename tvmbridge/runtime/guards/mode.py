"""The mode and flags of a call: each combination of them has its own compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from tvmbridge.calls.standins import tensors_of
from tvmbridge.core.autocast import Autocast, autocast_now
from tvmbridge.core.carried import places_in
from tvmbridge.core.kernel_settings import (
    Reduced,
    SwitchedOff,
    attention_switched_off,
    reduced_precisions,
)

Flags: TypeAlias = tuple[bool, ...]
_REGISTERED = frozenset(vars(nn.Module()))


def flags_of(module: nn.Module, leaves: Sequence[Any]) -> Flags:
    """Return ``requires_grad`` of the tensors among ``leaves``, then of the module's tensors.

    The last flag is whether any other tensor in a container of the module's attributes requires
    a gradient.
    """
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    own = tensors_of(module).values()
    known = set(map(id, own))
    carried = any(
        t.requires_grad and id(t) not in known
        for owner in module.modules()
        for name, value in vars(owner).items()
        if isinstance(value, tuple | list | dict) and name not in _REGISTERED
        for _, t in places_in(value)
    )
    return (*(t.requires_grad for t in (*given, *own)), carried)


class Mode(NamedTuple):
    """The settings of a call that need separate code for the same signature.

    - ``training``: the module's training flag.
    - ``needs_grad``: whether autograd records the call.
    - ``deterministic``: whether PyTorch's deterministic algorithms are enabled.
    - ``dtype``: PyTorch's default dtype.
    - ``autocast``: the devices with autocast enabled, each with its dtype.
    - ``attention_off``: the attention kernels that are switched off.
    - ``reduced``: libraries that compute float32 products in reduced precision, with the precision.
    """

    training: bool
    needs_grad: bool
    deterministic: bool = False
    dtype: torch.dtype = torch.float32
    autocast: Autocast = ()
    attention_off: SwitchedOff = ()
    reduced: Reduced = ()

    @classmethod
    def of_now(cls, training: bool, needs_grad: bool, autocast: Autocast | None = None) -> Mode:
        """Return the mode of a call made now."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        dtype = torch.get_default_dtype()
        state = autocast_now() if autocast is None else autocast
        off, reduced = attention_switched_off(), reduced_precisions()
        return cls(training, needs_grad, deterministic, dtype, state, off, reduced)

    def __str__(self) -> str:
        text = ("train" if self.training else "eval") + (" with gradients" * self.needs_grad)
        text += ", deterministic" * self.deterministic
        if self.dtype is not torch.float32:
            text += f", default {str(self.dtype).removeprefix('torch.')}"
        for device, dtype in self.autocast:
            text += f", {device} autocast to {str(dtype).removeprefix('torch.')}"
        if self.attention_off:
            text += f", attention without {', '.join(self.attention_off)}"
        for library, precision in self.reduced:
            text += f", float32 products of {library} in {precision}"
        return text
