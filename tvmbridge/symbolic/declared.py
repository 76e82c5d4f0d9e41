"""Symbols that the user declares by a ``dynamic_shapes`` spec of torch.export, with their bounds.

``{"x": {0: Dim("batch", max=512), 1: Dim.AUTO}}`` declares two symbols for a call ``f(x)``.
torch.export checks the spec, and raises its own errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch.export import Dim

from tvmbridge.core.torch_private import placed_dynamic_shapes, pytree
from tvmbridge.symbolic.symbols import ITSELF, Dimension, LinearSize, Shapes, Symbols

Spec: TypeAlias = Mapping[str, Any] | tuple[Any, ...] | list[Any]

_HINT = type(Dim.AUTO)


@dataclass(frozen=True)
class DeclaredDimension:
    """One dimension that a spec declares as dynamic.

    - ``name``: the name of its Dim, or of the hint, such as ``Dim.AUTO``.
    - ``least``, ``most``: the bounds of the symbol; ``most`` is None without an upper bound.
    - ``is_hint``: whether the spec has a hint and not a Dim.
    - ``free``: whether the hint is ``Dim.AUTO``, which allows the dimension to be static.
    - ``form``: how the size depends on the symbol. For a Dim such as ``2 * batch + 1``, the name
      and the bounds are those of ``batch``.
    """

    name: str
    least: int
    most: int | None
    is_hint: bool
    free: bool
    form: LinearSize = ITSELF

    @classmethod
    def of(cls, given: Any, size: int, where: str) -> DeclaredDimension | None:
        """Return the declaration in ``given``; None if it declares the dimension static.

        Args:
            where: a phrase for the dimension in messages.

        Raises:
            ValueError: ``given`` is an integer other than ``size``.
        """
        if isinstance(given, int):
            if given != size:
                raise ValueError(f"dynamic_shapes says that {where} is {given}, and it is {size}")
            return None
        if isinstance(given, _HINT):
            kind = given.type.name
            if kind == "STATIC":
                return None
            return cls(f"Dim.{kind}", given.min or 0, given.max, True, kind == "AUTO")
        if not isinstance(given, Dim):
            return None
        root, form = given, ITSELF
        if hasattr(given, "root"):
            made: Any = given
            root = made.root
            offset, more = (int(made.fn(sympy.Integer(n))) for n in (0, 1))
            form = LinearSize(more - offset, offset)
        most = root.max if isinstance(root.max, int) else None
        return cls(root.__name__, root.min, most, False, False, form)

    def refusal(self, size: int) -> str | None:
        """Return why code with this declaration cannot serve ``size``; None if it can."""
        if not size:
            return "it is 0, and there is no code for sizes of 0"
        symbol = self.form.symbol(size)
        if symbol is None:
            return f"it is {size}, and not {self.form.scale} * {self.name} + {self.form.offset}"
        if self.least <= symbol and (self.most is None or symbol <= self.most):
            return None
        bounds = f"from {self.least}" + ("" if self.most is None else f" to {self.most}")
        of_symbol = "" if symbol == size else f", for which {self.name} is {symbol}"
        return f"it is {size}{of_symbol}, and {self.name} is {bounds}"


def names_no_size(spec: Spec) -> bool:
    """Whether ``spec`` declares all dimensions static."""
    leaves = pytree.tree_leaves(spec)
    return all(x is None or isinstance(x, int) or x == Dim.STATIC for x in leaves)


def declared(
    spec: Spec, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[Dimension, DeclaredDimension]:
    """Return the dimensions of a call that ``spec`` declares dynamic, with their declarations.

    Raises:
        torch._dynamo.exc.UserError: torch.export finds that ``spec`` does not match the arguments.
        ValueError: ``spec`` names a dimension or a size that the call does not have.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    # A tensor that is passed twice has two entries in the spec, so each place needs its own tensor.
    apart = [
        torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x for x in leaves
    ]
    numbers = {id(x): i for i, x in enumerate(apart) if isinstance(x, torch.Tensor)}
    found: dict[Dimension, DeclaredDimension] = {}

    def place(path: str, leaf: Any, shape: Any) -> None:
        if not isinstance(leaf, torch.Tensor) or shape is None:
            return
        given = shape.items() if isinstance(shape, Mapping) else enumerate(shape)
        for number, dim in given:
            where = f"dimension {number} of inputs{path}"
            if not -leaf.dim() <= number < leaf.dim():
                raise ValueError(f"dynamic_shapes names {where}, which has {leaf.dim()} dimensions")
            told = DeclaredDimension.of(dim, leaf.shape[number], where)
            if told is not None:
                found[numbers[id(leaf)], number % leaf.dim()] = told

    there, named = pytree.tree_unflatten(apart, structure)
    placed_dynamic_shapes(forward, there, named, spec, place)
    return found


def symbols_of(
    found: Mapping[Dimension, DeclaredDimension],
    calls: Sequence[Shapes],
    without: Collection[Dimension] = (),
) -> Symbols | None:
    """Return the symbols of declared dimensions; None if there are none.

    Each ``Dim`` is one symbol. Dimensions that are declared ``Dim.AUTO`` or ``Dim.DYNAMIC`` share
    a symbol if their sizes agree in all ``calls``.

    Args:
        calls: the shapes of the arguments in each known call.
        without: dimensions that become static if they are declared ``Dim.AUTO``.
    """
    sizes = [dict(call) for call in calls]
    groups: dict[Any, list[Dimension]] = {}
    for (leaf, number), dim in found.items():
        if not (dim.free and (leaf, number) in without):
            seen = tuple(each[leaf][number] for each in sizes)
            groups.setdefault(seen if dim.is_hint else dim.name, []).append((leaf, number))
    forms = {d: found[d].form for group in groups.values() for d in group}
    return Symbols(tuple(map(tuple, groups.values())), forms) if groups else None
