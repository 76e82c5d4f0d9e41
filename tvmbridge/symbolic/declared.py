"""Declared symbols: the dimensions that ``dynamic_shapes`` names, with their bounds.

``{"x": {0: Dim("batch", max=512), 1: Dim.AUTO}}`` declares two symbols for a call ``f(x)``.
torch.export checks the declaration, and its errors are raised unchanged.
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
    """The declaration of one symbolic dimension.

    - ``name``: the name of its Dim or of the hint, such as ``Dim.AUTO``.
    - ``least``, ``most``: the bounds of the Dim; ``most`` is None without an upper bound.
    - ``is_hint``: whether it is a hint and no named Dim.
    - ``free``: whether it is ``Dim.AUTO``, which may turn out to be static.
    - ``form``: for a derived Dim such as ``2 * batch + 1``, how the size depends on ``batch``;
      name and bounds are then the ones of ``batch``.
    """

    name: str
    least: int
    most: int | None
    is_hint: bool
    free: bool
    form: LinearSize = ITSELF

    @classmethod
    def of(cls, given: Any, size: int, where: str) -> DeclaredDimension | None:
        """Return the declaration of a dimension; None if it is static.

        Args:
            given: the value for the dimension in ``dynamic_shapes``.
            size: the size of the dimension in the call.
            where: the name of the dimension, for messages.

        Raises:
            ValueError: ``given`` is a size, and the call has another one.
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
        """Return why the declaration excludes this size; None if it does not."""
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
    """Whether ``spec`` declares all dimensions as static."""
    leaves = pytree.tree_leaves(spec)
    return all(x is None or isinstance(x, int) or x == Dim.STATIC for x in leaves)


def declared(
    spec: Spec, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[Dimension, DeclaredDimension]:
    """Return the declarations of a call's symbolic dimensions.

    Args:
        spec: the declaration, as torch.export's ``dynamic_shapes``.
        forward: the function whose parameters the spec names.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.

    Raises:
        torch._dynamo.exc.UserError: the spec does not fit the arguments, by torch.export's check.
        ValueError: the spec names a size or a dimension that the call does not have.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    # Copies, so that a tensor that is passed twice has a declaration for each position.
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

    Each named Dim is one symbol. Dimensions with hints share a symbol if their sizes agree in all
    calls.

    Args:
        found: the declarations.
        calls: the shapes of the calls so far.
        without: dimensions that become static if they are declared as ``Dim.AUTO``.
    """
    sizes = [dict(call) for call in calls]
    groups: dict[Any, list[Dimension]] = {}
    for (leaf, number), dim in found.items():
        if not (dim.free and (leaf, number) in without):
            seen = tuple(each[leaf][number] for each in sizes)
            groups.setdefault(seen if dim.is_hint else dim.name, []).append((leaf, number))
    forms = {d: found[d].form for group in groups.values() for d in group}
    return Symbols(tuple(map(tuple, groups.values())), forms) if groups else None
