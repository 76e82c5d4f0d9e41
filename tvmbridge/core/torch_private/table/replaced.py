"""Functions that are replaced by name while a module is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from .checks import PrivateName, takes


def _is_called_by_apply(_: Any) -> bool:
    """Once by each custom function, whose class is found as a local variable of the caller."""
    code = Function.apply.__func__.__code__  # type: ignore[attr-defined]
    return "unwrap_dead_wrappers" in code.co_names and "cls" in code.co_varnames


REPLACED = (
    PrivateName("torch.export.unflatten._is_call_name", "exporting in linear time", takes("", "")),
    PrivateName(
        "torch.export._trace._populate_param_buffer_metadata_to_new_gm",
        "exporting in linear time",
        takes(None, None, None),
    ),
    PrivateName(
        "torch.export.exported_program._populate_param_buffer_metadata_to_new_gm",
        "decomposing in linear time",
        takes(None, None, None),
    ),
    PrivateName(
        "torch._functorch.utils.unwrap_dead_wrappers",
        "noticing custom autograd functions",
        _is_called_by_apply,
    ),
    PrivateName(
        "torch._export.utils._materialize_cpp_cia_ops", "preparing operators once", takes()
    ),
    PrivateName(
        "torch.export._trace.register_buffer_assignment_hook",
        "following exchanged buffers ourselves",
        takes(None, None),
    ),
    PrivateName(
        "torch._is_all_true",
        "checks of the values of distributions",
        lambda f: bool(f(torch.ones(2, dtype=torch.bool))),
    ),
    PrivateName("torch._check", "checks of PyTorch's fake kernels", takes(True, "message")),
    PrivateName("torch.nn.Module._apply", "conversions without effect", takes(None, len, True)),
    PrivateName(
        "torch.nn.modules.activation._is_make_fx_tracing",
        "attention's path in eager PyTorch",
        takes(),
    ),
    PrivateName(
        "torch.nn.modules.transformer._detect_is_causal_mask",
        "masks that are causal",
        takes(None, None, None),
    ),
    PrivateName(
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        "checkpoints that run once in a trace",
        takes(len, True),
    ),
    PrivateName(
        "torch._dynamo.eval_frame._callback_from_stance",
        "leaving TorchDynamo out of a trace",
        takes(None),
    ),
    PrivateName(
        "torch.nn.attention.flex_attention._ordered_to_dense",
        "block masks that forward makes",
        takes(None, None, 1),
    ),
)
