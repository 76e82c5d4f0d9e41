"""Operators, classes and functions that tvmbridge imports from PyTorch's private modules."""

from __future__ import annotations

import types
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .checks import PrivateName, has, has_local, has_schema, weight, within


def _flattens(pytree: Any) -> bool:
    nested = {"a": [1, 2]}
    leaves, spec = pytree.tree_flatten(nested)
    return isinstance(spec, pytree.TreeSpec) and pytree.tree_unflatten(leaves, spec) == nested


def _offers(pytree: Any) -> bool:
    used = "GetAttrKey SUPPORTED_NODES keystr register_pytree_node tree_flatten_with_path "
    used += "tree_is_leaf tree_leaves tree_map tree_map_only"
    return has(*used.split())(pytree) and _flattens(pytree)


def _fakes(kind: Any) -> bool:
    mode = kind(allow_non_fake_inputs=True, shape_env=None)
    fake = mode.from_tensor(torch.ones(2), static_shapes=True)
    return bool(fake.fake_mode is mode)


def _holds_its_backward(kind: Any) -> bool:
    return has("register_autograd")(kind) and {
        "_backward_fn",
        "_setup_context_fn",
    } <= set(kind.__init__.__code__.co_names)


def _knows_device(handlers: Any) -> bool:
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    fake = mode.from_tensor(torch.ones(2))
    return bool(handlers[torch.ops.prim.device.default]((fake,)) == torch.device("cpu"))


def _is_raised(kind: Any) -> bool:
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    fake = mode.from_tensor(torch.ones(()))
    try:
        fake.item()
    except kind:
        return True
    return False


def _writes_into_all(copy: Any) -> bool:
    written = [torch.zeros(2), torch.zeros((), dtype=torch.int64)]
    copy(written, [torch.ones(2), torch.ones((), dtype=torch.int64)])
    return all(bool((t == 1).all()) and t._version == 1 for t in written)


def _counts(use_count: Any) -> bool:
    x = torch.ones(2)
    key = x.untyped_storage()._cdata
    alone = use_count(key)
    view = x[1:]
    return bool(use_count(key) == alone + 1 and view is not None)


def _keeps_graph(ask: Any) -> bool:
    seen: list[bool] = []
    total = weight().sum()
    total.register_hook(lambda _: seen.append(ask()))
    for keeps in (True, False):
        total.backward(retain_graph=keeps)
    return seen == [True, False]


def _executes(ask: Any) -> bool:
    """Whether a backward that was asked for one gradient says so of each node that follows."""
    seen: list[bool | str] = []

    def asked(node: Any) -> bool | str:
        try:
            return bool(ask(node))
        except RuntimeError:
            return "leaf"

    x, w = weight(), weight()
    middle = x * 2
    product = middle * w
    node = product.grad_fn
    assert node is not None
    of_middle, of_w = (following for following, _ in node.next_functions)
    node.register_prehook(lambda _: seen.extend(map(asked, (of_middle, of_w))))
    for wanted in (middle, x, w):
        torch.autograd.grad(product.sum(), [wanted], retain_graph=True)
    product.sum().backward()
    return seen == [True, False, True, False, False, "leaf", True, True]


def _ends_last(queue: Any) -> bool:
    seen: list[str] = []
    x = weight()
    x.register_hook(lambda _: seen.append("gradient"))
    total = x.sum()
    total.register_hook(lambda _: queue(lambda: seen.append("end")))
    total.backward()
    return seen == ["gradient", "end"]


def _finds_hooks(top: Any) -> bool:
    def pack(x: Any) -> Any:
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, pack)
    return bool(within(hooks, lambda: top(True))[0] is pack)


def _recomputes(kind: Any) -> bool:
    """Whether the hook of a recomputing checkpoint is a function inside the class ``kind``."""
    seen: list[str] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack: Any = hooks[0] if hooks else None
        seen.append(f"{pack.__module__}.{pack.__qualname__}")
        return x.sin().sin()

    checkpoint(forward, weight(), use_reentrant=False).sum().backward()
    module = kind.__module__
    return seen[0].startswith(module) and seen[1].startswith(f"{module}.{kind.__name__}")


def _knows_creation(ask: Any) -> bool:
    base = weight()
    view = within(torch.no_grad(), lambda: base[:1])
    return bool(ask(view) == torch._C._autograd.CreationMeta.NO_GRAD_MODE)


_DEVICES = ("IPU", "XLA", "Lazy", "XPU", "MPS", "HPU", "CUDA")
_KEYS = (*_DEVICES, *(f"Autograd{device}" for device in _DEVICES), "Autograd")
_KEYS += ("AutocastCPU", "AutocastCUDA", "CompositeImplicitAutograd")
_KEYS += tuple(f"AutogradPrivateUse{i}" for i in (1, 2, 3))

IMPORTED = (
    PrivateName(
        "torch._functorch.autograd_function.CustomFunctionHigherOrderOperator.__call__",
        "noticing custom autograd functions within function transforms",
        has_local("autograd_function"),
    ),
    PrivateName("torch.utils._pytree", "nested arguments and results", _offers),
    PrivateName(
        "torch._C.DispatchKey",
        "the kernels that are not prepared, or set aside, in a trace",
        has(*_KEYS),
    ),
    PrivateName(
        "torch.export.exported_program",
        "the kernels that are not prepared",
        has("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE"),
    ),
    PrivateName(
        "torch._subclasses.fake_impls",
        "keeping the kernels of a decomposition for the next one",
        has("op_implementations_dict"),
    ),
    PrivateName(
        "torch._ops.OpOverload",
        "telling operators from other functions in a graph",
        lambda kind: isinstance(torch.ops.aten.sin.default, kind),
    ),
    PrivateName(
        "torch._ops.OpOverloadPacket",
        "telling operators from other functions that forward names",
        lambda kind: isinstance(torch.ops.aten.sin, kind),
    ),
    PrivateName(
        "torch._library.fake_impl.FakeImplCtx",
        "sizes that depend on data in the results of libraries' operators",
        has("create_unbacked_symint", "new_dynamic_size"),
    ),
    PrivateName(
        "torch._library.custom_ops.CustomOpDef",
        "noticing what the backward of a custom operator reads",
        _holds_its_backward,
    ),
    PrivateName(
        "torch._library.custom_ops._maybe_get_opdef",
        "noticing what the backward of a custom operator reads",
        lambda find: find("aten::sin") is None,
    ),
    PrivateName(
        "torch._jit_internal",
        "noticing PyTorch's functions that were replaced",
        lambda space: isinstance(space, types.ModuleType),
    ),
    PrivateName(
        "torch._C._nn",
        "noticing PyTorch's functions that were replaced",
        lambda space: isinstance(space, types.ModuleType),
    ),
    PrivateName(
        "torch._C.TensorBase",
        "noticing methods of tensors that were replaced",
        lambda kind: isinstance(kind, type),
    ),
    PrivateName(
        "torch._C._dispatch_has_kernel",
        "keeping which operators may be preserved",
        lambda ask: ask("aten::matmul"),
    ),
    PrivateName(
        "torch._C._dispatch_get_registrations_for_dispatch_key",
        "when the table of decompositions must be made again",
        lambda ask: "aten::matmul" in ask("CompositeImplicitAutograd"),
    ),
    PrivateName(
        "torch._decomp.core_aten_decompositions",
        "taking joint functions apart",
        lambda table: callable(table()[torch.ops.aten.mse_loss.default]),
    ),
    PrivateName(
        "torch._decomp.get_decompositions",
        "exporting operators that have no loops of their own",
        lambda get: len(get([torch.ops.aten.grid_sampler_2d.default])) == 1,
    ),
    PrivateName(
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "whether autocast casts for an operator",
        lambda ask: ask("aten::mm", "AutocastCUDA") and not ask("aten::relu", "AutocastCUDA"),
    ),
    PrivateName(
        "torch.fx.experimental.proxy_tensor",
        "recording autocast's casts in place of its regions",
        has("PreDispatchTorchFunctionMode"),
    ),
    PrivateName(
        "torch._prims_common.make_contiguous_strides_for",
        "strides of tensors that are described",
        lambda strides: strides((2, 3)) == (3, 1),
    ),
    PrivateName(
        "torch._C._from_dlpack",
        "handing tensors to kernels",
        lambda take: take(torch.ones(2).__dlpack__()).tolist() == [1, 1],
    ),
    PrivateName("torch._C._storage_Use_Count", "whether weights may be moved", _counts),
    PrivateName(
        "torch._is_functional_tensor",
        "refusing tensors of function transforms",
        lambda ask: ask(torch.ones(2)) is False,
    ),
    PrivateName(
        "torch._fused_sdp_choice",
        "the kernel that PyTorch would take for attention",
        lambda f: f(*[torch.ones(1, 1, 2, 8)] * 3, None, 0.0, False) in range(5),
    ),
    PrivateName(
        "torch._grouped_mm",
        "products of groups of rows, as mixtures of experts have them",
        lambda f: str(f) and torch.ops.aten._grouped_mm.default._schema.arguments[1].name == "mat2",
    ),
    PrivateName(
        "torch._foreach_mul",
        "copies of many tensors by one launch",
        lambda f: torch.equal(f([torch.ones(2)], 1.0)[0], torch.ones(2)),
    ),
    PrivateName(
        "torch._foreach_copy_",
        "writes into many tensors by one launch",
        _writes_into_all,
    ),
    PrivateName("torch._assert_async", "assertions in forward", lambda f: f(torch.ones(1)) is None),
    PrivateName(
        "torch._linalg_check_errors",
        "errors of linear algebra",
        lambda f: f(torch.zeros((), dtype=torch.int32), "inverse", is_matrix=True) is None,
    ),
    PrivateName(
        "torch._native_multi_head_attention",
        "the fast path of attention",
        has_schema("query", "key", "value", "embed_dim", "num_head", "qkv_weight", "qkv_bias"),
    ),
    PrivateName(
        "torch._transformer_encoder_layer_fwd",
        "the fast path of transformer layers",
        has_schema("src", "embed_dim", "num_heads", "qkv_weight", "qkv_bias", "proj_weight"),
    ),
    PrivateName(
        "torch._pack_padded_sequence",
        "refusing sequences that forward packs",
        has_schema("input", "lengths", "batch_first"),
    ),
    PrivateName(
        "torch.ops.mkldnn._linear_pointwise.default",
        "products by oneDNN, where PyTorch has it",
        lambda op: [a.name for a in op._schema.arguments][:4] == ["X", "W", "B", "attr"],
    ),
    PrivateName(
        "torch.nn.modules.module._has_any_global_hook",
        "hooks of all modules, which parts are not compiled with",
        callable,
    ),
    PrivateName(
        "torch.nn.modules.batchnorm._BatchNorm",
        "batch norms with cumulative averages",
        lambda kind: issubclass(nn.BatchNorm1d, kind) and hasattr(kind, "_check_input_dim"),
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensor",
        "telling values in a trace from real ones",
        lambda kind: issubclass(kind, torch.Tensor),
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensorMode", "running forward without data", _fakes
    ),
    PrivateName(
        "torch._subclasses.fake_tensor._DISPATCH_META_HANDLERS",
        "the device of a fake tensor, without the other modes",
        _knows_device,
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "noticing what depends on data",
        _is_raised,
    ),
    PrivateName(
        "torch._subclasses.meta_utils.MetaTensorDescriber",
        "letting go of tensors that a trace has described",
        lambda kind: (
            isinstance(kind().lookup_tensor, MutableMapping)
            and isinstance(kind().lookup_storage, MutableMapping)
        ),
    ),
    PrivateName(
        "torch._dispatch.python.enable_python_dispatcher",
        "operators on fake tensors of symbolic sizes",
        lambda enter: within(enter(), lambda: True),
    ),
    PrivateName(
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
        "sizes that depend on data, in fake tensors",
        lambda kind: kind() is not None,
    ),
    PrivateName(
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
        "noticing decisions that depend on data",
        lambda kind: issubclass(kind, Exception),
    ),
    PrivateName(
        "torch.export.dynamic_shapes._combine_args",
        "specs of dynamic shapes",
        lambda combine: combine(lambda a, *, b: a, (1,), {"b": 2}) == {"a": 1, "b": 2},
    ),
    PrivateName(
        "torch.export.dynamic_shapes._check_dynamic_shapes",
        "specs of dynamic shapes",
        lambda check: check({"a": torch.ones(2)}, {"a": {0: None}}) is None,
    ),
    PrivateName(
        "torch.export.dynamic_shapes._tree_map_with_path",
        "specs of dynamic shapes",
        lambda walk: walk(lambda _, a, b: (a, b), {"a": [1]}, {"a": [2]}) == {"a": [(1, 2)]},
    ),
    PrivateName(
        "torch._inductor.config",
        "keeping draws that nothing reads",
        lambda config: within(config.patch(fallback_random=True), lambda: config.fallback_random),
    ),
    PrivateName(
        "torch._C._autograd.CreationMeta",
        "views that are made anew",
        has("NO_GRAD_MODE", "IN_CUSTOM_FUNCTION", "INFERENCE_MODE"),
    ),
    PrivateName(
        "torch._C._autograd._get_creation_meta", "views that are made anew", _knows_creation
    ),
    PrivateName(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "checkpoints and other hooks on what is saved",
        _finds_hooks,
    ),
    PrivateName(
        "torch.utils.checkpoint._recomputation_hook",
        "telling a checkpoint's recomputation from its first call",
        _recomputes,
    ),
    PrivateName(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "letting go of what no second backward will need",
        _keeps_graph,
    ),
    PrivateName(
        "torch._C._will_engine_execute_node",
        "backward in halves: the gradients of inputs or of weights alone",
        _executes,
    ),
    PrivateName(
        "torch.autograd.graph._engine_run_backward",
        "which gradients a running backward is asked for",
        has_local("args"),
    ),
    PrivateName(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "the end of a backward pass that is timed",
        _ends_last,
    ),
    PrivateName(
        "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
        "handing out gradients in parts under DistributedDataParallel",
        lambda active: active() is None,
    ),
    PrivateName(
        "torch.distributed._functional_collectives",
        "whether collectives have a gradient",
        has("wait_tensor", "all_to_all_single_autograd"),
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._resolve_process_group",
        "the ranks that a collective joins",
        callable,
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._get_default_store",
        "telling other ranks who has ended first",
        callable,
    ),
)
