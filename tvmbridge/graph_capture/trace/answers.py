"""Control flow on small buffers: ``if self.is_initialized:``.

A trace does not know the values of buffers. Forward may convert a small buffer, or a value computed
from small buffers alone, to a Python bool or number. It then gets the current value, and a guard
(:class:`Answer`) is recorded: the captured graph is valid only for calls that find the same value.
Tensors that are plain attributes count as buffers here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tvmbridge.backends import is_on_host
from tvmbridge.calls.standins import tensors_of
from tvmbridge.core.assumptions import Answer
from tvmbridge.core.torch_private import disable_current_modes, pytree, storage_key

# The greatest number of elements: each call of the compiled module compares values again.
_LARGEST = 64

_ASKING = frozenset(
    {
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
    }
)
# Functions and methods that compute; none draws random numbers or writes into a tensor.
_NAMES = """
eq ne lt le gt ge equal allclose isclose isnan isinf isfinite logical_not logical_and logical_or
add radd sub rsub mul rmul div truediv rtruediv floordiv mod pow rpow matmul neg invert and or xor
abs sign ceil floor round sqrt rsqrt exp log sin cos tanh sigmoid square reciprocal clamp minimum
maximum lerp all any sum prod mean min max amin amax argmin argmax cumsum diff count_nonzero getitem
unbind select narrow view reshape squeeze unsqueeze flatten expand expand_as transpose permute
detach clone contiguous to type type_as bool int long float double cpu item tolist len dim
ndimension size numel nelement stride is_contiguous is_floating_point is_complex cat stack where
ones_like zeros_like
"""
_COMPUTING = frozenset(_NAMES.split())

_Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Known:
    """A value computed from small buffers alone.

    - ``names``: the names of the buffers
    - ``make``: computes the value again from the tensors of all buffers, by name
    """

    names: frozenset[str]
    make: Callable[[_Tensors], Any]


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of ``module`` and its tensors in plain attributes, by dotted name."""
    return {n: t for n, t in tensors_of(module).items() if not isinstance(t, nn.Parameter)}


def small_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the buffers that are small enough for guards on their values.

    Buffers that share memory with another tensor are left out, because a write into the other
    tensor would not be seen.
    """
    buffers = {n: b for n, b in buffers_of(module).items() if _is_small(b)}
    if not buffers:
        return {}
    own = {id(t): t for t in tensors_of(module).values() if t.layout is torch.strided}
    users = Counter(storage_key(t) for t in own.values())
    with disable_current_modes():
        return {
            name: buffer.detach().clone()
            for name, buffer in buffers.items()
            if users[storage_key(buffer)] == 1
        }


def _is_small(buffer: torch.Tensor) -> bool:
    plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided
    plain = plain and not buffer.requires_grad
    return plain and is_on_host(buffer.device) and 0 < buffer.numel() <= _LARGEST


class Answers(TorchFunctionMode):
    """A mode in which small buffers, and values computed from them alone, convert to Python values.

    A function outside ``_COMPUTING`` might write into its arguments. If it takes a known value, all
    values computed from the same buffers are unknown from then on. The mode is a separate one
    because it must see every function.

    Args:
        values: the current values of the buffers, by name.
        stand_ins: the tensors that stand for the buffers in this run of forward, by name.
    """

    def __init__(self, values: _Tensors, stand_ins: _Tensors) -> None:
        super().__init__()
        self.answers: list[Answer] = []
        self._values = values
        # By id. The tensors are held, so that no other tensor gets their ids.
        self._known: dict[int, tuple[torch.Tensor, _Known]] = {}
        # The ids of the values that were computed from each buffer.
        self._computed: dict[str, set[int]] = {}
        for name in values:
            if name in stand_ins:
                self._learn(stand_ins[name], _root(name))

    def _learn(self, tensor: Any, known: _Known) -> None:
        # isinstance would raise for a deferred value of the epilogue.
        if issubclass(type(tensor), torch.Tensor) and id(tensor) not in self._known:
            self._known[id(tensor)] = tensor, known
            for name in known.names:
                self._computed.setdefault(name, set()).add(id(tensor))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        leaves, structure = pytree.tree_flatten((args, named)) if self._known else ([], None)
        found = {id(leaf): self._known[id(leaf)][1] for leaf in leaves if id(leaf) in self._known}
        if not found:
            return func(*args, **named)
        if not _computes(func, named):
            self._forget(found.values())
            return func(*args, **named)
        if any(isinstance(leaf, torch.Tensor) and id(leaf) not in found for leaf in leaves):
            return func(*args, **named)
        parts = [found.get(id(leaf), leaf) for leaf in leaves]
        names = frozenset().union(*(known.names for known in found.values()))
        made = _Known(names, lambda tensors: _call(func, parts, structure, tensors))
        if func in _ASKING:
            return self._answer(made)
        result = func(*args, **named)
        if type(result) in (tuple, list):
            for place, each in enumerate(result):
                self._learn(each, _item_of(made, place))
        else:
            self._learn(result, made)
        return result

    def _answer(self, asked: _Known) -> Any:
        with disable_current_modes(), torch.no_grad():
            value = asked.make(self._values)
        self.answers.append(Answer(asked.names, asked.make, value))
        return value

    def _forget(self, taken: Iterable[_Known]) -> None:
        for name in frozenset().union(*(known.names for known in taken)):
            for key in self._computed.pop(name, ()):
                # The id may by now be that of a value from another buffer.
                if key in self._known and name in self._known[key][1].names:
                    del self._known[key]


def _computes(func: Any, named: Mapping[str, Any]) -> bool:
    if func in _ASKING:
        return True
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of a property
        return True
    return named.get("out") is None and name.removeprefix("__").removesuffix("__") in _COMPUTING


def _root(name: str) -> _Known:
    return _Known(frozenset({name}), lambda tensors: tensors[name])


def _item_of(known: _Known, place: int) -> _Known:
    return _Known(known.names, lambda tensors: known.make(tensors)[place])


def _call(func: Any, parts: Sequence[Any], structure: Any, tensors: _Tensors) -> Any:
    """Call ``func`` with the arguments ``parts``, in which known values come from ``tensors``."""
    values = [part.make(tensors) if isinstance(part, _Known) else part for part in parts]
    args, named = pytree.tree_unflatten(values, structure)
    return func(*args, **named)
