"""The mode and flags of a call: what code for the same arguments is compiled for separately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from tvmbridge.core.attention_kernels import SwitchedOff, attention_switched_off
from tvmbridge.core.autocast import Autocast, autocast_now
from tvmbridge.core.kernel_settings import Reduced, reduced_precisions
from tvmbridge.graph_capture.trace.standins import tensors_of

Flags: TypeAlias = tuple[bool, ...]


def flags_of(module: nn.Module, leaves: Sequence[Any]) -> Flags:
    """``requires_grad`` of the tensors among the arguments, and of the module's, in their order."""
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tuple(t.requires_grad for t in (*given, *tensors_of(module).values()))


class Mode(NamedTuple):
    """What the same signature is compiled for separately.

    ``training`` is the module's flag; ``needs_grad`` whether autograd records the call;
    ``deterministic`` whether PyTorch's deterministic algorithms are asked for; ``dtype`` the
    default one, which new tensors get; ``autocast`` the devices for which autocast is on;
    ``attention_off`` the kernels of attention that are switched off; ``reduced`` the libraries
    whose float32 products have a reduced precision, with that.
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
        """The mode of a call made now; ``autocast`` in place of that of now."""
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
