"""Foreign tensors and modules: what forward reads that is neither an argument nor registered.

A module in a list, or one that a global or a closure holds, is no submodule: its parameters are no
inputs of the graph, and nobody would notice that it was changed. The same is true of such tensors.
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
# They take numbers that forward itself has just made a tensor of.
_FRESH = frozenset({aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default})


class ForeignTensors(TorchDispatchMode):
    """Notes the tensors that operators read and that are not fakes of what forward may read.

    ``written``: an operator was to write into one, and has got a fake of it instead.

    Args:
        stand_ins: fakes that stand for foreign tensors, by their ids.
        found: gets the foreign tensors, by their ids.
        mode: makes fakes.
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
        """A fake of ``tensor``, for an operator that would write into the tensor itself."""
        if isinstance(tensor, FakeTensor) or id(tensor) not in self.found:
            return tensor
        self.written = True
        return self._mode.from_tensor(tensor.detach())

    def note_results(self, results: Iterable[Any]) -> None:
        """Note the foreign tensors that forward returns as they are."""
        for value in results:
            if isinstance(value, torch.Tensor):
                self._note(self._stand_ins.get(id(value)), value)

    def without_gradient(self) -> list[str]:
        """The complaint that a gradient would be lost, if there is one."""
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
    """An attribute of a module that forward runs though it is not its own."""

    module: nn.Module
    name: str
    value: Any

    def watched(self, originals: Mapping[int, nn.Module]) -> OutsideValue:
        """The value to be compared, of the user's module where this one is a copy."""
        owner = originals.get(id(self.module), self.module)
        label = f"{self.name} of a {type(owner).__name__}"
        key = (id(owner), self.name)
        return OutsideValue(owner.__dict__, self.name, label, self.value, key, owner=owner)


class ForeignModules:
    """Notes the modules that are run and are none of those that forward may run.

    Modules that forward makes itself are its own.
    """

    def __init__(self) -> None:
        self._run: dict[int, nn.Module] = {}
        self._minding: set[int] = set()
        self._made: dict[int, nn.Module] = {}
        self._read: dict[tuple[int, str], nn.Module] = {}

    def note(self, module: nn.Module, attribute: str) -> None:
        """``attribute`` of ``module``, which is not known, is read."""
        if id(module) not in self._made:
            self._read[id(module), attribute] = module
        if attribute in ("forward", "training") and id(module) not in self._made:
            self._run[id(module)] = module
            if attribute == "training":
                self._minding.add(id(module))

    def clear(self) -> None:
        """Forget what was noted so far."""
        self._run.clear()
        self._read.clear()

    def stateful(self) -> list[nn.Module]:
        """Those that hold tensors, or ask whether they are in training."""
        return [m for key, m in self._run.items() if key in self._minding or _holds_tensors(m)]

    def constants_read(self) -> list[ForeignConstant]:
        """The numbers, strings and the like that were read of them."""
        held = ((m, name, m.__dict__.get(name, MISSING)) for (_, name), m in self._read.items())
        return [ForeignConstant(m, name, v) for m, name, v in held if is_constant(v)]

    @contextmanager
    def noticing_new_ones(self) -> Iterator[None]:
        """Within it modules are noted as they are made."""

        def made(
            genuine: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any
        ) -> None:
            self._made[id(module)] = module
            genuine(module, *args, **kwargs)

        with patched_here(nn.Module, "__init__", made):
            yield


def refuse_foreign(module: nn.Module, run: Sequence[nn.Module]) -> None:
    """Raise CaptureError if forward of ``module`` has ``run`` modules that are not its own."""
    if run:
        kinds = ", ".join(sorted({f"a {type(m).__name__}" for m in run}))
        raise CaptureError(
            f"forward of {type(module).__name__} runs {kinds} that is none of its submodules, so "
            "that changes of its parameters and flags would not be seen; make it an attribute of "
            "the module"
        )


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))
