"""The live state of a module: its parameters and buffers at each call, and what must not change.

Parameters are looked up by name in their owners at every call, so replaced, retied, loaded and
optimised parameters are always seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tvmbridge.libraries import acts
from tvmbridge.types import InputDescriptor, InputKind

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class ModuleState:
    """Finds the tensors that compiled code reads, and says what has changed since capture.

    Args:
        module: the captured module.
        inputs: descriptors of the graph's inputs; parameters and buffers are taken from them.
        aliases: dotted names that shared a tensor with a captured name (tied weights).
    """

    def __init__(
        self, module: nn.Module, inputs: Sequence[InputDescriptor], aliases: Mapping[str, str]
    ) -> None:
        held = [d for d in inputs if d.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
        self.names = tuple(d.target or "" for d in held)
        self._slots = [_slot(module, name) for name in self.names]
        self._expected = [
            (torch.Size(d.spec.shape), d.spec.dtype, d.spec.device, d.requires_grad) for d in held
        ]
        self._ties = [(_slot(module, alias), _slot(module, of)) for alias, of in aliases.items()]
        self._children = [
            (parent._modules, name, child, child.training)
            for parent in module.modules()
            for name, child in parent._modules.items()
            if child is not None
        ]
        self._hooks = [
            hooks
            for _, _, child, _ in self._children
            for hooks in (child.__dict__.get(name) for name in _HOOKS)
            if hooks is not None
        ]

    def rebound(self, memo: Mapping[int, Any]) -> ModuleState:
        """The same expectations of a deep copy of the module, found through the copy's ``memo``.

        Everything looked up here is an item of the module's ``__dict__`` older than its dispatch,
        so it has been copied before.
        """
        copied = ModuleState.__new__(ModuleState)
        copied.names, copied._expected = self.names, self._expected
        copied._slots = [(memo[id(owner)], name) for owner, name in self._slots]
        copied._ties = [
            ((memo[id(a)], alias), (memo[id(o)], name)) for (a, alias), (o, name) in self._ties
        ]
        copied._children = [
            (memo[id(parent)], name, memo[id(child)], training)
            for parent, name, child, training in self._children
        ]
        copied._hooks = [memo[id(hooks)] for hooks in self._hooks]
        return copied

    def tensors(self) -> list[torch.Tensor | None]:
        """The parameters and buffers of now, in the order of :attr:`names`; None where missing."""
        return [owner.get(name) for owner, name in self._slots]

    def replaced(self) -> bool:
        """Whether a submodule is no longer the one that was captured."""
        return any(parent.get(name) is not child for parent, name, child, _ in self._children)

    def _restructured(self) -> str | None:
        for parent, name, child, training in self._children:
            if parent.get(name) is not child:
                return "a submodule was replaced"
            if child.training is not training:
                return "the training flag of a submodule changed"
        for hooks in self._hooks:
            if hooks and acts(hooks.values()):
                return "a submodule has hooks"
        return None

    def changed(self, tensors: Sequence[torch.Tensor | None], *, check_grad: bool) -> str | None:
        """Why compiled code does not fit ``tensors`` or the module of now; None when it does."""
        reason = self._restructured()
        if reason is not None:
            return reason
        for tensor, (shape, dtype, device, requires_grad) in zip(
            tensors, self._expected, strict=True
        ):
            if tensor is None:
                return "a parameter or buffer is missing"
            if tensor.dtype is not dtype:
                return "the dtype of a parameter or buffer changed"
            if tensor.device != device:
                return "the device of a parameter or buffer changed"
            if tensor.shape != shape:
                return "the shape of a parameter or buffer changed"
            if check_grad and tensor.requires_grad is not requires_grad:
                return "requires_grad of a parameter changed"
        for (alias_owner, alias), (owner, name) in self._ties:
            if alias_owner.get(alias) is not owner.get(name):
                return "tied parameters were untied"
        return None


def _slot(module: nn.Module, dotted: str) -> tuple[dict[str, Any], str]:
    """The dict that holds the tensor called ``dotted``, and its key."""
    path, _, name = dotted.rpartition(".")
    owner = module.get_submodule(path)
    held = owner._parameters if name in owner._parameters else owner._buffers
    return held, name
