"""Stand-ins for counters and growing lists in attributes, which record whether they are read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch.overrides import TorchFunctionMode

from tvmbridge.core.torch_private import pytree


class Count:
    """Stands for an integer attribute: forward may add to it, and any other use counts as a read.

    - ``value``: the number
    - ``origin``: the count from which additions made this one
    - ``step``: the sum of these additions
    - ``is_read``: whether forward used the value; only set on the origin
    """

    __slots__ = ("is_read", "origin", "step", "value")

    def __init__(self, value: int, origin: Count | None = None, step: int = 0) -> None:
        self.value = value
        self.origin = self if origin is None else origin
        self.step = step
        self.is_read = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int

    def plain(self) -> int:
        """Return the number, without recording a read."""
        return self.value

    def used(self) -> int:
        """Record a read and return the number."""
        self.origin.is_read = True
        return self.value

    def _moved(self, step: Any) -> Any:
        if type(step) is not int:
            return self.used() + step
        return Count(self.value + step, self.origin, self.step + step)

    def __add__(self, other: Any) -> Any:
        return self._moved(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._moved(-other) if type(other) is int else self.used() - other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.used(), name)


def _of_value(name: str) -> Callable[..., Any]:
    # Operators, because the methods of int return NotImplemented for operands that are no numbers.
    function = getattr(operator, name.removeprefix("r"), None) if name[0] == "r" else None
    reflected = function is not None and name not in ("repr", "round")

    def method(self: Count, *args: Any) -> Any:
        value, given = self.used(), [a.used() if type(a) is Count else a for a in args]
        if reflected:
            assert function is not None
            return function(given[0], value)
        if hasattr(operator, name) and len(given) == 1:
            return getattr(operator, name)(value, given[0])
        return getattr(value, f"__{name}__")(*given)

    return method


_OF_VALUE = """
bool int float index hash repr str format eq ne lt le gt ge mul rmul truediv rtruediv floordiv
rfloordiv mod rmod pow rpow rsub neg pos abs lshift rlshift rshift rrshift invert round trunc ceil
floor divmod rdivmod and_ rand_ or_ ror_ xor rxor
"""
for _name in _OF_VALUE.split():
    setattr(Count, f"__{_name.rstrip('_')}__", _of_value(_name))


class PassedOn(TorchFunctionMode):
    """A mode that passes PyTorch functions the numbers and lists in place of their stand-ins."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = used((args, kwargs or {}))
        return func(*args, **kwargs)


def used(values: Any) -> Any:
    """Return ``values`` with numbers and lists in place of their stand-ins, which were read."""
    leaves, structure = pytree.tree_flatten(values)
    if not any(type(leaf) in (Count, Grown) for leaf in leaves):
        return values
    plain = [leaf.used() if type(leaf) in (Count, Grown) else leaf for leaf in leaves]
    return pytree.tree_unflatten(plain, structure)


class Grown(list[Any]):
    """Stands for a list attribute: it may grow and be cleared, and any other use counts as a read.

    - ``is_cleared``: whether forward cleared it
    - ``is_read``: whether forward used items that the list had before the call
    """

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        self.is_cleared = False
        self.is_read = False
        self._first = len(items)

    def plain(self) -> list[Any]:
        """Return a plain list of the items, without recording a read."""
        return list(list.__iter__(self))

    def used(self) -> list[Any]:
        """Record a read, unless the list was cleared, and return a plain list of the items."""
        self.is_read |= not self.is_cleared
        return self.plain()

    def added(self) -> list[Any]:
        """Return the items that forward added, since the last clear if there was one."""
        return self.plain()[self._first :]

    def append(self, item: Any) -> None:
        """Append ``item``; this is no read."""
        list.append(self, item)

    def extend(self, items: Iterable[Any]) -> None:
        """Append ``items``; this is no read."""
        list.extend(self, items)

    def __iadd__(self, items: Iterable[Any]) -> Any:  # type: ignore[misc]
        list.extend(self, items)
        return self

    def clear(self) -> None:
        """Remove all items; later reads see only items that forward added itself."""
        list.clear(self)
        self.is_cleared, self._first = True, 0


def _of_list(name: str) -> Callable[..., Any]:
    def method(self: Grown, *args: Any, **kwargs: Any) -> Any:
        self.is_read |= not self.is_cleared
        return getattr(list, name)(self, *args, **kwargs)

    return method


_READING = """
__iter__ __len__ __getitem__ __setitem__ __delitem__ __contains__ __eq__ __ne__ __lt__ __le__ __gt__
__ge__ __add__ __mul__ __rmul__ __imul__ __repr__ __reversed__ __reduce_ex__ index count copy pop
remove insert sort reverse
"""
for _name in _READING.split():
    setattr(Grown, _name, _of_list(_name))
