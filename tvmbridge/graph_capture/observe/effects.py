"""Detect side effects of forward that compiled code would not repeat at each call."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tvmbridge.calls.callers import calling_python_module
from tvmbridge.calls.generators import Generators
from tvmbridge.calls.own_calls import OwnCalls
from tvmbridge.calls.patches import patched_here
from tvmbridge.calls.standins import tensors_of
from tvmbridge.core.assumptions import Question
from tvmbridge.core.contents import all_held, same_held
from tvmbridge.core.torch_private import (
    FakeTensor,
    innermost_transform,
    module_of_duals,
    set_grad_enabled,
)
from tvmbridge.core.writes import version_of
from tvmbridge.graph_capture.dependence import DependenceError
from tvmbridge.graph_capture.observe.executed import is_called_by_library
from tvmbridge.graph_capture.trace.kernel_strides import unanswered


class StateBefore:
    """The state that forward could write, recorded before it runs.

    Args:
        held: the tensors that the module holds, including tensors in containers.
    """

    def __init__(self, module: nn.Module, held: Iterable[torch.Tensor] = ()) -> None:
        self._module = module
        self._attributes = _attributes(module)
        self._places = tensors_of(module, remove_duplicate=True)
        self._versions = {id(t): version_of(t) for t in held}
        self._writable = {id(t) for t in (*module.parameters(), *module.buffers())}

    def written(self) -> tuple[str, ...]:
        """Return the names of the attributes that were removed, replaced or changed in content."""
        before, after = self._attributes, _attributes(self._module)
        changed = [n for n, held in after.items() if not same_held(before.get(n, []), held)]
        return (*(name for name in before if name not in after), *changed)

    def rebound(self, after: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return, by name, the former tensors that forward replaced by others."""
        return {n: t for n, t in self._places.items() if after.get(n, t) is not t}

    def writes_by_two_names(self) -> Iterator[str]:
        """Yield a complaint for each written tensor of two names: no trace can follow the write."""
        names: dict[int, list[str]] = {}
        for name, tensor in self._places.items():
            names.setdefault(id(tensor), []).append(name)
            written = version_of(tensor) != self._versions.get(id(tensor), 0)
            if len(names[id(tensor)]) == 2 and written:
                yield "writes into {}, which is {} too".format(*names[id(tensor)])

    def has_written_other_tensors(self, held: Iterable[torch.Tensor]) -> bool:
        """Whether forward wrote into a tensor of ``held`` that is no parameter or buffer."""
        # A tensor that forward has assigned to a buffer counts as a buffer.
        made = {id(t) for t in self._module.buffers() if id(t) not in self._versions}
        others = (t for t in held if id(t) not in self._writable | made)
        return any(version_of(t) != self._versions.get(id(t), 0) for t in others)


def _attributes(module: nn.Module) -> dict[str, list[Any]]:
    """Return the attributes that forward could write, by dotted name, with the objects they hold.

    For a buffer, the entry is its dtype and shape alone: forward may write into it, or replace it
    by another tensor of this dtype and shape.
    """
    found: dict[str, list[Any]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, value in owner.__dict__.items():
            if name == "_buffers":
                found.update({f"{prefix}{n}": [_kind(b)] for n, b in value.items()})
            elif name in ("_parameters", "_modules"):
                found.update({f"{prefix}{n}": [v] for n, v in value.items()})
            elif not name.endswith("_hooks"):
                found[f"{prefix}{name}"] = all_held(value)
    return found


def _kind(buffer: torch.Tensor | None) -> str:
    return "" if buffer is None else f"{buffer.dtype} {tuple(buffer.shape)}"


class QuestionWatch(TorchFunctionMode):
    """Record which properties of tensors forward reads, since its control flow may depend on them.

    A read of a tensor's attribute arrives here as a call of the attribute's getter.

    - ``asks``: the properties that forward reads; a sample may be refused for them, and guards
      compare some of them.
    - ``complaints``: uses that compiled code cannot repeat, such as reads of ``grad_fn``.
    - ``started``: ids of the fake tensors that forward makes require a gradient. Such a tensor may
      neither be a result nor remain on the module.
    """

    _LAYOUT = frozenset(
        {
            torch.Tensor.is_contiguous,
            torch.Tensor.stride,
            torch.Tensor.as_strided,
            torch.Tensor.as_strided_,
            torch.Tensor.dim_order,
            torch.as_strided,
            torch.as_strided_,
            torch.as_strided_copy,
            torch.as_strided_scatter,
        }
    )
    _OF_AUTOGRAD = frozenset(
        {"_base", "_version", "grad", "grad_fn", "is_leaf", "output_nr", "retains_grad"}
    )
    _OF_MEMORY = frozenset(
        {
            torch.Tensor._is_view,
            torch.Tensor.data_ptr,
            torch.Tensor.is_set_to,
            torch.Tensor.storage,
            torch.Tensor.untyped_storage,
        }
    )
    _TEXT = frozenset({torch.Tensor.__format__, torch.Tensor.__repr__})

    def __init__(self) -> None:
        super().__init__()
        self.asks: set[Question] = set()
        self.complaints: dict[str, None] = {}
        self.started: set[int] = set()
        self._records = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is set_grad_enabled and args[0] and not self._records:
            self.asks.add(Question.GRADIENTS)
        if func in self._LAYOUT:
            self.asks.add(Question.LAYOUT)
            for operator in unanswered():
                self.complaints[f"asks for strides behind {operator}, which are not known"] = None
        if func is torch.Tensor.storage_offset and not is_called_by_library(1):
            self.asks.add(Question.OFFSET)
        if switches_gradients(func, args, kwargs or {}):
            self._note_switch(args[0])
        if not self._records and (kwargs or {}).get("requires_grad") is True:
            self.asks.add(Question.STARTED)
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in self._OF_AUTOGRAD and not is_called_by_library(1):
            self.complaints[f"reads {name} of a tensor"] = None
        if name == "requires_grad" and not is_called_by_library(1):
            self.asks.add(Question.GRADIENTS)
        if func in self._OF_MEMORY and not is_called_by_library(1, func.__name__):
            self.complaints[f"asks for the memory of a tensor ({func.__name__})"] = None
        if func is torch.Tensor.is_inference and not is_called_by_library(1):
            self.complaints["asks whether a tensor was made in inference mode"] = None
        if func in self._TEXT and not is_called_by_library(1, func.__name__):
            self.complaints["makes text of the values of a tensor (print, an f-string)"] = None
        return func(*args, **(kwargs or {}))

    def _note_switch(self, tensor: torch.Tensor) -> None:
        """Record that forward changes ``requires_grad`` of ``tensor``.

        The gradient of a temporary tensor is invisible outside forward. Whether the tensor existed
        before, is returned or remains on the module is checked after forward has run.
        """
        if isinstance(tensor, FakeTensor) and not tensor.requires_grad:
            self.started.add(id(tensor))
            if not self._records:
                self.asks.add(Question.STARTED)
        elif self._records:
            self.complaints["changes requires_grad of a tensor"] = None


def switches_gradients(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``func`` changes ``requires_grad`` of a tensor."""
    if func is torch.Tensor.requires_grad_:
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    elif func.__name__ == "__set__" and func.__self__ is torch.Tensor.requires_grad:
        wanted = args[1]
    else:
        return False
    return bool(wanted) is not args[0].requires_grad


_NOTED = (
    (torch, "manual_seed", "seeds PyTorch's generator"),
    (torch, "seed", "seeds PyTorch's generator"),
    (torch, "initial_seed", "reads the seed of PyTorch's generator"),
    (torch, "set_rng_state", "sets the state of PyTorch's generator"),
    (torch.random, "set_rng_state", "sets PyTorch's generator"),
    (os, "urandom", "draws random numbers from the system"),
    (random, "_urandom", "draws random numbers from the system"),
)


@contextmanager
def impurities(own: OwnCalls) -> Iterator[list[str]]:
    """Yield a list that collects the impure calls of forward inside this context.

    Impure calls are saved-tensor hooks, leaving inference mode, hashes of tensors, seeds and
    states of generators, the time, looks at files, and random draws from Python's or numpy's
    generator. Calls of ``torch.autograd.grad`` and ``backward`` raise :class:`DependenceError`. On
    exit, the generators that forward's thread used, as ``own`` has recorded, get their states back.
    """
    found: list[str] = []
    noted = [(owner, name, _noting(what, found)) for owner, name, what in _NOTED]
    generators = Generators()
    try:
        with ExitStack() as stack:
            for owner, name, note in noted:
                stack.enter_context(patched_here(owner, name, note))
            stack.enter_context(_autograd_watched(found))
            stack.enter_context(_hashes_watched(found))
            yield found
        # Operators on fake tensors draw no numbers, so a changed state was set by forward.
        used = [name for name in generators.used() if own.may_draw_from(name)]
        if not found and "torch" in used:
            found.append("sets the state of PyTorch's generator")
        found += [f"draws from {name}" for name in used if name != "torch"]
        found += own.questions
    finally:
        generators.restore(own.may_draw_from)


@contextmanager
def _autograd_watched(found: list[str]) -> Iterator[None]:
    def hook(genuine: Callable[..., Any], hooks: saved_tensors_hooks) -> Any:
        if not isinstance(hooks, save_on_cpu):
            found.append("installs hooks on the tensors that autograd saves")
        return genuine(hooks)

    def infer(genuine: Callable[..., Any], mode: torch.inference_mode) -> Any:
        # The frames of the patch's call and stub are between this function and the caller, which
        # may be PyTorch's decorator of a user's function.
        caller = calling_python_module(3) or ""
        if not mode.mode and not caller.startswith("torch._subclasses"):
            found.append("leaves inference mode")
        return genuine(mode)

    def dual(genuine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if innermost_transform() is None:  # within torch.func.jvp, which a trace can follow
            raise DependenceError(
                "uses torch.autograd.forward_ad.make_dual, whose tangent a trace does not keep: "
                "call torch.func.jvp in its place, or leave this module to PyTorch",
                in_parts=False,
            )
        return genuine(*args, **kwargs)

    with (
        patched_here(module_of_duals, "_make_dual", dual),
        patched_here(saved_tensors_hooks, "__enter__", hook),
        patched_here(torch.inference_mode, "__enter__", infer),
        patched_here(torch.autograd, "grad", _refusing("torch.autograd.grad")),
        patched_here(torch.autograd, "backward", _refusing("Tensor.backward")),
    ):
        yield


@contextmanager
def _hashes_watched(found: list[str]) -> Iterator[None]:
    def hashed(genuine: Callable[..., int], tensor: torch.Tensor) -> int:
        # The frames of the patch's call and stub are between this function and the caller.
        if not is_called_by_library(3):
            found.append("has a tensor in a set or as a key, by its hash")
        return genuine(tensor)

    with patched_here(torch.Tensor, "__hash__", hashed):
        yield


def _noting(what: str, found: list[str]) -> Callable[..., Any]:
    def note(genuine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found.append(what)
        return genuine(*args, **kwargs)

    return note


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(genuine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise DependenceError(
            f"uses {what}, which compiled code would not call again: leave this module to "
            "PyTorch, and dispatch submodules whose gradients need no gradient themselves",
            in_parts=False,
        )

    return refuse
