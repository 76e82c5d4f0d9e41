"""Effects: what forward does beside computing that compiled code would not do at each call."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tvmbridge.dependence import DependenceError
from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.observing.contents import same_value, state_of
from tvmbridge.observing.executed import is_called_by_library
from tvmbridge.reads import Question
from tvmbridge.tracing.patches import patched_here


def wrote(tensors: Iterable[torch.Tensor], versions: Mapping[int, int], writable: set[int]) -> bool:
    return any(t._version != versions.get(id(t), 0) for t in tensors if id(t) not in writable)


def snapshot(module: nn.Module) -> dict[str, list[Any]]:
    """Everything that forward could write, by name, with what it holds; buffers by name alone."""
    found: dict[str, list[Any]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, value in owner.__dict__.items():
            if name == "_buffers":
                found.update({f"{prefix}{n}": [b is None] for n, b in value.items()})
            elif name in ("_parameters", "_modules"):
                found.update({f"{prefix}{n}": [v] for n, v in value.items()})
            elif not name.endswith("_hooks"):
                found[f"{prefix}{name}"] = all_held(value, 4)
    return found


def all_held(value: Any, depth: int) -> list[Any]:
    held = (state_of(value) or []) if depth else []
    return [value, *(inner for item in held for inner in all_held(item, depth - 1))]


def written(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> tuple[str, ...]:
    written = [name for name in before if name not in after]
    for name, now in after.items():
        then = before.get(name, [])
        if len(now) != len(then) or not all(map(_unchanged, then, now)):
            written.append(name)
    return tuple(written)


def _unchanged(then: Any, now: Any) -> bool:
    # What containers hold follows them in the list.
    return then is now or (type(then) is type(now) and same_value(then, now, depth=0))


class QuestionWatch(TorchFunctionMode):
    """Notes what forward asks of tensors that may decide what it computes.

    ``complaints`` are questions to autograd, whose answers compiled code cannot know.
    """

    _LAYOUT = frozenset(
        {
            torch.Tensor.is_contiguous,
            torch.Tensor.stride,
            torch.Tensor.as_strided,
            torch.as_strided,
        }
    )
    _OF_AUTOGRAD = frozenset({"_base", "_version", "grad", "grad_fn", "is_leaf", "retains_grad"})

    def __init__(self) -> None:
        super().__init__()
        self.asks: set[Question] = set()
        self.complaints: dict[str, None] = {}
        self._records = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and args[0] and not self._records:
            self.asks.add(Question.GRADIENTS)
        if func in self._LAYOUT:
            self.asks.add(Question.LAYOUT)
        if func is torch.Tensor.storage_offset and not is_called_by_library(1):
            self.asks.add(Question.OFFSET)
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in self._OF_AUTOGRAD and not is_called_by_library(1):
            self.complaints[f"reads {name} of a tensor"] = None
        if name == "requires_grad" and not is_called_by_library(1):
            self.asks.add(Question.GRADIENTS)
        return func(*args, **(kwargs or {}))


@contextmanager
def impurities() -> Iterator[list[str]]:
    """Collects what forward does with autograd's hooks, and with random numbers but to draw them.

    All generators are as before afterwards.
    """
    found: list[str] = []

    def noting(what: str) -> Callable[..., Any]:
        def note(genuine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found.append(what)
            return genuine(*args, **kwargs)

        return note

    def refusing(what: str) -> Callable[..., Any]:
        def refuse(genuine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            raise DependenceError(
                f"uses {what}, which compiled code would not call again: leave this module to "
                "PyTorch, and dispatch submodules whose gradients need no gradient themselves"
            )

        return refuse

    def enter(genuine: Callable[..., Any], hooks: saved_tensors_hooks) -> Any:
        if not isinstance(hooks, save_on_cpu):
            found.append("installs hooks on the tensors that autograd saves")
        return genuine(hooks)

    def infer(genuine: Callable[..., Any], mode: torch.inference_mode) -> Any:
        # The patch's call and its stub stand between this function and who enters.
        caller = sys._getframe(3).f_globals.get("__name__", "")
        if not mode.mode and not caller.startswith("torch._subclasses"):
            found.append("leaves inference mode")
        return genuine(mode)

    generators = Generators()
    try:
        with (
            patched_here(torch, "manual_seed", noting("seeds PyTorch's generator")),
            patched_here(torch, "seed", noting("seeds PyTorch's generator")),
            patched_here(torch, "set_rng_state", noting("sets the state of PyTorch's generator")),
            patched_here(torch.random, "set_rng_state", noting("sets PyTorch's generator")),
            patched_here(saved_tensors_hooks, "__enter__", enter),
            patched_here(torch.autograd, "grad", refusing("torch.autograd.grad")),
            patched_here(torch.autograd, "backward", refusing("Tensor.backward")),
            patched_here(torch.inference_mode, "__enter__", infer),
            patched_here(torch, "initial_seed", noting("reads the seed of PyTorch's generator")),
        ):
            yield found
        # Nothing is drawn on fake tensors.
        used = generators.used()
        if not found and "torch" in used:
            found.append("sets the state of PyTorch's generator")
        found += [f"draws from {name}" for name in used if name != "torch"]
    finally:
        generators.restore()


class Generators:
    """The states of the global generators, of PyTorch, Python and numpy, as they are now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()

    def used(self) -> list[str]:
        """The modules whose generator has another state now."""
        changed = {
            "torch": not torch.equal(torch.get_rng_state(), self._torch),
            "random": random.getstate() != self._python,
            "numpy.random": repr(numpy.random.get_state()) != repr(self._numpy),
        }
        return [name for name, differs in changed.items() if differs]

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)


@contextmanager
def no_draws_by(operators: Iterable[str]) -> Iterator[None]:
    """Within it code runs in which ``operators``, of unknown makers, are called.

    Raises:
        UnsupportedOperatorError: random numbers were drawn. All draws of compiled code are made
            before it runs, so that one within it would stand in another place of the sequence.
    """
    names = ", ".join(operators)
    if not names:
        yield
        return
    generators = Generators()
    try:
        yield
        used = generators.used()
    finally:
        generators.restore()
    if used:
        raise UnsupportedOperatorError(
            f"an operator that was registered ({names}) draws from {', '.join(used)} without "
            "saying so by the tag nondeterministic_seeded"
        )
