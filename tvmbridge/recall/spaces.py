"""PyTorch's own functions as texts, so that functions that somebody has replaced are noticed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tvmbridge.calls.patches import code_of
from tvmbridge.core.torch_private import TensorBase, jit_internal, nn_functions
from tvmbridge.recall.digests import is_filled

Coded = Callable[[types.CodeType], str]

# The Python modules and classes of PyTorch whose functions models call by name.
SPACES: tuple[Any, ...] = (
    torch,
    torch.functional,
    sys.modules["torch._VF"],
    torch.nn.functional,
    torch.special,
    torch.linalg,
    torch.fft,
    torch.overrides,
    jit_internal,
    nn_functions,
    TensorBase,
    torch.Tensor,
    torch.nn.Module,
    torch.nn.init,
    torch.autograd.Function,
    sys.modules[torch.Tensor.backward.__module__],
    torch.nn.parameter,
    torch.nn.utils.parametrize,
    torch.nn.utils.rnn,
    torch.utils.checkpoint,
    *(v for v in vars(torch.nn.modules).values() if isinstance(v, types.ModuleType)),
)
_NAMES = frozenset(space.__name__ for space in SPACES) | {"torch._C", "torch.types", "torch.nn"}


def function_text(function: types.FunctionType, coded: Coded) -> str:
    """Return the name and code of a function, its defaults, and the functions that it wraps."""
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    texts = [repr(each) for each in given if type(each) in (bool, int, float, str)]
    cells = [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
    inner = [each for each in cells if isinstance(each, types.FunctionType)]
    parts = [function.__module__, function.__qualname__, coded(code_of(function)), *texts]
    return " ".join([*parts, *(coded(code_of(each)) for each in inner)])


def plain_function(value: Any) -> Any:
    """Return the function of a static method, class method or property; else ``value``."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def functions_beside(module: str, coded: Coded) -> Iterator[str]:
    """Yield texts of the functions, and of the classes' methods, of a Python module of PyTorch.

    Yield nothing for other Python modules, and for those in ``SPACES``.
    """
    space = sys.modules.get(module)
    if space is None or not module.startswith("torch.") or module in _NAMES:
        return
    classes: dict[type, None] = {}
    for name, value in vars(space).items():
        if isinstance(value, types.FunctionType):
            yield f"{name} {function_text(value, coded)}"
        elif isinstance(value, type):
            classes |= dict.fromkeys(value.__mro__)
    for kind in classes:
        if kind.__module__.startswith("torch.") and kind.__module__ not in _NAMES:
            for name, value in vars(kind).items():
                found = plain_function(value)
                if isinstance(found, types.FunctionType):
                    yield f"{kind.__qualname__}.{name} {function_text(found, coded)}"
