"""Private names for function transforms, dispatch keys and higher-order operators."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.autograd import forward_ad

from .checks import PrivateName, first_of, resolve, takes, within


def _seen_in_vmap(ask: Any) -> tuple[Any, Any]:
    """Return ``ask`` of a tensor inside vmap and, if that is True, ``ask`` of a plain tensor."""
    seen: list[Any] = []

    def called(x: torch.Tensor) -> torch.Tensor:
        seen.append(ask(x))
        return x

    torch.func.vmap(called)(torch.ones(2))
    return seen[0], ask(torch.ones(2)) if seen[0] is True else None


def _counts(ask: Any) -> bool:
    outside = ask()
    return bool(_seen_in_vmap(lambda _: ask())[0] == outside + 1 and ask() == outside)


def _ends(begin: str, *given: Any) -> Any:
    """Return a check that a function ends the transform which functorch's ``begin`` begins."""

    def check(end: Any) -> bool:
        depth = torch._C._functorch.get_dynamic_layer_stack_depth
        before = depth()
        getattr(torch._C._functorch, begin)(*given)
        end()
        return bool(depth() == before)

    return check


def _pushes(push: Any) -> bool:
    mode = torch.overrides.BaseTorchFunctionMode()
    push(mode)
    return torch._C._pop_torch_function_stack() is mode


def _forces(guard: Any) -> bool:
    include = torch._C._dispatch_tls_local_include_set
    keys = include().raw_repr()
    same = guard(include(), torch._C._dispatch_tls_local_exclude_set())
    return bool(within(same, lambda: include().raw_repr() == keys))


# Kind of transform, and the arguments of the functorch function that begins it.
_KINDS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("vmap", (2, "error")),
    ("grad", ()),
    ("jvp", ()),
    ("func", (False,)),
)


def _is_functional(module: Any) -> bool:
    mode = module.FunctionalTensorMode(pre_dispatch=False, export=True, _allow_token_discovery=True)
    return bool(within(mode, lambda: callable(module.FunctionalTensor.to_functional)))


def _ends_level(end: Any) -> bool:
    """Whether a level that was entered in C++ can be ended, and then no level is left."""
    torch._C._enter_dual_level()
    end(0)
    try:
        end(0)
    except RuntimeError:
        return True
    return False


# PyTorch 2.11 looks the function up in _VF.
_MAKE_DUAL = first_of("torch._functorch.predispatch._make_dual", "torch._VF._make_dual")


def _makes_duals(genuine: Any) -> bool:
    """Whether ``forward_ad.make_dual`` calls this function of its module."""
    module = resolve(_MAKE_DUAL.removesuffix("._make_dual"))
    with forward_ad.dual_level(), mock.patch.object(module, "_make_dual") as called:
        forward_ad.make_dual(torch.ones(1), torch.ones(1))
    return bool(called.called)


TRANSFORMS = (
    PrivateName(
        "torch._C._functorch.get_dynamic_layer_stack_depth",
        "transforms that forward begins and does not end",
        _counts,
    ),
    *(
        PrivateName(
            f"torch._C._functorch._{kind}_decrement_nesting",
            "ending transforms that forward has begun",
            _ends(f"_{kind}_increment_nesting", *given),
        )
        for kind, given in _KINDS
    ),
    PrivateName(
        "torch._C._exit_dual_level",
        "ending forward-mode levels that a graph has entered",
        _ends_level,
    ),
    PrivateName(
        _MAKE_DUAL,
        "refusing forward-mode differentiation within forward",
        _makes_duals,
    ),
    PrivateName(
        "torch._C._functorch.TransformType",
        "ending transforms that forward has begun",
        lambda kinds: len({kinds.Vmap, kinds.Grad, kinds.Jvp, kinds.Functionalize}) == 4,
    ),
    PrivateName(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "tensors within a function transform",
        lambda ask: _seen_in_vmap(ask) == (True, False),
    ),
    PrivateName(
        "torch._C._functorch.get_unwrapped",
        "tensors within a function transform",
        lambda ask: _seen_in_vmap(lambda x: tuple(ask(x).shape))[0] == (2,),
    ),
    PrivateName(
        "torch._C._dispatch_tls_local_include_set",
        "dispatch keys that forward leaves changed",
        lambda ask: callable(ask().raw_repr),
    ),
    PrivateName(
        "torch._C._dispatch_tls_local_exclude_set",
        "dispatch keys that forward leaves changed",
        lambda ask: callable(ask().raw_repr),
    ),
    PrivateName(
        "torch._C._ForceDispatchKeyGuard", "dispatch keys that forward leaves changed", _forces
    ),
    PrivateName(
        "torch._C._push_on_torch_function_stack",
        "modes that are put aside while a region is traced",
        _pushes,
    ),
    PrivateName(
        "torch._ops.HigherOrderOperator",
        "operators whose operands are functions",
        lambda kind: isinstance(torch.ops.higher_order.cond, kind) and takes(1, 2)(kind.__call__),
    ),
    PrivateName(
        "torch.fx._symbolic_trace.is_fx_symbolic_tracing",
        "other threads, which trace nothing",
        lambda ask: not ask(),
    ),
    PrivateName(
        "torch._subclasses.functional_tensor",
        "decomposing an operator without writes",
        _is_functional,
    ),
    PrivateName("torch._sync", "decomposing an operator without writes", callable),
    PrivateName(
        "torch._from_functional_tensor", "decomposing an operator without writes", callable
    ),
    PrivateName(
        "torch._functionalize_has_data_mutation", "decomposing an operator without writes", callable
    ),
    PrivateName(
        "torch._C._ExcludeDispatchKeyGuard",
        "decomposing an operator without writes",
        lambda guard: within(
            guard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)), lambda: True
        ),
    ),
    PrivateName(
        "torch.export.exported_program._split_decomp_table_to_cia_and_python_decomp",
        "decomposing a program operator by operator",
        takes({}),
    ),
    PrivateName(
        "torch.export.exported_program._detect_fake_mode_from_gm",
        "decomposing a program operator by operator",
        takes(None),
    ),
    PrivateName(
        "torch.export._trace._compiling_state_context",
        "decomposing a program operator by operator",
        takes(),
    ),
)
