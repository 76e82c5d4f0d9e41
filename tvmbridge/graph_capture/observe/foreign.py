"""Unregistered tensors and modules: forward reads them, but they are not arguments or registered.

A module in a list, a global or a closure is no submodule of the dispatched module. Its parameters
are no inputs of the graph, so compiled code would miss changes of them. The same is true of
tensors in such places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from tvmbridge.calls.copies import copied_values
from tvmbridge.calls.patches import patched_here
from tvmbridge.core.assumptions import OutsideValue
from tvmbridge.core.collectives import refuse_exchange
from tvmbridge.core.contents import MISSING, same_value
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.structure import map_tensors
from tvmbridge.core.torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode, pytree
from tvmbridge.graph_capture.observe.data import is_data, is_object
from tvmbridge.graph_capture.observe.sources import Source
from tvmbridge.graph_capture.observe.undo import current_undo

aten = torch.ops.aten
_OF_EVERY_MODULE = frozenset((*nn.Module().__dict__, "__dict__")) - {"training"}
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
        refuse_exchange(func)
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

    def without_gradient(self, but: Collection[int]) -> list[str]:
        """Return a list with one complaint if an unregistered tensor would lose its gradient.

        ``but`` are the ids of tensors that become inputs later.
        """
        lost = [t for key, t in self.differentiated.items() if key not in but]
        shapes = ", ".join(str(tuple(t.shape)) for t in lost)
        complaint = (
            f"reads a tensor that requires a gradient (of shape {shapes}) and is neither an "
            "argument nor a parameter of the module"
        )
        return [complaint] if lost else []

    def _note(self, stood_for: torch.Tensor | None, value: torch.Tensor) -> None:
        foreign = stood_for if stood_for is not None or isinstance(value, FakeTensor) else value
        if foreign is not None:
            self.found[id(foreign)] = foreign
            if foreign.requires_grad and torch.is_grad_enabled():
                self.differentiated[id(foreign)] = foreign


class ForeignConstant(NamedTuple):
    """An attribute that forward reads or assigns of an unregistered module.

    - ``module``: the unregistered module.
    - ``name``: the name of the attribute.
    - ``value``: its value before, a copy if it is data; MISSING if there was none.
    """

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
        key = (id(owner), self.name)
        return OutsideValue(owner.__dict__, self.name, self.label, self.value, key, owner=owner)

    @property
    def label(self) -> str:
        """The attribute's name for messages."""
        return f"{self.name} of a {type(self.module).__name__}"

    def has_changed(self) -> bool:
        """Whether the attribute has another value now."""
        return not same_value(self.module.__dict__.get(self.name, MISSING), self.value)


class ForeignModules:
    """Record the unregistered modules that forward runs.

    Modules that forward itself creates are not recorded.
    """

    def __init__(self) -> None:
        self._run: dict[int, nn.Module] = {}
        self._minding: set[int] = set()
        self._made: dict[int, nn.Module] = {}
        self._met: dict[tuple[int, str], ForeignConstant] = {}
        self._read: set[tuple[int, str]] = set()
        self._undo = current_undo()

    def note(self, module: nn.Module, attribute: str) -> None:
        """Record that ``attribute`` of the unregistered ``module`` is read."""
        self.note_value(module, attribute)
        self._read.add((id(module), attribute))
        if attribute in ("forward", "training") and id(module) not in self._made:
            self._run[id(module)] = module
            if attribute == "training":
                self._minding.add(id(module))

    def note_value(self, module: nn.Module, attribute: str) -> None:
        """Record the value of ``attribute`` before forward may change it."""
        key = id(module), attribute
        if key in self._met or id(module) in self._made or attribute in _OF_EVERY_MODULE:
            return
        # A plain look-up would count as a read.
        held = object.__getattribute__(module, "__dict__")
        value = held.get(attribute, MISSING)
        self._undo.note_place(Source(module, held, attribute, attribute, value))
        if is_data(value) or is_object(value):
            copied = copied_values({0: value})[0]
            value = copied if same_value(copied, value) else value
        self._met[key] = ForeignConstant(module, attribute, value)

    def clear(self) -> None:
        """Drop the records of modules that were run or read."""
        self._run.clear()
        self._met.clear()
        self._read.clear()

    def stateful(self) -> list[nn.Module]:
        """Return the modules that forward ran and that hold tensors or read ``training``."""
        return [m for key, m in self._run.items() if key in self._minding or _holds_tensors(m)]

    def constants_read(self) -> list[ForeignConstant]:
        """Return the numbers, strings and other data that were read of these modules."""
        read = (each for key, each in self._known() if key in self._read)
        return [each for each in read if is_data(each.value) or is_object(each.value)]

    def changed(self) -> tuple[str, ...]:
        """Return the labels of the attributes of these modules that forward has changed."""
        return tuple(each.label for _, each in self._known() if each.has_changed())

    def _known(self) -> list[tuple[tuple[int, str], ForeignConstant]]:
        return [(key, each) for key, each in self._met.items() if key[0] not in self._made]

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
    """Raise a CaptureError if forward has ``run`` unregistered modules."""
    if run:
        kinds = ", ".join(sorted({f"a {type(m).__name__}" for m in run}))
        raise CaptureError(
            f"forward of {type(module).__name__} runs {kinds} that is none of its submodules, so "
            "that changes of its parameters and flags would not be seen; make it an attribute of "
            "the module"
        )


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))
