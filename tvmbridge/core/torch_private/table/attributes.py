"""Private attributes of PyTorch's objects, and private variables of its modules, used in place."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.autograd import forward_ad

from .checks import PrivateName, weight, within, zero_tensor


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _counts_writes(_: Any) -> bool:
    x = torch.ones(2)
    before = x._version
    x.add_(1)
    return x._version == before + 1


def _calls_hooks(_: Any) -> bool:
    """Whether backward calls the hooks in a dict registered as ``Tensor.register_hook`` does it."""
    x = weight().sin()
    seen: list[torch.Tensor] = []
    x._backward_hooks = OrderedDict({0: seen.append})
    assert x.grad_fn is not None
    x.grad_fn._register_hook_dict(x)
    x.sum().backward()
    return len(seen) == 1


def _holds_accumulated(_: Any) -> bool:
    x = weight()
    before = x._post_accumulate_grad_hooks
    x.register_post_accumulate_grad_hook(lambda _: None)
    return not before and len(x._post_accumulate_grad_hooks) == 1


def _tells_of_profiler(before: bool) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        within = torch.autograd.profiler._is_profiler_enabled
    return within and torch.autograd.profiler._is_profiler_enabled is before


def _is_storage_key(_: Any) -> bool:
    x, y = torch.ones(2), torch.ones(2)
    key, of_view, other = (t.untyped_storage()._cdata for t in (x, x[1:], y))
    return key == of_view != other


def _calls_forward(function: Any) -> bool:
    """Whether this method has a local variable ``self``: a frame that calls forward shows it."""
    codes = (function.__code__, *function.__code__.co_consts)
    return any(
        "self" in getattr(c, "co_varnames", ()) + getattr(c, "co_freevars", ()) for c in codes
    )


_MODULE_DICTS = {
    "_parameters": "a module's own parameters",
    "_buffers": "a module's own buffers",
    "_modules": "a module's own submodules",
    "_forward_hooks": "hooks that compiled code would not call",
    "_forward_pre_hooks": "hooks that compiled code would not call, and weight_norm's own",
    "_backward_hooks": "hooks that compiled code would not call",
    "_backward_pre_hooks": "hooks that compiled code would not call",
}
_SIN = torch.ops.aten.sin.default

ATTRIBUTES = (
    PrivateName(
        "torch.autograd.forward_ad._current_level",
        "leaving calls to forward-mode differentiation",
        lambda level: within(forward_ad.dual_level(), lambda: forward_ad._current_level) > level,
    ),
    PrivateName("torch.Tensor._version", "noticing writes", _counts_writes),
    PrivateName(
        "torch.Tensor._base",
        "the tensor that autograd takes another for a view of",
        lambda _: (lambda x: x[1:]._base is x and x._base is None)(weight()),
    ),
    PrivateName(
        "torch.Tensor._is_view",
        "whether autograd takes a tensor for a view",
        lambda ask: ask(weight()[1:]) and not ask(weight()),
    ),
    PrivateName(
        "torch.Tensor._is_zerotensor",
        "refusing zero tensors, which are not written out",
        lambda ask: ask(zero_tensor(2)) and not ask(torch.zeros(2)),
    ),
    PrivateName("torch.Tensor._backward_hooks", "hooks on outputs and parameters", _calls_hooks),
    PrivateName("torch.autograd.graph.Node._register_hook_dict", "hooks on outputs", _calls_hooks),
    PrivateName(
        "torch.Tensor._post_accumulate_grad_hooks", "hooks on parameters", _holds_accumulated
    ),
    PrivateName("torch.UntypedStorage._cdata", "whether tensors share memory", _is_storage_key),
    PrivateName(
        "torch.ops.aten.sin.default._schema",
        "the arguments of an operator, and which of them it writes",
        lambda schema: schema.name == "aten::sin" and not schema.is_mutable,
    ),
    PrivateName(
        "torch.ops.aten.sin.default._op_dk",
        "calling autocast's kernel of an operator",
        lambda call: call(torch._C.DispatchKey.CPU, torch.zeros(1)) == 0,
    ),
    PrivateName(
        "torch.ops.aten.sin.default._dispatch_cache",
        "setting a kernel of an operator aside in a trace",
        lambda cache: isinstance(cache, dict) and isinstance(_SIN.py_kernels, dict),
    ),
    PrivateName(
        "torch.autograd.profiler._is_profiler_enabled",
        "regions for the profiler, which cost nothing where it is off",
        _tells_of_profiler,
    ),
    PrivateName(
        "torch.fx.Graph()._root",
        "inserting at the beginning of a graph",
        lambda node: node.op == "root",
    ),
    PrivateName(
        "torch.fx.Graph()._codegen",
        "the nested arguments of a graph of torch.export",
        lambda codegen: isinstance(codegen, torch.fx.graph.CodeGen),
    ),
    *(
        PrivateName(f"torch.nn.Module().{name}", purpose, _is_dict)
        for name, purpose in _MODULE_DICTS.items()
    ),
    *(
        PrivateName(
            f"torch.nn.modules.module._global{name}",
            "hooks of all modules",
            _is_dict,
        )
        for name in _MODULE_DICTS
        if name.endswith("_hooks")
    ),
    *(
        PrivateName(f"torch.nn.Module.{name}", "who has called forward", _calls_forward)
        for name in ("_call_impl", "_slow_forward")
    ),
    *(
        PrivateName(f"torch.nn.Module.{name}", "is of every module, not the user's", lambda _: True)
        for name in ("_wrapped_call_impl", "_compiled_call_impl")
    ),
)
