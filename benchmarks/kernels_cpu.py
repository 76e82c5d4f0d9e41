"""Time of fused element-wise and reduction kernels against PyTorch eager on the same cores.

    python benchmarks/kernels_cpu.py [name ...]

Each case is run by both in turns, in one process; times are medians of many calls. Each result is
compared with PyTorch's in float64 before it is timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tvm
from torch.nn import functional
from tvm import relax
from tvm.relax import op

from tvmbridge.legalize import LEGALIZE_MAP
from tvmbridge.schedules import schedule_for_cpu
from tvmbridge.schedules.target import host_target
from tvmbridge.schedules.threads import share_torch_threads

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A function in Relax and in PyTorch, over inputs of the given shapes and dtypes."""

    name: str
    inputs: Callable[[], Tensors]
    graph: Callable[..., relax.Expr]
    eager: Callable[..., torch.Tensor]


def compile_case(case: Case) -> Callable[..., torch.Tensor]:
    """Compile the Relax function of a case."""
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"x{i}", relax.TensorType(tuple(t.shape), str(t.dtype).removeprefix("torch.")))
        for i, t in enumerate(case.inputs())
    ]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(case.graph(*params)))
        builder.emit_func_output(out)
    target = host_target()
    passes = [
        relax.transform.LegalizeOps(LEGALIZE_MAP),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
    mod = tvm.ir.transform.Sequential(passes)(builder.get())
    mod = schedule_for_cpu(mod, target)
    return relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())["main"]


def _gelu_backward(x: relax.Expr, dy: relax.Expr) -> relax.Expr:
    def c(value: float) -> relax.Expr:
        return relax.const(value, "float32")

    phi = op.multiply(op.add(op.erf(op.multiply(x, c(0.5**0.5))), c(1.0)), c(0.5))
    density = op.multiply(op.exp(op.multiply(op.multiply(x, x), c(-0.5))), c(0.3989422804014327))
    return op.multiply(dy, op.add(phi, op.multiply(x, density)))


def _gelu_backward_eager(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(dy, x)


def _softmax_backward(y: relax.Expr, dy: relax.Expr) -> relax.Expr:
    product = op.multiply(y, dy)
    return op.subtract(product, op.multiply(y, op.sum(product, -1, keepdims=True)))


def _layer_norm_spelled_out(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    centered = op.subtract(x, op.mean(x, -1, keepdims=True))
    variance = op.mean(op.square(centered), -1, keepdims=True)
    inverse = op.rsqrt(op.add(variance, relax.const(1e-5, "float32")))
    return op.add(op.multiply(op.multiply(centered, inverse), w), b)


def _random(*shapes: tuple[int, ...]) -> Callable[[], Tensors]:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def _cases() -> list[Case]:
    big, wide, scores = (1024, 768), (1024, 3072), (8, 12, 128, 128)
    cases = [
        Case(f"gelu {n}x3072", _random((n, 3072)), op.nn.gelu, functional.gelu) for n in (128, 1024)
    ]
    cases += [
        Case("gelu backward", _random(wide, wide), _gelu_backward, _gelu_backward_eager),
        Case(
            "bias+residual+layer_norm",
            _random(big, (768,), big, (768,), (768,)),
            lambda x, b, r, w, c: op.nn.layer_norm(op.add(op.add(x, b), r), w, c, -1),
            lambda x, b, r, w, c: functional.layer_norm(x + b + r, (768,), w, c),
        ),
        Case(
            "scale+mask+softmax",
            _random(scores, (8, 1, 1, 128)),
            lambda x, m: op.nn.softmax(
                op.add(op.multiply(x, relax.const(0.125, "float32")), m), -1
            ),
            lambda x, m: torch.softmax(x * 0.125 + m, -1),
        ),
        Case(
            "softmax backward",
            lambda: (torch.softmax(torch.randn(scores), -1), torch.randn(scores)),
            _softmax_backward,
            lambda y, dy: torch._softmax_backward_data(dy, y, -1, y.dtype),
        ),
        Case(
            "x*mask*scale",
            lambda: (torch.randn(wide), torch.rand(wide) > 0.1),
            lambda x, m: op.multiply(
                op.multiply(x, op.astype(m, "float32")), relax.const(1 / 0.9, "float32")
            ),
            lambda x, m: x * m * (1 / 0.9),
        ),
        Case("column sum", _random(wide), lambda x: op.sum(x, 0), lambda x: x.sum(0)),
        Case("row sum", _random(wide), lambda x: op.sum(x, 1), lambda x: x.sum(1)),
        Case("full sum", _random(wide), lambda x: op.sum(x), lambda x: x.sum()),
        Case(
            "permute 0213",
            _random((8, 128, 12, 64)),
            lambda x: op.permute_dims(x, (0, 2, 1, 3)),
            lambda x: x.permute(0, 2, 1, 3).contiguous(),
        ),
        Case("transpose", _random(big), op.permute_dims, lambda x: x.T.contiguous()),
        Case(
            "layer_norm spelled out",
            _random(big, (768,), (768,)),
            _layer_norm_spelled_out,
            lambda x, w, b: functional.layer_norm(x, (768,), w, b),
        ),
    ]
    return cases


def check(case: Case, compiled: Callable[..., torch.Tensor], inputs: Tensors) -> float:
    """Return the largest difference from float64, relative to the largest magnitude."""
    exact = case.eager(*(t.double() if t.is_floating_point() else t for t in inputs))
    return ((compiled(*inputs).double() - exact).abs().max() / exact.abs().max()).item()


def measure(functions: list[Callable[[], object]], seconds: float = 1.0) -> list[float]:
    """Call the functions in turns, and return the median microseconds of each."""
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 20:
        for function, record in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            record.append(time.perf_counter() - start)
    return [statistics.median(record) * 1e6 for record in times]


def main(names: list[str]) -> None:
    """Print a line for each case whose name contains one of ``names``; all if there are none."""
    share_torch_threads()
    print(f"{'case':28} {'eager us':>9} {'ours us':>9} {'ratio':>6}  max error")
    for case in _cases():
        if names and not any(name in case.name for name in names):
            continue
        compiled = compile_case(case)
        inputs = case.inputs()
        error = check(case, compiled, inputs)
        eager, ours = measure(
            [lambda c=case, i=inputs: c.eager(*i), lambda f=compiled, i=inputs: f(*i)]
        )
        print(f"{case.name:28} {eager:9.1f} {ours:9.1f} {ours / eager:6.2f}  {error:.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
