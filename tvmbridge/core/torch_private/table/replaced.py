"""Functions of PyTorch that tvmbridge replaces, by name, while it traces a module."""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.nn.utils import parametrize

from .checks import PrivateName, first_of, has, takes


class _Applied(Function):
    """A custom autograd function that returns a copy of its input."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``x``."""
        return x.clone()


def _is_known_by_its_context(_: Any) -> bool:
    """Whether each call of a custom function creates a context, even by a stored ``apply``."""
    made: list[Any] = []
    bound: Any = _Applied.apply
    with mock.patch.object(
        BackwardCFunction, "__init__", lambda ctx: made.append(ctx._forward_cls)
    ):
        bound(torch.ones(1))
    return made == [_Applied]


def _counts_regions(outside: Any) -> bool:
    """Whether the number of open regions of ``parametrize.cached()`` is in this variable."""
    with parametrize.cached():
        inside = vars(parametrize)["_cache_enabled"]
    return bool(inside == outside + 1)


def _unwraps(genuine: Any) -> bool:
    """Whether ``Function.apply`` calls this function of its module, or is one of C++."""
    if isinstance(Function.apply, BuiltinFunctionType):  # since PyTorch 2.14
        return True
    bound: Any = _Applied.apply
    with mock.patch.object(
        torch._functorch.utils, "unwrap_dead_wrappers", side_effect=genuine
    ) as called:
        bound(torch.ones(1))
    return bool(called.called)


def _is_in_checkpoints(generator: Any) -> bool:
    """Whether ``checkpoint`` calls this function of its module."""
    place = torch.utils.checkpoint
    with mock.patch.object(place, generator.__name__, side_effect=generator) as called:
        place.checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
    return bool(called.called)


REPLACED = (
    PrivateName(
        "torch.nn.utils.parametrize._cache",
        "computing parametrizations in each trace",
        lambda cache: type(cache) is dict,
    ),
    PrivateName(
        "torch.nn.utils.parametrize._cache_enabled",
        "computing parametrizations in each trace",
        _counts_regions,
    ),
    PrivateName(
        "torch.fx.graph_module._loader",
        "forgetting the sources that a compilation generated",
        has("eval_cache", "cache"),
    ),
    PrivateName(
        "torch.export._unlift._assign_attr",
        "exporting in linear time",
        takes(None, None, "", attr_kind=None, persistent=True),
    ),
    PrivateName(
        "torch.fx.graph._format_target", "writing names of modules as literals", takes("", "")
    ),
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
        "torch.export._trace._ignore_backend_decomps",
        "switching libraries off in a trace, without a change of the precision",
        takes(),
    ),
    PrivateName(
        "torch._meta_registrations.div_rtn",
        "sizes of pools without a branch by their remainders",
        takes(7, 2),
    ),
    PrivateName(
        "torch._functorch.utils.unwrap_dead_wrappers",
        "giving custom autograd functions what stands for tensors of globals",
        _unwraps,
    ),
    PrivateName(
        "torch.autograd.function.Function._backward_cls._forward_cls",
        "noticing custom autograd functions",
        _is_known_by_its_context,
    ),
    PrivateName(
        "torch._export.utils._materialize_cpp_cia_ops", "preparing operators once", takes()
    ),
    PrivateName(
        "torch._export.utils._check_valid_to_preserve", "preparing operators once", takes(None)
    ),
    PrivateName(
        "torch._functorch.aot_autograd.PhiloxStateTracker",
        "tracing without tensors for the states of generators",
        takes(),
    ),
    PrivateName(
        "torch._functorch.aot_autograd.config.functionalize_rng_ops",
        "tracing without tensors for the states of generators",
        lambda flag: isinstance(flag, bool),
    ),
    PrivateName(
        "torch.export.exported_program._override_composite_implicit_decomp",
        "keeping the kernels of a decomposition for the next one",
        takes({}),
    ),
    PrivateName(
        "torch.export._trace.register_buffer_assignment_hook",
        "following exchanged buffers ourselves",
        takes(None, None),
    ),
    PrivateName(
        "torch.fx.experimental.proxy_tensor.proxy_call",
        "recording autocast's casts in place of its regions",
        takes(None, None, True, (), {}),
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
        first_of(
            "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
            "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        ),
        "checkpoints that run once in a trace",
        _is_in_checkpoints,
    ),
    PrivateName(
        "torch._dynamo.eval_frame._callback_from_stance",
        "leaving TorchDynamo out of a trace",
        takes(None),
    ),
    PrivateName(
        "torch.nn.attention.flex_attention._ordered_to_dense",
        "block masks that forward makes",
        callable,
    ),
)
