"""Third-party operators whose derivative reads values of tensors, which a trace does not know.

A library may register a derivative that loops over ``offsets.tolist()``. Such an operator becomes
another one, whose backward is an operator too: it runs the library's derivative at each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tvmbridge.core.custom_operator import CustomOperator, is_foreign, register
from tvmbridge.core.symbolic_numbers import hint_of
from tvmbridge.core.torch_private import (
    DataDependentOutputException,
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    disable_current_modes,
    pytree,
)

# An observation of forward replaces the attribute, to refuse a forward that calls it.
_differentiate = torch.autograd.grad

_NAMESPACE = "tvmbridge_foreign"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
# For each operator that was called with a gradient, the one that replaces it; None if its
# derivative reads no values.
_replacements: dict[OpOverload, Any] = {}


def differentiable(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return ``function``, or the operator that replaces it in a trace with gradients."""
    operator = _only_overload(function)
    if operator is None or not is_foreign(operator) or not _is_plain(operator):
        return function
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return function
    if operator not in _replacements:
        reads = _reads_values(operator, args, kwargs)
        _replacements[operator] = _whole(operator) if reads else None
    return _replacements[operator] or function


def _only_overload(function: Any) -> OpOverload | None:
    if isinstance(function, OpOverloadPacket) and len(function.overloads()) == 1:
        function = getattr(function, function.overloads()[0])
    return function if isinstance(function, OpOverload) else None


def _is_plain(operator: OpOverload) -> bool:
    """Whether the operator returns one new tensor and writes into no argument."""
    schema = operator._schema
    aliases = any(x.alias_info is not None for x in (*schema.arguments, *schema.returns))
    return [str(r.type) for r in schema.returns] == ["Tensor"] and not aliases


def _reads_values(operator: OpOverload, args: Any, kwargs: Any) -> bool:
    """Differentiate the operator on fake tensors; return whether that reads a value of one."""
    with disable_current_modes(), FakeTensorMode(), torch.enable_grad():
        given, named = pytree.tree_map_only(torch.Tensor, _fake, (args, dict(kwargs)))
        leaves = [x for x in pytree.tree_leaves((given, named)) if isinstance(x, torch.Tensor)]
        wanted = [t for t in leaves if t.requires_grad]
        try:
            result = operator(*given, **named)
            _differentiate(result, wanted, torch.ones_like(result), allow_unused=True)
        except DataDependentOutputException:
            return True
        except Exception:  # whatever else is wrong is said when the program is differentiated
            return False
    return False


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(list(map(hint_of, tensor.shape)), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _whole(operator: OpOverload) -> Any:
    """Define the operator that replaces ``operator``, and return it."""
    schema = str(operator._schema)
    parameters = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    namespace, name = operator._schema.name.split("::")
    overload = operator._schema.overload_name
    title = f"{namespace}_{name}" + (f".{overload}" if overload else "")
    register(_LIBRARY, CustomOperator(title, parameters, operator, operator))
    return getattr(getattr(torch.ops, _NAMESPACE), f"{namespace}_{name}")
