"""The key of a plan: what a module and a call must be for the plan to be looked at at all."""

from __future__ import annotations

import itertools
import json
import operator
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.backends import is_on_host
from tvmbridge.cache.key import digest_of
from tvmbridge.core.methods import MethodOf
from tvmbridge.core.torch_private import has_storage
from tvmbridge.graph_capture.observe.hooks import GLOBAL_HOOKS
from tvmbridge.graph_capture.observe.settings import settings_now
from tvmbridge.recall.codec import encode
from tvmbridge.recall.describe import Describer, UndescribableError
from tvmbridge.recall.spaces import SPACES, function_text, plain_function

_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_OWN_CALLS = ("_call_impl", "_wrapped_call_impl", "_compiled_call_impl", "__call__")


def module_entry(module: nn.Module, describer: Describer, device: torch.device | None) -> str:
    """Return a digest of the module's structure, classes, flags and tensors without their values.

    Args:
        module: the module.
        describer: describes values of this module.
        device: where tensors may be, beside the host's memory; None: anywhere.

    Raises:
        UndescribableError: something about the module cannot be described as data.
    """
    for each in module.modules():
        # Their forward is no code of their class.
        if isinstance(each, MethodOf | fx.GraphModule | torch.jit.ScriptModule):
            raise UndescribableError(f"a {type(each).__name__}")
    if any(GLOBAL_HOOKS):
        raise UndescribableError("hooks of all modules")
    memory = _Memory(device)
    first: dict[int, int] = {}
    lines: list[Any] = []
    for name, each in module.named_modules(remove_duplicate=False):
        number = first.setdefault(id(each), len(first))
        lines.append([name, number, describer.of(type(each)), each.training])
        _refuse_own_calls(each, name, each is module)
        for held in ("_parameters", "_buffers"):
            for key, tensor in vars(each)[held].items():
                described = None if tensor is None else memory.of(tensor, describer)
                lines.append([held, key, described])
    return digest_of(json.dumps(lines))


def _refuse_own_calls(module: nn.Module, name: str, is_root: bool) -> None:
    for key, value in vars(module).items():
        of_calls = "hooks" in key and "state_dict" not in key
        if of_calls and isinstance(value, dict | set) and value:
            raise UndescribableError(f"hooks of {name or 'the module'}")
        if key in _OWN_CALLS or (key == "forward" and not is_root):
            raise UndescribableError(f"an own {key} of {name or 'the module'}")


def call_entry(
    module: nn.Module,
    leaves: Sequence[Any],
    structure: Any,
    mode: Sequence[Any],
    describer: Describer,
    device: torch.device | None,
) -> str:
    """Return a digest of a call: structure, constants, and tensors without their values.

    Args:
        module: the module, whose tensors may share memory with arguments.
        leaves: the leaves of the arguments.
        structure: the structure of the arguments.
        mode: the mode of the call.
        describer: describes values of this module.
        device: where tensors may be, beside the host's memory; None: anywhere.

    Raises:
        UndescribableError: an argument cannot be described as data.
    """
    memory = _Memory(device)
    for tensor in (*module.parameters(), *module.buffers()):
        memory.of(tensor, describer)
    described = [
        memory.of(leaf, describer) if isinstance(leaf, torch.Tensor) else describer.of(leaf)
        for leaf in leaves
    ]
    memory.refuse_overlaps()
    parts = [encode(structure), described, list(map(describer.of, mode))]
    return digest_of(json.dumps(parts))


class _Memory:
    """Describes tensors, by numbers for the tensors and storages that several of them share."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._tensors: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._ranges: set[tuple[int, int]] = set()

    def refuse_overlaps(self) -> None:
        """Raise UndescribableError if two storages share a part of their memory."""
        ranges = sorted(self._ranges)
        for (_, end), (start, _) in itertools.pairwise(ranges):
            if start < end:
                raise UndescribableError("tensors whose storages overlap")

    def of(self, tensor: torch.Tensor, describer: Describer) -> list[Any]:
        reason = _unusual(tensor, self._device)
        if reason is not None:
            raise UndescribableError(f"a tensor that is {reason}")
        held = tensor.untyped_storage()
        storage = held.data_ptr() if tensor.numel() else -1 - id(tensor)
        if tensor.numel():
            self._ranges.add((storage, storage + held.nbytes()))
        return [
            type(tensor).__name__,
            self._tensors.setdefault(id(tensor), len(self._tensors)),
            self._storages.setdefault(storage, len(self._storages)),
            str(tensor.dtype),
            str(tensor.device),
            list(tensor.shape),
            list(tensor.stride()),
            tensor.storage_offset(),
            tensor.requires_grad,
            tensor.is_leaf,
            describer.of(vars(tensor)),
        ]


def _unusual(tensor: torch.Tensor, device: torch.device | None) -> str | None:
    if type(tensor) not in _TENSORS:
        return f"a {type(tensor).__qualname__}"
    if not (is_on_host(tensor.device) or device in (None, tensor.device)):
        return f"on {tensor.device.type}"
    if tensor.layout is not torch.strided or not has_storage(tensor):
        return "not strided"
    if tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or tensor.is_quantized:
        return "a view of another kind, or of inference mode"
    return "hooked" if tensor._backward_hooks else None


def settings_entry() -> dict[str, str]:
    """Return the entry for PyTorch's settings."""
    return {"settings of PyTorch": json.dumps([settings_now(), str(sys.flags)])}


def functions_entry(describer: Describer) -> dict[str, str]:
    """Return the entry for PyTorch's functions, which may be replaced."""
    return {"functions of PyTorch": digest_of("\n".join(_functions(describer)))}


class FunctionsNow:
    """Numbers the states of PyTorch's functions in this process, without describing them.

    A state is another one if an entry of a Python module or class of PyTorch is another object.
    """

    def __init__(self) -> None:
        self._states: list[list[dict[str, Any]]] = []

    def entry(self) -> dict[str, str]:
        """Return the entry for PyTorch's functions: the number of their present state."""
        now = [_entries(space) for space in SPACES]
        number = next((n for n, s in enumerate(self._states) if _are_same(s, now)), None)
        if number is None:
            number = len(self._states)
            self._states.append(now)
        return {"functions of PyTorch": f"state {number}"}


def _entries(space: Any) -> dict[str, Any]:
    """Return the entries of a Python module or class, without those that Python adds on its own.

    An import adds submodules, and a first warning adds a registry.
    """
    below = f"{space.__name__}."
    return {
        name: value
        for name, value in vars(space).items()
        if name != "__warningregistry__"
        and not (isinstance(value, types.ModuleType) and value.__name__.startswith(below))
    }


def _are_same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    return all(
        list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))
        for one, other in zip(some, others, strict=True)
    )


def _functions(describer: Describer) -> Iterator[str]:
    for space in SPACES:
        held: Mapping[str, Any] = vars(space)
        yield f"{space.__name__}"
        for name in sorted(held):
            value = plain_function(held[name])
            if isinstance(value, types.FunctionType):
                yield f"{name} {function_text(value, describer.code)}"
            elif isinstance(value, type):
                yield f"{name} class {value.__module__} {value.__qualname__}"
            elif isinstance(value, types.ModuleType):
                # The submodules that are imported so far are no state.
                if not value.__name__.startswith(f"{space.__name__}."):
                    yield f"{name} module {value.__name__}"
            elif type(value) in (bool, int, float, str):
                yield f"{name} {value!r}"
            elif callable(value):
                yield f"{name} {type(value).__name__} {getattr(value, '__qualname__', '')}"
