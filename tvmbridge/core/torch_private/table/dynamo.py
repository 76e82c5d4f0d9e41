"""Private names that TorchDynamo writes into its graphs, or that describe its captures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from .checks import PrivateName, has, takes


def _counts(counters: Any) -> bool:
    return all(isinstance(counters[name], Counter) for name in ("graph_break", "unimplemented"))


DYNAMO = (
    PrivateName(
        "torch._dynamo.backends.common.aot_autograd",
        "forward and backward on the local parts of DTensors",
        takes(),
    ),
    PrivateName(
        "torch._functorch.partitioners.default_partition",
        "what forward on local parts saves for backward",
        callable,
    ),
    PrivateName(
        "torch._higher_order_ops.wrap.tag_activation_checkpoint",
        "checkpoints in a graph of Dynamo, which are called as users call them",
        callable,
    ),
    PrivateName(
        "torch.amp.autocast_mode._enter_autocast",
        "regions of autocast in a graph of Dynamo",
        takes("cpu", torch.bfloat16, True, None),
    ),
    PrivateName(
        "torch.amp.autocast_mode._exit_autocast",
        "regions of autocast in a graph of Dynamo",
        takes(None),
    ),
    PrivateName(
        "torch._dynamo.utils.counters",
        "telling where Dynamo broke a graph",
        _counts,
    ),
    PrivateName(
        "torch._C._dynamo.eval_frame.set_guard_complete_hook",
        "counting calls that Dynamo runs eagerly past its limit of captures",
        callable,
    ),
    PrivateName(
        "torch._dynamo.callback.CallbackTrigger",
        "counting calls that Dynamo runs eagerly past its limit of captures",
        has("DYNAMO"),
    ),
    PrivateName(
        "torch._dynamo.callback_handler",
        "counting calls that Dynamo runs eagerly past its limit of captures",
        has("register_start_callback", "start_callbacks"),
    ),
    PrivateName(
        "torch._guards.CompileContext",
        "counting the captures of a function",
        has("current_compile_id"),
    ),
    PrivateName(
        "torch._dynamo.config",
        "parts of a module, which rely on settings of Dynamo",
        has(
            "patch",
            "suppress_errors",
            "skip_nnmodule_hook_guards",
            "trace_numpy",
            "capture_scalar_outputs",
            "capture_dynamic_output_shape_ops",
            "allow_unspec_int_on_nn_module",
            "recompile_limit",
            "accumulated_recompile_limit",
        ),
    ),
    PrivateName(
        "torch._dynamo.symbolic_convert.InstructionTranslator",
        "the name of the module whose forward Dynamo captures",
        has("current_tx"),
    ),
    PrivateName(
        "torch._dynamo.side_effects.SideEffects",
        "leaving a function to Python that changes a deque",
        has("is_modified"),
    ),
    PrivateName(
        "torch._dynamo.variables.lists.DequeVariable",
        "leaving a function to Python that changes a deque",
        has("call_method"),
    ),
    PrivateName(
        "torch._dynamo.variables.tensor.NumpyNdarrayVariable",
        "leaving a function to Python that reads a number of numpy's",
        has("call_method"),
    ),
    PrivateName(
        "torch._guards.TracingContext",
        "whether a function that Dynamo captures asks for strides",
        has("get_traced_code"),
    ),
    PrivateName(
        "torch._dynamo.guards",
        "compiling again when hooks of all modules are added",
        has("GuardBuilder", "install_guard"),
    ),
    PrivateName(
        "torch._dynamo.guards.GuardBuilder",
        "compiling again when hooks of all modules are added",
        has("DICT_KEYS_MATCH", "SEQUENCE_LENGTH"),
    ),
    PrivateName(
        "torch._dynamo.source",
        "compiling again when hooks of all modules are added",
        has("AttrSource", "ImportSource"),
    ),
    PrivateName(
        "torch._dynamo.exc.SkipFrame",
        "leaving a function to Python that Dynamo captures with other strides",
        lambda error: issubclass(error, Exception),
    ),
    PrivateName(
        "torch._dynamo.exc.TensorifyScalarRestartAnalysis",
        "capturing a function again whose graph would hold for some sizes only",
        lambda error: issubclass(error, Exception),
    ),
    PrivateName(
        "torch._dynamo.convert_frame.compile_lock",
        "captures of TorchDynamo that wait for a trace",
        has("acquire", "release"),
    ),
    PrivateName(
        "torch._dynamo.backends.registry._COMPILER_FNS",
        "threads that look up a backend by its name at the same time",
        has("get"),
    ),
    PrivateName(
        "torch._dynamo.backends.registry.register_backend",
        "threads that look up a backend by its name at the same time",
        takes("compiler_fn", "name", "tags"),
    ),
    PrivateName(
        "torch._dynamo.trace_rules.get_torch_obj_rule_map",
        "building TorchDynamo's tables before functions are replaced",
        takes(),
    ),
    PrivateName(
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "leaving backward to Python",
        callable,
    ),
    PrivateName(
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "leaving backward to Python",
        callable,
    ),
    PrivateName(
        "torch._C._dynamo.eval_frame._FrameAction",
        "leaving backward to Python",
        has("SKIP"),
    ),
    PrivateName(
        "torch._dynamo.eval_frame",
        "leaving TorchDynamo out of a trace",
        has("set_eval_frame", "skip_code"),
    ),
)
