"""Record PyTorch's state of the process and of this thread, and compare two records."""

from __future__ import annotations

import functools
import gc
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch._dynamo  # the import replaces torch.manual_seed, so it must precede any record
import torch.utils.checkpoint
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules import activation, transformer
from torch.nn.modules.batchnorm import _BatchNorm

from tvmbridge.calls import patches
from tvmbridge.graph_capture.observe.settings import _SETTINGS as SETTINGS

# The classes and modules whose attributes a trace may patch.
_OWNERS = (
    torch,
    torch.Tensor,
    torch.autograd,
    torch.compiler,
    torch.overrides,
    torch.random,
    torch.utils.checkpoint,
    torch._ops.HigherOrderOperator,
    torch._subclasses.meta_utils.MetaTensorDescriber,
    FakeTensorMode,
    functional,
    nn.Module,
    nn.Parameter,
    nn.TransformerEncoder,
    activation,
    transformer,
    _BatchNorm,
    saved_tensors_hooks,
)
# Functions whose result depends on the calling thread.
_FLAGS = (
    torch.compiler.is_compiling,
    torch.compiler.is_exporting,
    torch.fx._symbolic_trace.is_fx_symbolic_tracing,
)
_dispatch, _functorch = torch._C, torch._C._functorch
_IMPORTING = "<frozen importlib._bootstrap>"
# The filters of warnings that were added during an import.
_OF_IMPORTS: set[Any] = set()


def now() -> dict[str, Any]:
    """Return the current state by names; :func:`changed` compares two of them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return {
        "dispatch modes": _dispatch._len_torch_dispatch_stack(),
        "dispatch modes before dispatch": torch._ops._len_torch_dispatch_stack_pre_dispatch(),
        "function modes": _dispatch._len_torch_function_stack(),
        "keys included": _dispatch._dispatch_tls_local_include_set().raw_repr(),
        "keys excluded": _dispatch._dispatch_tls_local_exclude_set().raw_repr(),
        "transforms": _functorch.get_dynamic_layer_stack_depth(),
        "forward-mode levels": forward_ad._current_level,
        "a forward-mode level in C++": _in_forward_level(),
        "hooks on saved tensors": hooks,
        "jit traces": _dispatch._get_tracing_state(),
        "fake mode": torch._guards.TracingContext.try_get(),
        "flags": [(flag.__code__, flag()) for flag in _FLAGS],
        "settings": [_read(setting.get) for setting in SETTINGS],
        "Dynamo's callback": get_eval_frame_callback(),
        "functions": [dict(vars(owner)) for owner in _OWNERS],
        "patches": dict(patches._INSTALLED),
        "warnings": [each for each in warnings.filters if each not in _OF_IMPORTS],
        "log filters": list(logging.getLogger("torch._subclasses.fake_tensor").filters),
        "garbage collection": gc.isenabled(),
    }


def _in_forward_level() -> bool:
    """Whether C++ has a forward-mode level, which a graph of TorchDynamo enters without Python."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level)
    return False


def _noted(add: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``add``, which adds a filter of warnings, with a note of filters added by imports.

    Libraries add filters when they are imported, which may be within any test.
    """

    @functools.wraps(add)
    def noting(*item: Any, append: bool) -> Any:
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code.co_filename != _IMPORTING:
            frame = frame.f_back
        if frame is not None:
            _OF_IMPORTS.add(item)
        return add(*item, append=append)

    return noting


warnings._add_filter = _noted(warnings._add_filter)  # type: ignore[attr-defined]


def _read(setting: Callable[[], Any]) -> Any:
    """Read a setting; return "mixed" if PyTorch raises because old and new settings were mixed."""
    try:
        return setting()
    except RuntimeError:
        return "mixed"


def more() -> dict[str, Any]:
    """Return state that takes longer to read, or that torch.compile changes."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    codes = set(frames.input_codes.seen) if frames else set()  # type: ignore[attr-defined]
    return {
        "generator": torch.get_rng_state().tolist(),
        "codes that Dynamo has seen": {id(reference()) for reference in codes},
        "Dynamo's settings": _config("torch._dynamo.config"),
        "functorch's settings": _config("torch._functorch.config"),
    }


def stubs_left() -> list[Any]:
    """Return the replacement functions of patches that still exist in memory."""
    gc.collect()
    functions = (found for found in gc.get_objects() if type(found) is FunctionType)
    return [found for found in functions if found.__qualname__.startswith("_calling.<locals>")]


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of all changed state, and each function, setting and new filter."""
    names = [name for name, value in before.items() if not _same(value, after[name])]
    if "warnings" in names:
        names += [f"added {each}" for each in after["warnings"] if each not in before["warnings"]]
    if "functions" in names:
        names.remove("functions")
        names += [
            f"{getattr(owner, '__name__', owner)}.{name}"
            for owner, one, other in zip(
                _OWNERS, before["functions"], after["functions"], strict=True
            )
            for name in one.keys() | other.keys()
            if one.get(name) is not other.get(name)
            if _is_function(other.get(name))
        ]
    if "settings" in names:
        pairs = zip(SETTINGS, before["settings"], after["settings"], strict=True)
        names += [setting.name for setting, one, other in pairs if one != other]
    return names


def _is_function(value: Any) -> bool:
    """Whether a value is a function that a trace could have patched.

    TorchDynamo permanently replaces two functions of nn.Module, and transformers adds one; these
    are ignored.
    """
    others = str(getattr(value, "__module__", "")).startswith(("torch._dynamo", "transformers"))
    return isinstance(value, (Callable, staticmethod, classmethod)) and not others


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        there = map(other.__getitem__, one)
        return one.keys() == other.keys() and all(map(operator.is_, one.values(), there))
    return bool(one == other)


def _config(name: str) -> Any:
    module: Any = sys.modules.get(name)
    return module and repr(sorted(module.get_config_copy().items()))
