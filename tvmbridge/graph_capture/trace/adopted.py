"""Adopted tensors: tensors that forward reads from globals, closures and lists become inputs.

A stand-in (the copy of a module that is traced) holds such a tensor as a buffer, or as a parameter
if it requires a gradient. A trace puts fake tensors, proxies or primals in place of buffers and
parameters. During the trace, PyTorch functions that are given the original tensor get the
stand-in's current one instead.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tvmbridge.calls.custom_functions import custom_functions_told
from tvmbridge.calls.patches import patched_here
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.structure import unflatten
from tvmbridge.core.torch_private import functorch_utils, pytree

# For each module, ("_parameters" or "_buffers", name) of its adopted tensors, by their ids.
_PLACES: weakref.WeakKeyDictionary[nn.Module, dict[int, tuple[str, str]]]
_PLACES = weakref.WeakKeyDictionary()


def adopt(
    module: nn.Module, tensors: Sequence[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Register ``tensors`` in ``module``, a stand-in, under names derived from their labels.

    Returns:
        The tensors by their names, which are also their names in the captured graph.
    """
    places = _PLACES.setdefault(module, {})
    names: dict[str, torch.Tensor] = {}
    for label, tensor in tensors:
        name = _free_name(module, label)
        held = "_parameters" if tensor.requires_grad else "_buffers"
        module.__dict__[held][name] = _as_held(tensor)
        places[id(tensor)] = held, name
        names[name] = tensor
    return names


def _as_held(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in a form that torch.export accepts.

    An inference tensor is cloned. A tensor that requires a gradient becomes a parameter that shares
    its memory.
    """
    if tensor.is_inference():
        return tensor.detach().clone()
    if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach())
    return tensor


def _free_name(module: nn.Module, label: str) -> str:
    base = name = "outside_" + re.sub(r"\W+", "_", label).strip("_")
    number = 2
    while hasattr(module, name):
        name, number = f"{base}_{number}", number + 1
    return name


@contextmanager
def adopted_are_read(module: nn.Module) -> Iterator[_Redirected]:
    """Within the context, pass functions the module's current tensors in place of adopted ones."""
    redirected = _Redirected(module, _PLACES.get(module, {}))
    if not redirected.places:
        yield redirected
        return
    # A torch-function mode does not see calls of custom autograd functions.
    if isinstance(torch.autograd.Function.apply, BuiltinFunctionType):  # since PyTorch 2.14
        patched = patched_here(torch.autograd.Function, "apply", redirected.in_apply, over=True)
    else:
        unwrap = "unwrap_dead_wrappers"
        patched = patched_here(functorch_utils, unwrap, redirected.in_arguments, over=True)
    seen = custom_functions_told(redirected.before_forward, over=True)
    with patched, seen, redirected.checked, redirected:
        yield redirected


class _Redirected(TorchFunctionMode):
    """Replaces the adopted tensors among the arguments of each PyTorch function."""

    def __init__(self, module: nn.Module, places: Mapping[int, tuple[str, str]]) -> None:
        super().__init__()
        self.places = places
        self._module = module
        self.checked = ExitStack()  # holds the patch of the forward that is about to run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._exchanged(args), **self._exchanged(kwargs or {}))

    def _exchanged(self, value: Any) -> Any:
        """Return ``value`` with the module's current tensors in place of adopted ones."""
        place = self.places.get(id(value))
        if place is not None:
            return self._module.__dict__[place[0]][place[1]]
        # isinstance would raise for a deferred value, which has no readable __class__.
        kind = type(value)
        if kind in (tuple, list):
            return kind(map(self._exchanged, value))
        if kind is dict:
            return {key: self._exchanged(held) for key, held in value.items()}
        if kind is slice:
            return slice(*map(self._exchanged, (value.start, value.stop, value.step)))
        return value

    def in_arguments(self, genuine: Any, args: tuple[Any, ...]) -> Any:
        """Call ``genuine`` with a custom autograd function's arguments, adopted ones replaced."""
        return genuine(self._exchanged(args))

    def in_apply(self, genuine: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``kind.apply`` with adopted tensors replaced."""
        return genuine(kind, *self._exchanged(args), **self._exchanged(kwargs))

    def before_forward(self, kind: Any) -> None:
        """Refuse a call of a custom autograd function that still gets an adopted tensor.

        An ``apply`` that was stored before the trace is PyTorch's, and has recorded the original
        tensor as a source of gradients.
        """

        def checked(forward: Any, *args: Any, **kwargs: Any) -> Any:
            self.checked.close()
            if any(id(each) in self.places for each in (*args, *kwargs.values())):
                raise CaptureError(
                    f"a stored {kind.__name__}.apply is called with a tensor of a global or "
                    f"closure; call {kind.__name__}.apply by its name"
                )
            return forward(*args, **kwargs)

        self.checked.close()
        self.checked.enter_context(patched_here(kind, "forward", checked, over=True))

    def in_results(self, results: Any) -> Any:
        """Return the ``results`` of forward with adopted tensors replaced."""
        leaves, structure = pytree.tree_flatten(results)
        if not any(id(leaf) in self.places for leaf in leaves):
            return results
        return unflatten([self._exchanged(leaf) for leaf in leaves], structure)
