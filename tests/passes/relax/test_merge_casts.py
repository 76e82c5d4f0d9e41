"""MergeCasts: equal casts are one kernel, at a place where operands exist and nothing reads yet."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.relax import op

from tests.legalize import compiled
from tests.relax_helpers import build_main
from tests.schedules.gpu.emulator import EmulatedFunction, emulate_gpu, gpu_target, schedule
from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler.build import with_some_loops
from tvmbridge.passes.base import PassReport
from tvmbridge.passes.relax.merge_casts import MergeCasts
from tvmbridge.schedules.gpu import is_one_kernel

Formula = Callable[..., list[relax.Expr]]


def _half(x: relax.Expr) -> relax.Expr:
    return op.astype(x, "float16")


def _weights(b: relax.BlockBuilder, x: relax.Expr, *weights: relax.Expr) -> list[relax.Expr]:
    """Cast parameters; each cast is read before the next one, so they move to the first."""
    found = []
    for weight in weights:
        cast = b.emit(_half(weight))
        x = b.emit(op.nn.softmax(op.add(x, op.astype(cast, "float32"))))
        found += [cast, x]
    return found


def _gradients(b: relax.BlockBuilder, x: relax.Expr, *weights: relax.Expr) -> list[relax.Expr]:
    """Cast values of a chain; nothing reads the casts, so they move to the last."""
    found = []
    for weight in weights:
        x = b.emit(op.nn.softmax(op.add(x, weight)))
        found.append(b.emit(_half(x)))
    return found


def _chain(b: relax.BlockBuilder, x: relax.Expr, *weights: relax.Expr) -> list[relax.Expr]:
    """Cast values that depend on the cast before: they cannot be merged."""
    found = []
    for weight in weights:
        cast = b.emit(_half(x))
        x = b.emit(op.nn.softmax(op.add(weight, op.astype(cast, "float32"))))
        found.append(cast)
    return found


def _both(b: relax.BlockBuilder, x: relax.Expr, *weights: relax.Expr) -> list[relax.Expr]:
    """Cast parameters and, by the same function, values that depend on them."""
    return [*_weights(b, x, *weights[:2]), *_gradients(b, x, *weights[2:]), _half(weights[0])]


def _merged(formula: Formula, *inputs: torch.Tensor) -> tuple[tvm.IRModule, int]:
    builder = relax.BlockBuilder()
    variables = [
        relax.Var(f"x{i}", relax.TensorType(tuple(t.shape), "float32"))
        for i, t in enumerate(inputs)
    ]
    with builder.function("main", variables):
        with builder.dataflow():
            output = builder.emit_output(relax.Tuple(formula(builder, *variables)))
        builder.emit_func_output(output)
    report = PassReport()
    with gpu_target():
        fused = compiled.fuse(builder.get())
        mod = MergeCasts(is_one_kernel).apply(fused, report)
    relax.analysis.well_formed(mod)
    assert report.rewrites or mod.same_as(fused)
    return mod, report.rewrites


@pytest.mark.parametrize(
    ("formula", "merges"),
    but_slow(
        [(_weights, 9), (_gradients, 8), (_chain, 0), (_both, None)], (_weights, 9), (_both, None)
    ),
    ids=["weights", "gradients", "chain", "both"],
)
def test_results_are_the_same(formula: Formula, merges: int | None) -> None:
    """Of eleven casts eight are one kernel and three another; a softmax computes the last one."""
    torch.manual_seed(0)
    inputs = [torch.randn(4, 6) for _ in range(12)]
    mod, found = _merged(formula, *inputs)
    assert merges is None or found == merges
    mod = with_some_loops(schedule(mod, gpu_target()))
    results = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](*inputs)
    plain = build_main(inputs, lambda *x: formula(relax.BlockBuilder.current(), *x))
    with gpu_target():
        plain = with_some_loops(schedule(compiled.fuse(plain), gpu_target()))
    wanted = relax.VirtualMachine(tvm.compile(plain, "llvm"), tvm.cpu())["main"](*inputs)
    for result, other in zip(results, wanted, strict=True):
        assert torch.equal(torch.from_dlpack(result), torch.from_dlpack(other))


def test_large_casts_are_left() -> None:
    inputs = [torch.zeros(1).expand(2049, 2048) for _ in range(3)]
    assert _merged(lambda b, *x: [_half(v) for v in x], *inputs)[1] == 0


@pytest.mark.slow
def test_training_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
    results: list[int] = []
    genuine = EmulatedFunction.__call__

    def noted(self: EmulatedFunction, *tensors: object) -> None:
        results.append(self.results)
        genuine(self, *tensors)

    monkeypatch.setattr(EmulatedFunction, "__call__", noted)
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(9)), nn.Tanh())
    eager, x = copy.deepcopy(ours), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        add_tvm_dispatch(ours, (x,))
        y, wanted = ours(x), eager(x)
    results.clear()
    for module, output in ((ours, y), (eager, wanted)):
        output.float().square().sum().backward()
        assert all(p.grad is not None for p in module.parameters())
    torch.testing.assert_close(y, wanted)
    for found, other in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad, rtol=2e-2, atol=1e-5)
    assert max(results) == 8
    assert dispatch_report(ours).tvm_calls == 1
