"""Control flow on small buffers and arguments: ``if self.is_initialized:``, ``if mask.any():``.

A trace does not know the values of tensors. Forward may convert a small buffer, or a value computed
from small buffers alone, to a Python bool or number. It then gets the current value, and a guard
(:class:`Answer`) is recorded: the captured graph is valid only for calls that find the same value.
Tensors that are plain attributes count as buffers here.

A value computed from arguments alone may be converted to a bool, but to no number, since each
number would have code of its own. A value of constants alone, such as ``torch.ones(2, 4)``, may be
converted to either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tvmbridge.backends import is_on_host
from tvmbridge.calls.arguments import places_of
from tvmbridge.calls.standins import tensors_of
from tvmbridge.calls.views import shares_elements
from tvmbridge.core.assumptions import Answer
from tvmbridge.core.autocast import Autocast, autocast_now
from tvmbridge.core.torch_private import (
    DisableTorchFunction,
    disable_current_modes,
    pytree,
    storage_key,
)
from tvmbridge.core.writes import version_of

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
# Looked up now: during a trace ``torch.Tensor`` may have a replacement.
_ITEM = torch.Tensor.item
_TO_BOOL = (torch.Tensor.__bool__, _ITEM)
# Functions that make a tensor of one number, by that number or, as text, by its argument's place.
_FILLING: Mapping[Any, int | str] = {
    torch.ones: 1,
    torch.zeros: 0,
    torch.ones_like: 1,
    torch.zeros_like: 0,
    torch.Tensor.new_ones: 1,
    torch.Tensor.new_zeros: 0,
    torch.full: "1",
    torch.tensor: "0",
    torch.scalar_tensor: "0",
}
# Functions that write into their first argument, and into nothing else.
_WRITING = frozenset({"__setitem__", "masked_fill_", "fill_", "zero_"})
# Functions and methods that compute; none draws random numbers or writes into a tensor.
_NAMES = """
eq ne lt le gt ge equal allclose isclose isnan isinf isfinite logical_not logical_and logical_or
add radd sub rsub mul rmul div truediv rtruediv floordiv mod pow rpow matmul neg invert and or xor
abs sign ceil floor round sqrt rsqrt exp log sin cos tanh sigmoid square reciprocal clamp minimum
maximum lerp all any sum prod mean min max amin amax argmin argmax cumsum diff count_nonzero getitem
unbind select narrow view reshape squeeze unsqueeze flatten expand expand_as transpose permute
detach clone contiguous to type type_as bool int long float double cpu item tolist len dim
ndimension size numel nelement stride is_contiguous is_floating_point is_complex cat stack where
ones_like zeros_like pad masked_fill tril triu broadcast_to
"""
_COMPUTING = frozenset(_NAMES.split())
# Functions that neither write into their arguments nor return views of them.
_READING_NAMES = """
linear embedding scaled_dot_product_attention bmm baddbmm addmm einsum softmax log_softmax
cross_entropy nll_loss mse_loss layer_norm rms_norm gelu index_select gather take_along_dim
masked_select nonzero argwhere one_hot repeat_interleave bincount
"""
_READING = frozenset(_READING_NAMES.split())
_PLAIN = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device)

_Tensors = Mapping[str, torch.Tensor]
_Memo: TypeAlias = dict["_Known", Any]


@dataclass(frozen=True, eq=False)
class _Known:
    """A value computed from small buffers, from arguments or from constants alone.

    - ``names``: the names of the buffers, the places of the arguments, and the numbers of the
      constants.
    - ``make``: computes the value again from the tensors by name and place. It takes the values
      that are computed already, to which it adds.
    """

    names: frozenset[str | int]
    make: Callable[[_Tensors, _Memo], Any]

    def value(self, tensors: _Tensors, memo: _Memo) -> Any:
        """Return the value for these tensors; a value in ``memo`` is not computed again."""
        if self not in memo:
            memo[self] = self.make(tensors, memo)
        return memo[self]


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


def known_values(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the small buffers of ``module`` by name, and the arguments of a call by place."""
    return {**small_buffers(module), **_argument_values(module, args, kwargs)}


def _argument_values(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the tensors among the arguments by place, without those that share memory."""
    given = {place: t for place, t in places_of(args, kwargs).items() if type(t) is torch.Tensor}
    given = {place: t for place, t in given.items() if t.layout is torch.strided}
    own = {id(t): t for t in tensors_of(module).values() if t.layout is torch.strided}
    with disable_current_modes():
        users = Counter(storage_key(t) for t in (*given.values(), *own.values()))
        return {place: t for place, t in given.items() if users[storage_key(t)] == 1}


def _is_small(buffer: torch.Tensor) -> bool:
    plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided
    plain = plain and not buffer.requires_grad
    return plain and is_on_host(buffer.device) and 0 < buffer.numel() <= _LARGEST


class Answers(TorchFunctionMode):
    """A mode in which known values convert to Python values.

    Known are small buffers, arguments, tensors of one constant, and values computed from these. A
    function outside ``_COMPUTING`` and ``_READING`` might write into its arguments. If it takes a
    known value, all values computed from the same tensors are unknown from then on. The mode is a
    separate one because it must see every function.

    Args:
        values: the current values of the buffers by name, and of the arguments by place.
        stand_ins: the tensors that stand for them in this run of forward.
        autocast: the autocast state that forward runs under.
    """

    def __init__(self, values: _Tensors, stand_ins: _Tensors, autocast: Autocast = ()) -> None:
        super().__init__()
        self.answers: list[Answer] = []
        self._values = values
        self._autocast = autocast
        self._memo: _Memo = {}
        # Equal computations are one known value, so that each call of the code asks it once.
        self._made: dict[Any, _Known] = {}
        self._asked: dict[_Known, bool | int | float] = {}
        self._constants = 0
        # By id, with versions. The tensors are held, so that no other tensor gets their ids.
        self._known: dict[int, tuple[torch.Tensor, _Known, int]] = {}
        # What unknown functions have taken, or ``.data``: other tensors may share its memory.
        self._lost: set[str | int] = set()
        # The ids of the values that were computed from each buffer.
        self._computed: dict[str | int, set[int]] = {}
        for name in values:
            if name in stand_ins:
                self._learn(stand_ins[name], _root(name))

    def _learn(self, tensor: Any, known: _Known) -> None:
        # isinstance would raise for a deferred value of the epilogue.
        if issubclass(type(tensor), torch.Tensor) and id(tensor) not in self._known:
            self._known[id(tensor)] = tensor, known, version_of(tensor)
            for name in known.names:
                self._computed.setdefault(name, set()).add(id(tensor))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        leaves, structure = pytree.tree_flatten((args, named)) if self._known else ([], None)
        found = {id(leaf): known for leaf in leaves if (known := self._known_of(leaf)) is not None}
        if not found or (func in _FILLING and "out" not in named):
            result = func(*args, **named)
            self._learn_constant(result, func, args, named)
            return result
        if args and _name_of(func) in _WRITING:
            return self._written(func, args, named, found)
        if not _computes(func, named):
            if not _reads(func, args, named):
                self._lost.update(self._forget(found.values()))
            return func(*args, **named)
        made = self._computation(func, leaves, structure, found)
        if made is not None and _converts(func, *args):
            answer = self._answer(self._to_ask(made, found), func)
            if answer is not None:
                return answer
        result = func(*args, **named)
        if made is None:
            return result
        if type(result) in (tuple, list):
            for place, each in enumerate(result):
                self._learn(each, self._item_of(made, place))
        else:
            self._learn(result, made)
            if _name_of(func) == "__get__" and isinstance(result, torch.Tensor):
                self._lost.update(made.names)  # ``.data`` has a version of its own.
        return result

    def _known_of(self, leaf: Any) -> _Known | None:
        tensor, known, version = self._known.get(id(leaf), (None, None, 0))
        return None if tensor is None or version_of(tensor) != version else known

    def _written(
        self, func: Any, args: Any, named: Mapping[str, Any], found: Mapping[int, _Known]
    ) -> Any:
        """Call a function that writes into its first argument, whose new value may be known."""
        made = None
        # A copy has no elements that share memory, all of which a write changes.
        if id(args[0]) in found and not shares_elements(args[0]):
            leaves, structure = pytree.tree_flatten((args, named))
            made = self._computation(func, leaves, structure, found)
        names = _names(found.values())
        # Otherwise each tensor that shares the memory has another version from now on.
        if _buffers(names) or not names.isdisjoint(self._lost):
            self._forget(found.values())
            made = None
        result = func(*args, **named)
        self._known.pop(id(args[0]), None)
        if made is not None:
            self._learn(args[0], made)
        return result

    def _computation(
        self, func: Any, leaves: Sequence[Any], structure: Any, found: Mapping[int, _Known]
    ) -> _Known | None:
        """Return the known value of a call; None if it needs more than known values."""
        names, name = _names(found.values()), _name_of(func)
        arguments, buffers = _arguments(names), _buffers(names)
        # Calls compute it again under the autocast state that they are in themselves.
        if (arguments and buffers) or not (buffers or autocast_now() == self._autocast):
            return None
        if arguments:
            # An index out of range, which a call may not reach, ends the process on a GPU.
            taken = leaves[1:] if name in ("__getitem__", "__setitem__") else ()
            of_call = {key for key, known in found.items() if _arguments(known.names)}
            indices = [leaf for leaf in taken if id(leaf) in of_call]
            if "matmul" in name or any(index.dtype is not torch.bool for index in indices):
                return None
        if not all(_is_plain(leaf) for leaf in leaves if id(leaf) not in found):
            return None
        parts = [found.get(id(leaf), leaf) for leaf in leaves]
        key = func, str(structure), *(p if isinstance(p, _Known) else repr(p) for p in parts)
        called = partial(_with_write, func) if name in _WRITING else func
        return self._made.setdefault(key, _Known(names, partial(_call, called, parts, structure)))

    def _learn_constant(self, result: Any, func: Any, args: Any, named: Mapping[str, Any]) -> None:
        """Note what ``result`` is, if ``func`` has made it of Python numbers alone."""
        if func is not torch.arange and func not in _FILLING:
            return  # Other modes would see that the result is looked at.
        if named.keys() - {"dtype", "device"} or not _is_fixed(result):
            return
        kind = {"dtype": result.dtype, "device": result.device}
        if func is torch.arange:
            if not all(map(_is_plain, args)):
                return
            make = partial(torch.arange, *args, **kind)
        else:
            number = _FILLING[func]
            if isinstance(number, str):
                number = args[int(number)] if len(args) > int(number) else None
            if type(number) not in (bool, int, float):
                return
            make = partial(torch.full, tuple(result.shape), number, **kind)
        self._constants += 1
        self._learn(result, _Known(frozenset({self._constants}), lambda *_: make()))

    def _item_of(self, known: _Known, place: int) -> _Known:
        item = _Known(known.names, lambda tensors, memo: known.value(tensors, memo)[place])
        return self._made.setdefault((known, place), item)

    def _to_ask(self, made: _Known, found: Mapping[int, _Known]) -> _Known:
        """Return the tensor that arguments convert to a bool, so that one wait reads several."""
        return next(iter(found.values())) if _arguments(made.names) else made

    def _answer(self, asked: _Known, func: Any) -> Any:
        """Return the value of a conversion; None if it is not known."""
        by_arguments = _arguments(asked.names)
        if by_arguments and func not in _TO_BOOL:
            return None
        if asked not in self._asked:
            with disable_current_modes(), DisableTorchFunction(), torch.no_grad():
                try:
                    value = asked.value(self._values, self._memo)
                    self._asked[asked] = bool(value) if by_arguments else value
                except Exception:
                    if not by_arguments and all(isinstance(n, str) for n in asked.names):
                        raise
                    return None
            buffers, ask = _buffers(asked.names), partial(_value_of, asked)
            self.answers.append(Answer(buffers, by_arguments, ask, self._asked[asked]))
        return self._asked[asked]

    def _forget(self, taken: Iterable[_Known]) -> frozenset[str | int]:
        """Forget all values computed from the tensors of known values; return their names."""
        names = _names(taken)
        for name in names:
            for key in self._computed.pop(name, ()):
                # The id may by now be that of a value from another buffer.
                if key in self._known and name in self._known[key][1].names:
                    del self._known[key]
        return names


def _name_of(func: Any) -> str:
    """Return the name of a function of PyTorch; "" for one of another library."""
    module = getattr(func, "__module__", None) or "torch"  # None: a method in C
    of_library = module.startswith("torch.ops.") and module != "torch.ops.aten"
    is_own = module.partition(".")[0] == "torch" and not of_library
    return getattr(func, "__name__", "") if is_own else ""


def _computes(func: Any, named: Mapping[str, Any]) -> bool:
    if func in _ASKING:
        return True
    name = _name_of(func)
    if name == "__get__":  # of a property
        return True
    return named.get("out") is None and name.removeprefix("__").removesuffix("__") in _COMPUTING


def _converts(func: Any, tensor: Any = None, *_: Any) -> bool:
    """Whether ``func`` converts ``tensor`` to a Python value that an answer may give."""
    if func is _ITEM:
        return isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bool
    return func in _ASKING


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is a constant, without a size that is a symbol."""
    kind = type(value)  # isinstance would raise for a deferred value of the epilogue
    if kind is slice:
        return all(map(_is_plain, (value.start, value.stop, value.step)))
    if kind is torch.Size:
        return all(map(_is_plain, value))
    return kind in _PLAIN or kind is torch.memory_format


def _is_fixed(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) and _is_plain(value.shape)


def _reads(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether ``func`` only reads its arguments, and returns no view of them."""
    name = _name_of(func)
    # With a greatest norm, an embedding renormalises its weight in place.
    renormalises = name == "embedding" and (len(args) > 3 or named.get("max_norm") is not None)
    return name in _READING and named.get("out") is None and not renormalises


def _root(name: str) -> _Known:
    return _Known(frozenset({name}), lambda tensors, _: tensors[name])


def _value_of(asked: _Known, tensors: _Tensors) -> Any:
    return asked.value(tensors, {})


def _names(known: Iterable[_Known]) -> frozenset[str | int]:
    return frozenset[str | int]().union(*(each.names for each in known))


def _arguments(names: Iterable[str | int]) -> frozenset[str]:
    """Return the places of arguments among the names of what a value is computed from."""
    return frozenset(n for n in names if isinstance(n, str) and n.startswith("."))


def _buffers(names: Iterable[str | int]) -> frozenset[str]:
    return frozenset(n for n in names if isinstance(n, str)) - _arguments(names)


def _with_write(func: Any, target: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Return a copy of ``target`` into which ``func`` has written."""
    copy = target.clone()
    func(copy, *rest, **named)
    return copy


def _call(func: Any, parts: Sequence[Any], structure: Any, tensors: _Tensors, memo: _Memo) -> Any:
    """Call ``func`` with the arguments ``parts``, in which known values come from ``tensors``."""
    values = [part.value(tensors, memo) if isinstance(part, _Known) else part for part in parts]
    args, named = pytree.tree_unflatten(values, structure)
    return func(*args, **named)
