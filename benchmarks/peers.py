"""The peers that can run a module: eager PyTorch, its compilers, other runtimes, tvmbridge."""

from __future__ import annotations

import importlib.util
import io
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report

Call = Callable[[], object]
LIVE, FROZEN = "tvmbridge", "tvmbridge frozen"


class MissingError(Exception):
    """Raised by a peer that is not installed, or cannot do this kind of call."""


def _inference(function: Callable[[torch.Tensor], object], x: torch.Tensor) -> Call:
    def call() -> object:
        with torch.no_grad():
            return function(x)

    return call


def step_of(module: nn.Module, x: torch.Tensor) -> Call:
    """Return a function that runs forward and backward, or forward alone in eval mode."""
    if not module.training:
        return _inference(module, x)

    def step() -> object:
        module.zero_grad(set_to_none=True)
        x.grad = None
        output = module(x)
        output.backward(torch.ones_like(output))
        return output

    return step


def _eager(module: nn.Module, x: torch.Tensor) -> Call:
    return step_of(module, x)


def _traced(module: nn.Module, x: torch.Tensor) -> Call:
    if module.training:
        raise MissingError("for inference alone")
    with torch.no_grad():
        return _inference(torch.jit.freeze(torch.jit.trace(module, x)), x)


def _compiled(module: nn.Module, x: torch.Tensor) -> Call:
    torch._dynamo.reset()
    module.compile()
    return step_of(module, x)


def _compiled_most(module: nn.Module, x: torch.Tensor) -> Call:
    if module.training:
        raise MissingError("freezing is for inference alone")
    torch._dynamo.reset()
    config = importlib.import_module("torch._inductor.config")
    call = step_of(module, x)
    with config.patch(freezing=True, max_autotune=True):
        module.compile()
        call()
    return call


def _onnx(module: nn.Module, x: torch.Tensor) -> Call:
    runtime = _installed("onnxruntime", module)
    file = io.BytesIO()
    torch.onnx.export(module, (x,), file, dynamo=False, input_names=["x"], output_names=["y"])
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    given = {"x": x.numpy()}
    return lambda: torch.from_numpy(session.run(None, given)[0])


def _openvino(module: nn.Module, x: torch.Tensor) -> Call:
    openvino = _installed("openvino", module)
    # OpenVINO rounds weights itself, and by default may compute a float32 model in bfloat16.
    of_bfloat16 = any(p.dtype is torch.bfloat16 for p in module.parameters())
    with torch.no_grad():
        model = openvino.convert_model(module.float(), example_input=x)
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if of_bfloat16 else "f32",
    }
    compiled = openvino.compile_model(model, "CPU", settings)
    request, given = compiled.create_infer_request(), x.numpy()
    return lambda: torch.from_numpy(request.infer([given])[compiled.output(0)])


def _packaged(module: nn.Module, x: torch.Tensor) -> Call:
    """Return a call of a package of AOTInductor, which PyTorch's runtime loads."""
    if module.training:
        raise MissingError("for inference alone")
    inductor = importlib.import_module("torch._inductor")
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(module, (x,), strict=False)
        package = inductor.aoti_compile_and_package(
            program,
            package_path=str(Path(folder, "model.pt2")),
            inductor_configs={"freezing": True},
        )
        compiled = inductor.aoti_load_package(package)
    return _inference(compiled, x)


def _installed(name: str, module: nn.Module) -> Any:
    if module.training:
        raise MissingError("for inference alone")
    if importlib.util.find_spec(name) is None:
        raise MissingError(f"{name} is not installed")
    return importlib.import_module(name)


def _live(module: nn.Module, x: torch.Tensor) -> Call:
    return _dispatched(module, x, freeze=False)


def _frozen(module: nn.Module, x: torch.Tensor) -> Call:
    if module.training:
        raise MissingError("for inference alone")
    return _dispatched(module, x, freeze=True)


def _dispatched(module: nn.Module, x: torch.Tensor, *, freeze: bool) -> Call:
    add_tvm_dispatch(module, x, freeze=freeze, on_fallback="raise")
    call = step_of(module, x)
    call()
    assert not dispatch_report(module).fallbacks
    return call


PEERS: Mapping[str, Callable[[nn.Module, torch.Tensor], Call]] = MappingProxyType(
    {
        "eager": _eager,
        "jit.trace": _traced,
        "torch.compile": _compiled,
        "max-autotune": _compiled_most,
        "ONNX Runtime": _onnx,
        "OpenVINO": _openvino,
        "AOTInductor": _packaged,
        LIVE: _live,
        FROZEN: _frozen,
    }
)
"""By name, what makes a call of a module with an input; it may be compiled then or at first."""
OURS = (LIVE, FROZEN)
# Peers whose weights may change between calls: live weights are compared with these alone.
OF_LIVE_WEIGHTS = ("eager", "torch.compile")
QUICK = ("eager", "jit.trace", "torch.compile", LIVE, FROZEN)
