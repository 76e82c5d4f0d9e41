"""Register Python functions as PyTorch operators, with the gradient that autograd gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.called_in_mode import with_gradients, without_gradients
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import OpOverload

NAMESPACE = "tvmbridge"

# The fake kernels in these namespaces are tested against the real kernels.
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "prim", NAMESPACE})

# The operators that :func:`register` made. Each runs one function of PyTorch, and draws nothing.
_registered: set[OpOverload] = set()


def is_function(operator: OpOverload) -> bool:
    """Whether the operator is a function of PyTorch that :func:`register` made an operator."""
    return operator in _registered


def is_foreign(operator: OpOverload) -> bool:
    """Whether the operator was registered by neither PyTorch nor tvmbridge."""
    return operator.namespace not in _KNOWN_NAMESPACES


def refuse_numbers(operator: OpOverload) -> None:
    """Refuse a third-party operator that returns numbers, which its fake kernel invents."""
    kinds = [str(result.type) for result in operator._schema.returns]
    if is_foreign(operator) and not all("Tensor" in kind for kind in kinds):
        raise UnsupportedOperatorError(
            f"{operator} returns a number, which a trace would take for the same at each call"
        )


@dataclass(frozen=True)
class CustomOperator:
    """A Python function that :func:`register` makes an operator.

    - ``name``: the name of the operator, with an overload after a dot if it has one.
    - ``parameters``: the parameters of its schema, as text.
    - ``function``: computes the result; called with the arguments by name.
    - ``result``: called in the same way with fake tensors; returns an empty tensor of the result's
      shape.
    - ``spellings``: the functions of PyTorch that the operator replaces in a trace.
    """

    name: str
    parameters: str
    function: Callable[..., torch.Tensor]
    result: Callable[..., torch.Tensor]
    spellings: tuple[Callable[..., Any], ...] = ()


def register(library: torch.library.Library, operator: CustomOperator) -> None:
    """Define ``operator`` and the operator of its backward in ``library``."""
    name, _, overload = operator.name.partition(".")
    library.define(f"{operator.name}({operator.parameters}) -> Tensor")
    operators = getattr(torch.ops, library.ns)
    defined = getattr(getattr(operators, name), overload or "default")
    if not is_foreign(defined):
        _registered.add(defined)
    names = [argument.name for argument in defined._schema.arguments]

    def run(*args: Any) -> torch.Tensor:
        return without_gradients(operator.function, **dict(zip(names, args, strict=False)))

    library.impl(operator.name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"{library.ns}::{operator.name}",
        lambda *args: operator.result(**dict(zip(names, args, strict=False))),
        lib=library,
    )
    _register_autograd(library, operator, _register_backward(library, operator, names))


def _register_backward(
    library: torch.library.Library, operator: CustomOperator, names: Sequence[str]
) -> Callable[..., list[torch.Tensor]]:
    """Define the backward operator of ``operator``, and return it.

    The backward operator takes the result's gradient, the positions ``wanted`` of arguments, and
    the arguments, called ``names``. It returns the gradients of the arguments at these positions.
    """
    name, _, overload = operator.name.partition(".")
    backward = f"{name}_backward" + (f".{overload}" if overload else "")
    library.define(f"{backward}(Tensor gradient, int[] wanted, {operator.parameters}) -> Tensor[]")

    def run_backward(
        gradient: torch.Tensor, wanted: Sequence[int], *args: Any
    ) -> list[torch.Tensor]:
        leaves = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        operands = [leaves[place].requires_grad_() for place in wanted]
        given = dict(zip(names, leaves, strict=False))
        result = with_gradients(operator.function, **given)
        return list(torch.autograd.grad(result, operands, gradient))

    library.impl(backward, run_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"{library.ns}::{backward}",
        lambda gradient, wanted, *args: [
            args[place].new_empty(args[place].shape) for place in wanted
        ],
        lib=library,
    )
    packet = getattr(getattr(torch.ops, library.ns), f"{name}_backward")
    differentiate: Callable[..., list[torch.Tensor]] = getattr(packet, overload or "default")
    return differentiate


def _register_autograd(
    library: torch.library.Library,
    operator: CustomOperator,
    differentiate: Callable[..., list[torch.Tensor]],
) -> None:
    """Make autograd call ``differentiate(gradient, places, *args)`` as backward of ``operator``."""

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.places = [i for i, a in enumerate(inputs) if isinstance(a, torch.Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))
        ctx.others = [None if isinstance(a, torch.Tensor) else a for a in inputs]

    def backward_of(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        args = list(ctx.others)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = tensor
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad) if needed]
        found = dict(zip(wanted, differentiate(gradient, wanted, *args), strict=True))
        return tuple(found.get(place) for place in range(len(args)))

    torch.library.register_autograd(
        f"{library.ns}::{operator.name}", backward_of, setup_context=set_up, lib=library
    )
