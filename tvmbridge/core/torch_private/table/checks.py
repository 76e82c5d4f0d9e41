"""How a private name is looked up and checked."""

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
    """A name from ``torch`` on. ``check`` raises or is false where the value is not as needed."""

    path: str
    purpose: str
    check: Check


def problem(name: PrivateName) -> str | None:
    """What is wrong with it in this PyTorch, in a sentence; None: nothing."""
    try:
        right = name.check(resolve(name.path))
        reason = "" if right else "it does something else"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    return f"{name.path}, used for {name.purpose}: {reason}" if reason else None


def resolve(path: str) -> Any:
    """What ``path`` names; modules on the way are imported, ``Kind()`` is an instance."""
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


def takes(*args: Any, **kwargs: Any) -> Check:
    """The signature lets it be called with as many arguments, of these names."""

    def check(function: Any) -> bool:
        inspect.signature(function).bind(*args, **kwargs)
        return True

    return check


def has(*attributes: str) -> Check:
    """It has these attributes."""
    return lambda value: all(hasattr(value, attribute) for attribute in attributes)


def has_schema(*arguments: str) -> Check:
    """It is an ATen operator whose first arguments have these names, in this order."""

    def check(function: Any) -> bool:
        schema = getattr(torch.ops.aten, function.__name__).default._schema
        return tuple(a.name for a in schema.arguments)[: len(arguments)] == arguments

    return check


def has_local(variable: str) -> Check:
    """A frame of it has this local variable, which is read from outside."""
    return lambda function: variable in inspect.unwrap(function).__code__.co_varnames


def within(context: AbstractContextManager[Any], ask: Callable[[], Any]) -> Any:
    """What ``ask`` returns in ``context``."""
    with context:
        return ask()


def weight() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def zero_tensor(*shape: int) -> torch.Tensor:
    return torch._efficientzerotensor(shape)
