"""Look up a private name of PyTorch, and check that it behaves as expected."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

Check = Callable[[Any], Any]


@dataclass(frozen=True)
class PrivateName:
    """A private name of PyTorch that tvmbridge uses.

    - ``path``: the dotted name, beginning with ``torch``.
    - ``purpose``: a phrase for what tvmbridge uses it for.
    - ``check``: called with the value; raises or returns a false value if it is not as expected.
    """

    path: str
    purpose: str
    check: Check


def problem(name: PrivateName) -> str | None:
    """Return a sentence about what is wrong with the name in this PyTorch, or None."""
    try:
        right = name.check(resolve(name.path))
        reason = "" if right else "it does something else"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    return f"{name.path}, used for {name.purpose}: {reason}" if reason else None


def resolve(path: str) -> Any:
    """Return the value that ``path`` names; import its modules, and call where it has ``()``."""
    parts = path.split(".")
    value: Any = torch
    count = 1
    for length in range(len(parts), 1, -1):
        try:
            value, count = importlib.import_module(".".join(parts[:length])), length
            break
        except ModuleNotFoundError:
            continue
    for part in parts[count:]:
        value = getattr(value, part.removesuffix("()"))
        value = value() if part.endswith("()") else value
    return value


# The paths given to each call of ``first_of``.
ALTERNATIVES: list[tuple[str, ...]] = []


def first_of(*paths: str) -> str:
    """Return the first path that this PyTorch has, or the last one: releases differ in a name."""
    ALTERNATIVES.append(paths)
    return next((path for path in paths[:-1] if _has(path)), paths[-1])


def _has(path: str) -> bool:
    try:
        resolve(path)
    except AttributeError:
        return False
    return True


def takes(*args: Any, **kwargs: Any) -> Check:
    """Return a check that a function's signature accepts these arguments."""

    def check(function: Any) -> bool:
        inspect.signature(function).bind(*args, **kwargs)
        return True

    return check


def has(*attributes: str) -> Check:
    """Return a check that a value has these attributes."""
    return lambda value: all(hasattr(value, attribute) for attribute in attributes)


def has_schema(*arguments: str) -> Check:
    """Return a check that the ATen operator's first arguments have these names, in this order."""

    def check(function: Any) -> bool:
        schema = getattr(torch.ops.aten, function.__name__).default._schema
        return tuple(a.name for a in schema.arguments)[: len(arguments)] == arguments

    return check


def has_local(variable: str) -> Check:
    """Return a check that a function has this local variable; tvmbridge reads it from a frame."""
    return lambda function: variable in inspect.unwrap(function).__code__.co_varnames


def within(context: AbstractContextManager[Any], ask: Callable[[], Any]) -> Any:
    """Return the result of ``ask()``, called in ``context``."""
    with context:
        return ask()


def weight() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def zero_tensor(*shape: int) -> torch.Tensor:
    return torch._efficientzerotensor(shape)
