"""MergeKernels: kernels over the same rows become one; results equal float64 PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn
from torch.nn import functional
from tvm import relax
from tvm.relax import op

from tests.legalize.compiled import fuse, target
from tests.schedules.graphs import random_graph
from tests.thinned import but_slow, thinned
from tvmbridge import add_tvm_dispatch, schedules
from tvmbridge.core.decisions import recorded_decisions
from tvmbridge.passes.base import PassReport
from tvmbridge.passes.relax import merge_kernels
from tvmbridge.passes.relax.merge_kernels import Kernels, MergeKernels
from tvmbridge.passes.relax.tir_calls import TirCall
from tvmbridge.schedules import schedule_for_cpu
from tvmbridge.schedules.kernel import Kernel, parse
from tvmbridge.schedules.target import core_count

Results = tuple[relax.Expr, ...]


def _fused(graph: Callable[..., Results], *inputs: torch.Tensor) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"x{i}", relax.TensorType(t.shape, "float32")) for i, t in enumerate(inputs)
    ]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(relax.Tuple(graph(builder, *params))))
        builder.emit_func_output(out)
    return fuse(builder.get())


def _merged(mod: tvm.IRModule) -> tuple[tvm.IRModule, PassReport]:
    report = PassReport()
    with target():
        after = MergeKernels().apply(mod, report)
    after = relax.transform.DeadCodeElimination()(after)
    relax.analysis.well_formed(after)
    return after, report


def _run(mod: tvm.IRModule, *inputs: torch.Tensor) -> list[torch.Tensor]:
    code = tvm.compile(schedule_for_cpu(mod, target()), target())
    return list(relax.VirtualMachine(code, tvm.cpu())["main"](*inputs))


def _kernels(mod: tvm.IRModule) -> int:
    return sum(isinstance(f, tvm.tirx.PrimFunc) for _, f in mod.functions_items())


def _norm(b: relax.BlockBuilder, x: relax.Expr) -> Results:
    mean = b.emit(op.mean(x, -1, keepdims=True))
    centered = b.emit(op.subtract(x, mean))
    variance = b.emit(op.mean(op.square(centered), -1, keepdims=True))
    inverse = b.emit(op.rsqrt(op.add(variance, relax.const(1e-5))))
    return mean, inverse, b.emit(op.tanh(op.multiply(centered, inverse)))


def _gradient(b: relax.BlockBuilder, x: relax.Expr, dy: relax.Expr) -> Results:
    product = b.emit(op.multiply(x, dy))
    total = b.emit(op.sum(product, -1, keepdims=True))
    return (
        b.emit(op.sum(product, 0)),
        b.emit(op.subtract(product, op.multiply(x, total))),
        b.emit(op.sum(op.tanh(product), 0)),
    )


def test_the_statistics_of_a_norm_are_results_of_its_kernel() -> None:
    x = torch.randn(50, 40) + 3
    mod = _fused(_norm, x)
    before = mod.script()
    after, report = _merged(mod)
    assert mod.script() == before
    assert report.rewrites
    assert _kernels(after) == 1
    again, none = _merged(after)
    assert not none.rewrites
    assert tvm_ffi.structural_equal(again, after)
    mean, inverse, y = _run(after, x)
    exact = x.double()
    variance = exact.var(-1, correction=0, keepdim=True)
    torch.testing.assert_close(mean.double(), exact.mean(-1, True), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inverse.double(), (variance + 1e-5).rsqrt(), rtol=1e-6, atol=1e-6)
    expected = functional.layer_norm(exact, (40,)).tanh()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)


# Row lengths that vectors divide or not; one and several parts of the rows.
@pytest.mark.parametrize("shape", [(20, 64), (300, 77), (2048, 96), (1000, 130), (4, 64, 72)])
def test_sums_over_rows_are_made_beside_the_rows(shape: tuple[int, ...]) -> None:
    x, dy = torch.randn(shape), torch.randn(shape)
    after, _ = _merged(_fused(_gradient, x, dy))
    assert (_kernels(after) == 1) == (shape[0] >= 16 * core_count(target()))
    product = x.double() * dy.double()
    total = product.sum(-1, keepdim=True)
    expected = product.sum(0), product - x.double() * total, product.tanh().sum(0)
    for found, exact in zip(_run(after, x, dy), expected, strict=True):
        scale = exact.abs().max().item()
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6 * scale)


def test_what_is_read_on_the_way_stays_apart() -> None:
    def through(b: relax.BlockBuilder, x: relax.Expr) -> Results:
        first = b.emit(op.exp(x))
        product = b.emit(op.call_pure_packed("other", first, ty_args=[first.ty]))
        return first, b.emit(op.add(op.negative(product), first))

    _, report = _merged(_fused(through, torch.randn(30, 30)))
    assert not report.rewrites


@pytest.mark.parametrize("seed", thinned(range(1000, 1040), 3))
def test_random_graph(seed: int) -> None:
    graph = random_graph(seed)
    after, _ = _merged(fuse(graph.mod))
    for result, exact in zip(_run(after, *graph.inputs), graph.outputs, strict=True):
        scale = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(result.double(), exact, rtol=2e-5, atol=2e-5 * scale)


def _described(kernel: Kernel) -> tuple[Any, ...]:
    """Return a kernel with numbers in place of its buffers."""
    buffers = [*kernel.params, *(stage.buffer for stage in kernel.stages)]
    number = {buffer: place for place, buffer in reversed(list(enumerate(buffers)))}
    stages = [
        (
            stage.name,
            [(axis.extent, axis.reduce) for axis in stage.axes],
            number[stage.buffer],
            [(number[load.buffer], len(load.indices), load.guarded) for load in stage.loads],
            stage.cost,
            stage.vectorizable,
        )
        for stage in kernel.stages
    ]
    return len(kernel.params), stages, {number[buffer] for buffer in kernel.outputs}


def test_a_merged_kernel_is_what_parsing_the_merged_function_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check equal layers too, whose functions share variables."""
    genuine, made = Kernels._added, []

    def compared(self: Kernels, kernel: Kernel, *key: Any) -> tvm.ir.GlobalVar:
        made.append(genuine(self, kernel, *key))
        parsed = parse(self.made[made[-1]])
        assert parsed is not None
        assert _described(kernel) == _described(parsed)
        return made[-1]

    monkeypatch.setattr(Kernels, "_added", compared)
    for seed in range(1000, 1008):
        _merged(fuse(random_graph(seed).mod))
    assert made
    layers = [nn.Sequential(nn.Tanh(), nn.Softmax(-1)) for _ in range(4)]
    before, x = len(made), torch.randn(6, 24, requires_grad=True)
    add_tvm_dispatch(nn.Sequential(*layers).train(), x)
    assert len(made) > before


class _Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = x.split(24, 1)
        return torch.cat([norm(p).tanh() for norm, p in zip(self.norms, pieces, strict=True)], 1)


@pytest.mark.parametrize("rows", but_slow([5, 100], 5))
def test_gradients_equal_eager(rows: int) -> None:
    module, ours = _Slices().double(), _Slices().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(module.state_dict())
    x, dy = torch.randn(rows, 216, dtype=torch.float64), torch.randn(rows, 216, dtype=torch.float64)
    given = x.clone().requires_grad_()
    add_tvm_dispatch(ours, given, on_fallback="raise")
    ours(given).backward(dy)
    x.requires_grad_()
    module(x).backward(dy)
    torch.testing.assert_close(given.grad, x.grad, rtol=1e-10, atol=1e-12)
    for found, expected in zip(ours.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)


def test_equal_functions_are_merged_and_scheduled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 24)
    first, _ = _merged(_fused(_norm, x))
    scheduled = schedule_for_cpu(first, target())

    def refuse(*given: Any) -> Any:
        raise AssertionError("made again")

    with monkeypatch.context() as patched:
        patched.setattr(merge_kernels, "merged", refuse)
        patched.setattr(schedules, "_scheduled", refuse)
        again, _ = _merged(_fused(_norm, x))
        assert tvm_ffi.structural_equal(schedule_for_cpu(again, target()), scheduled)
        with pytest.raises(AssertionError, match="made again"):  # other sizes
            _merged(_fused(_norm, torch.randn(6, 24)))
        with recorded_decisions(), pytest.raises(AssertionError, match="made again"):
            schedule_for_cpu(again, target())
        with recorded_decisions(), pytest.raises(AssertionError, match="made again"):
            _merged(_fused(_norm, x))


@pytest.mark.parametrize("length", [3, 400])
def test_a_kernel_is_compared_with_a_limited_number_of_nodes(length: int) -> None:
    line, callee = merge_kernels._Line(), tvm.ir.GlobalVar("kernel")
    made = [relax.Var(f"v{i}", relax.TensorType((4,), "float32")) for i in range(length + 3)]

    def call(read: relax.Var, result: relax.Var) -> TirCall:
        return TirCall(callee, (read,), (result,), None)

    line.extend(call(made[i], made[i + 1]) for i in range(length))
    besides = line.readers([made[1]], call(made[1], made[-1]))
    assert line.readers([made[1]], call(made[length], made[-1])) is None
    if length > merge_kernels._MOST_MOVED:
        assert besides is None
    else:
        assert list(besides or ()) == list(range(1, length))
        line.take_out(besides or ())
        assert line.readers([made[1]], call(made[1], made[-1])) == {}
        assert line.left() == [line.nodes[0]]
