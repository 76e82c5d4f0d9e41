"""Explain in the user's terms why a module cannot be captured: by the sample or a source line."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tvmbridge.calls.plain import other_answer, split_over_ranks, unusual_in
from tvmbridge.calls.standins import has_own_call, stand_in, tensors_of, tensors_replaced
from tvmbridge.core.assumptions import Question
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.observe.descriptors import find_aliases
from tvmbridge.graph_capture.observe.hooks import hooked_submodule
from tvmbridge.graph_capture.observe.outside_tensors import run_unseen

# Frames of these packages are not the user's.
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")

# By wrapper class: the attribute that holds the wrapped module.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
}

# PyTorch's messages for an operator without a kernel for a device or dtype.
_NO_KERNEL = re.compile(r"[Cc]ould not run '|not implemented for '|no kernel|No operator found")
_ACCEPTED = (
    "pass arguments it accepts; if a plain call of the module accepts these, it does not accept "
    "copies of them: dispatch its submodules instead"
)
_KEYWORDS = "a dict is one positional argument: pass keyword arguments as sample_kwargs=sample"
_POSITIONAL = "a list is one positional argument: pass a tuple of the arguments, tuple(sample)"
_ARRAYS = "a numpy array is no tensor: pass torch.from_numpy(array)"


def advice_on_experts(module: nn.Module) -> str:
    """Return advice if a transformers model loops over experts in Python, otherwise ""."""
    parts = list(module.modules())
    if not any("Experts" in type(part).__name__ for part in parts):
        return ""  # A model without experts has the setting too.
    for part in parts:
        ask = getattr(type(part), "get_experts_implementation", None)
        if ask is not None and "eager" in ask(part).values():
            return (
                '; its experts are called in a loop: model.set_experts_implementation("grouped_mm")'
                " makes one call of it, whose shapes do not depend on data"
            )
    return ""


def raise_if_forward_refuses(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], autocast: Autocast = ()
) -> None:
    """Run forward eagerly on copies of all tensors, and raise if it refuses the sample.

    This distinguishes a bad sample from a module that cannot be captured. The module's tensors and
    the global random generators are as before afterwards.

    Raises:
        CaptureError: forward raises in eager PyTorch, too.
    """
    actor = stand_in(module) or module
    try:
        with tensors_replaced(actor, {}):
            run_unseen(actor, args, kwargs, autocast)
    except CaptureError:
        raise
    except Exception as error:
        if "torch.func." in str(error) and "saved tensor hooks" in str(error):
            raise CaptureError(
                f"{type(module).__name__} cannot be captured: forward differentiates by torch.func "
                "(grad, vjp, jacrev, hessian), which compiled code would not repeat: leave this "
                "module to PyTorch, and dispatch submodules"
            ) from error
        if isinstance(error, NotImplementedError) or _NO_KERNEL.search(str(error)):
            raise CaptureError(
                f"forward of {type(module).__name__} calls an operator that PyTorch has no kernel "
                f"for ({type(error).__name__}: {first_paragraph(error)}): register a kernel for "
                "the device and dtype of its arguments (torch.library), or dispatch the submodules "
                "before and behind the operator in place of this module"
            ) from error
        raise CaptureError(
            f"the forward of {type(module).__name__} refuses this sample input "
            f"({type(error).__name__}: {first_paragraph(error)}); {sample_advice(args, kwargs)}"
        ) from error


def sample_advice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return advice on what to pass instead of a sample that forward refuses."""
    only = args[0] if len(args) == 1 and not kwargs else None
    advice = []
    if isinstance(only, Mapping):
        advice.append(_KEYWORDS)
    elif isinstance(only, list):
        advice.append(_POSITIONAL)
    if any(isinstance(leaf, np.ndarray) for leaf in pytree.tree_leaves((args, dict(kwargs)))):
        advice.append(_ARRAYS)
    return "; ".join(advice) or _ACCEPTED


def refuse_kind(module: nn.Module) -> None:
    """Refuse modules that no call can be served for, whatever their tensors and hooks are then.

    Raises:
        CaptureError: the class of the module cannot be captured, or its parameters are sharded in
            a way that no code gathers.
    """
    _raise_for(module, _unusual_class(module) or split_over_ranks(module))


def refuse_at_sight(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse modules and samples that a trace would misinterpret or that would end the process.

    Raises:
        CaptureError: the class of the module, an argument or a tensor of the module cannot be
            captured, or a submodule has hooks that cannot be traced.
    """
    refuse_kind(module)
    reason = unusual_in(module, pytree.tree_leaves((args, dict(kwargs))))
    hooked = hooked_submodule(module) if reason is None else None
    _raise_for(module, reason if hooked is None else Reason(Kind.HOOKED_WITHIN, hooked))


def _raise_for(module: nn.Module, reason: Reason | None) -> None:
    if reason is not None:
        reason = replace(reason, settles=False)
        raise CaptureError(f"{type(module).__name__} cannot be captured: {reason}; {reason.advice}")


def refuse_what_is_asked(module: nn.Module, arguments: Any, asks: Collection[Question]) -> None:
    """Raise a CaptureError if a tensor has a property that forward reads and a trace changes."""
    tied = find_aliases(module)
    own = [tensor for name, tensor in tensors_of(module).items() if name not in tied]
    reason = other_answer(asks, pytree.tree_leaves(arguments), own)
    _raise_for(module, reason)


def refuse_own_call(module: nn.Module) -> None:
    """Refuse a module whose class has its own ``__call__`` if it cannot be traced on a copy.

    A trace of the module itself would include ``__call__``, and a call would then run ``__call__``
    again around the compiled code.
    """
    if has_own_call(module):
        raise CaptureError(
            f"{type(module).__name__} cannot be captured: its class has a __call__ of its own, and "
            "it cannot be copied to be traced without; move what __call__ does into forward, or "
            "dispatch a submodule"
        )


def _unusual_class(module: nn.Module) -> Reason | None:
    class_ = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return Reason(Kind.SCRIPT)
    for each in class_.__mro__:
        held = _WRAPPERS.get(f"{each.__module__}.{each.__name__}")
        if held is not None:
            return Reason(Kind.WRAPPER, f".{held}")
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            return Reason(Kind.SCRIPT_WITHIN, name)
    if isinstance(inspect.getattr_static(class_, "forward", None), property):
        return Reason(Kind.PROPERTY)
    return None


def first_paragraph(error: BaseException | None) -> str:
    """Return the first paragraph of an error's text, or the error's type if the text is empty."""
    text = str(error or "").strip()
    return text.split("\n\n")[0] if text else type(error).__name__


def user_line(error: BaseException) -> str | None:
    """Return the innermost line of user code in the error's traceback; None if there is none."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(_NOT_THE_USERS)
    ]
    if not frames:
        return None
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name} ({frame.line})"
