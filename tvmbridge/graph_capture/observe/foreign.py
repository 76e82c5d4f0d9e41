"""Unregistered tensors and modules: forward reads them, but they are not arguments or registered.

A module in a list, a global or a closure is no submodule of the dispatched module. Its parameters
are no inputs of the graph, so compiled code would miss changes of them. The same is true of
tensors in such places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from tvmbridge.core.assumptions import OutsideValue
from tvmbridge.core.contents import MISSING, is_constant
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.structure import map_tensors
from tvmbridge.core.torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode, pytree
from tvmbridge.graph_capture.trace.patches import patched_here

aten = torch.ops.aten
# The argument of these operators is a tensor that forward has just created from a number.
_FRESH = frozenset({aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default})


class ForeignTensors(TorchDispatchMode):
    """Record the unregistered tensors that operators read.

    - ``found``: the unregistered tensors, by their ids.
    - ``written``: whether an operator tried to write into one; it got a fake tensor instead.
    - ``differentiated``: the unregistered tensors that require a gradient, by their ids.

    Args:
        stand_ins: the unregistered tensors that have fakes, by the ids of the fakes.
        found: the dict to collect the unregistered tensors in.
        mode: the mode that creates fakes.
    """

    def __init__(
        self,
        stand_ins: Mapping[int, torch.Tensor],
        found: dict[int, torch.Tensor],
        mode: FakeTensorMode,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stand_ins = stand_ins
        self._mode = mode
        self.found = found
        self.written = False
        self.differentiated: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)) if func not in _FRESH else ():
            if isinstance(value, torch.Tensor):
                self._note(self._stand_ins.get(id(value)), value)
        if func._schema.is_mutable:
            args, kwargs = map_tensors(self._faked, (args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake of an unregistered tensor, which an operator writes into in its place."""
        if isinstance(tensor, FakeTensor) or id(tensor) not in self.found:
            return tensor
        self.written = True
        return self._mode.from_tensor(tensor.detach())

    def note_results(self, results: Iterable[Any]) -> None:
        """Record the unregistered tensors among the results of forward."""
        for value in results:
            if isinstance(value, torch.Tensor):
                self._note(self._stand_ins.get(id(value)), value)

    def without_gradient(self) -> list[str]:
        """Return a list with one complaint if an unregistered tensor would lose its gradient."""
        shapes = ", ".join(str(tuple(t.shape)) for t in self.differentiated.values())
        complaint = (
            f"reads a tensor that requires a gradient (of shape {shapes}) and is neither an "
            "argument nor a parameter of the module"
        )
        return [complaint] if self.differentiated else []

    def _note(self, stood_for: torch.Tensor | None, value: torch.Tensor) -> None:
        foreign = stood_for if stood_for is not None or isinstance(value, FakeTensor) else value
        if foreign is not None:
            self.found[id(foreign)] = foreign
            if foreign.requires_grad and torch.is_grad_enabled():
                self.differentiated[id(foreign)] = foreign


class ForeignConstant(NamedTuple):
    """A constant attribute that forward reads of an unregistered module."""

    module: nn.Module
    name: str
    value: Any

    def watched(self, originals: Mapping[int, nn.Module]) -> OutsideValue:
        """Return the value for a guard to compare.

        Args:
            originals: the user's modules by the ids of their copies; the guard reads the user's
                module.
        """
        owner = originals.get(id(self.module), self.module)
        label = f"{self.name} of a {type(owner).__name__}"
        key = (id(owner), self.name)
        return OutsideValue(owner.__dict__, self.name, label, self.value, key, owner=owner)


class ForeignModules:
    """Record the unregistered modules that forward runs.

    Modules that forward itself creates are not recorded.
    """

    def __init__(self) -> None:
        self._run: dict[int, nn.Module] = {}
        self._minding: set[int] = set()
        self._made: dict[int, nn.Module] = {}
        self._read: dict[tuple[int, str], nn.Module] = {}

    def note(self, module: nn.Module, attribute: str) -> None:
        """Record that ``attribute`` of the unregistered ``module`` is read."""
        if id(module) not in self._made:
            self._read[id(module), attribute] = module
        if attribute in ("forward", "training") and id(module) not in self._made:
            self._run[id(module)] = module
            if attribute == "training":
                self._minding.add(id(module))

    def clear(self) -> None:
        """Drop the records of modules that were run or read."""
        self._run.clear()
        self._read.clear()

    def stateful(self) -> list[nn.Module]:
        """Return the modules that forward ran and that hold tensors or read ``training``."""
        return [m for key, m in self._run.items() if key in self._minding or _holds_tensors(m)]

    def constants_read(self) -> list[ForeignConstant]:
        """Return the constants, such as numbers and strings, that were read of these modules."""
        held = ((m, name, m.__dict__.get(name, MISSING)) for (_, name), m in self._read.items())
        return [ForeignConstant(m, name, v) for m, name, v in held if is_constant(v)]

    @contextmanager
    def noticing_new_ones(self) -> Iterator[None]:
        """Inside this context, record the modules that forward creates, to leave them out."""

        def made(
            genuine: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any
        ) -> None:
            self._made[id(module)] = module
            genuine(module, *args, **kwargs)

        with patched_here(nn.Module, "__init__", made):
            yield


def refuse_foreign(module: nn.Module, run: Sequence[nn.Module]) -> None:
    """Refuse a forward that has ``run`` unregistered modules.

    Raises:
        CaptureError: ``run`` is not empty.
    """
    if run:
        kinds = ", ".join(sorted({f"a {type(m).__name__}" for m in run}))
        raise CaptureError(
            f"forward of {type(module).__name__} runs {kinds} that is none of its submodules, so "
            "that changes of its parameters and flags would not be seen; make it an attribute of "
            "the module"
        )


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))
