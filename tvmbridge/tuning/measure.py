"""Compile, check and time scheduled functions; this module runs in a worker process.

Loops run on PyTorch's threads, as they do in compiled modules.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import Target

from tvmbridge.compiler.argument_checks import UNCHECKED
from tvmbridge.compiler.build import COMPILER_CONFIG
from tvmbridge.legalize.fences import fence_arithmetic
from tvmbridge.records.allowed import scheduled_by
from tvmbridge.schedules import schedule_function
from tvmbridge.schedules.exact_indices import with_exact_indices
from tvmbridge.schedules.threads import share_torch_threads

_REPEATS = 5
_REPEAT_SECONDS = 0.01
_RACE_ROUNDS = 12
_GIVE_UP = 10.0  # slower than this multiple of the rule's time, a candidate is timed only once


class WrongResultError(Exception):
    """A candidate's results differ from the results of the kernel without a record."""


@dataclass
class _Bench:
    """The task that this process measures.

    - ``mod``: the module with the unscheduled function ``main``.
    - ``target``: the target that kernels are compiled for.
    - ``rule``: the kernel by rule, which is used without a record.
    - ``inputs``: several lists of arguments.
    - ``expected``: the results of the rule's kernel for each list of arguments.
    - ``writable``: the positions of the parameters that the function writes.
    - ``seconds``: the time of the rule's kernel.
    """

    mod: tvm.IRModule
    target: Target
    rule: Callable[..., None]
    inputs: list[list[torch.Tensor]]
    expected: list[list[torch.Tensor]]
    writable: list[int]
    seconds: float


_bench: _Bench | None = None


def set_up(module: str, target: str) -> list[float]:
    """Prepare to measure schedules of a function; return the times of its kernel by rule.

    The kernel by rule is the function as tvmbridge schedules it without a tuning record.
    """
    global _bench
    torch.set_grad_enabled(False)
    share_torch_threads()
    fence_arithmetic()
    resolved = Target(target)
    mod = tvm.ir.load_json(module)
    function = mod["main"]
    inputs = sample_inputs(buffer_types(function))
    with resolved:
        scheduled = schedule_function(function, resolved)
    rule = _compile(function if scheduled is None else scheduled, resolved)
    writable = _written(function)
    expected = [_run(rule, tensors, writable) for tensors in inputs]
    _bench = _Bench(mod, resolved, rule, inputs, expected, writable, math.inf)
    seconds = _time(rule, inputs[0], math.inf)
    _bench.seconds = min(seconds)
    return seconds


def measure(module: str) -> list[float]:
    """Check a scheduled function, and return several measured times of a call, in seconds.

    Raises:
        WrongResultError: the results differ from those of the rule's kernel.
    """
    bench = _prepared()
    kernel = _checked(tvm.ir.load_json(module)["main"], bench)
    return _time(kernel, bench.inputs[0], _GIVE_UP * bench.seconds)


def race(traces: Sequence[Any]) -> list[float | None]:
    """Time the kernel by rule and the kernel of each trace in turns; return their shortest times.

    The traces are applied as in compilation. The time is None if a kernel's results are wrong or it
    does not compile.
    """
    bench = _prepared()
    kernels: list[Callable[..., None] | None] = [bench.rule]
    for trace in traces:
        try:
            kernels.append(_checked(scheduled_by(bench.mod, trace).mod["main"], bench))
        except Exception:
            kernels.append(None)
    best = [math.inf] * len(kernels)
    for _ in range(_RACE_ROUNDS):
        for i, kernel in enumerate(kernels):
            if kernel is not None:
                best[i] = min(best[i], *_time(kernel, bench.inputs[0], math.inf, repeats=2))
    return [None if math.isinf(seconds) else seconds for seconds in best]


def _prepared() -> _Bench:
    if _bench is None:
        raise RuntimeError("set_up was not called in this process")
    return _bench


def _compile(function: tirx.PrimFunc, target: Target) -> Callable[..., None]:
    main = function.with_attr("global_symbol", "main")
    with tvm.transform.PassContext(config=COMPILER_CONFIG):
        mod = with_exact_indices(tvm.IRModule({"main": main}))
        return tvm.tirx.build(mod, target=target, pipeline=UNCHECKED)["main"]


def _written(function: tirx.PrimFunc) -> list[int]:
    """Return the positions of the parameters that the function writes."""
    root = function.body.block
    buffers = {region.buffer for region in root.writes}
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(function.body, (tirx.BufferStore, stores.append))
    buffers |= {store.buffer for store in stores}
    return [i for i, param in enumerate(function.params) if param in buffers]


def _run(
    kernel: Callable[..., None], tensors: Sequence[torch.Tensor], writable: Sequence[int]
) -> list[torch.Tensor]:
    """Call the kernel, and return its results in new memory that was filled with wrong values.

    A kernel that leaves elements unwritten is found by these values.
    """
    args = list(tensors)
    for i in writable:
        args[i] = _garbage(tensors[i])
    kernel(*args)
    return [args[i] for i in writable]


def _garbage(like: torch.Tensor) -> torch.Tensor:
    if like.dtype.is_floating_point:
        return torch.full_like(like, math.nan)
    return torch.ones_like(like) if like.dtype is torch.bool else torch.full_like(like, 77)


def _checked(function: tirx.PrimFunc, bench: _Bench) -> Callable[..., None]:
    kernel = _compile(function, bench.target)
    for tensors, expected in zip(bench.inputs, bench.expected, strict=True):
        results = _run(kernel, tensors, bench.writable)
        for result, wanted in zip(results, expected, strict=True):
            reason = disagreement(result, wanted)
            if reason is not None:
                raise WrongResultError(reason)
    return kernel


def _time(
    kernel: Callable[..., None], args: Sequence[torch.Tensor], limit: float, repeats: int = _REPEATS
) -> list[float]:
    """Return the mean time of a call in each repeat, or one time if it is above ``limit``."""
    kernel(*args)
    start = time.perf_counter()
    kernel(*args)
    once = time.perf_counter() - start
    if once > limit:
        return [once]
    number = max(1, min(10_000, int(_REPEAT_SECONDS / max(once, 1e-7))))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(number):
            kernel(*args)
        seconds.append((time.perf_counter() - start) / number)
    return seconds


# Tolerances relative to the element, and to the largest element of the tensor. Sums in another
# order differ by a few rounding errors; a wrong index differs by the value itself.
_TOLERANCES = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (2e-2, 1e-2),
    torch.bfloat16: (4e-2, 2e-2),
}
# One special value per this many elements, so that most rows have none.
_SPARSE = 2048


def buffer_types(function: tirx.PrimFunc) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each parameter of ``function``.

    Raises:
        ValueError: a parameter is no tensor, has a dtype that PyTorch lacks, or a symbolic shape.
    """
    types = []
    for param in function.params:
        if not tirx.is_buffer_var(param):
            raise ValueError("a parameter is not a tensor")
        dtype = getattr(torch, str(param.dtype), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"there are no tensors of {param.dtype}")
        if not all(isinstance(d, tirx.IntImm) for d in param.shape):
            raise ValueError("a shape is not constant")
        types.append((tuple(int(d) for d in param.shape), dtype))
    return types


def sample_inputs(
    types: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> list[list[torch.Tensor]]:
    """Return three lists of tensors: of both signs, positive, and with NaN, infinities and zeros.

    Integers may be indices into any tensor, so they are below the smallest dimension.
    """
    generator = torch.Generator().manual_seed(20)
    bound = min((d for shape, _ in types for d in shape), default=1)
    sets = []
    for kind in range(3):
        tensors = []
        for shape, dtype in types:
            if not dtype.is_floating_point:
                high = 2 if dtype is torch.bool else max(1, bound)
                tensor = torch.randint(0, high, shape, generator=generator)
            else:
                tensor = torch.randn(shape, generator=generator)
                tensor = tensor.abs() + 0.1 if kind == 1 else tensor
                tensor = _with_specials(tensor, generator) if kind == 2 else tensor
            tensors.append(tensor.to(dtype))
        sets.append(tensors)
    return sets


def _with_specials(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    flat = tensor.reshape(-1)
    if flat.numel() < 8:
        return tensor
    for value in (math.nan, math.inf, -math.inf, 0.0, -0.0):
        count = max(1, flat.numel() // _SPARSE)
        flat[torch.randint(0, flat.numel(), (count,), generator=generator)] = value
    return tensor


def disagreement(result: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return how ``result`` differs from ``expected``; None if only within the tolerances."""
    relative, absolute = _TOLERANCES.get(expected.dtype, (0.0, 0.0))
    finite = expected[expected.isfinite()].double()
    scale = float(finite.abs().max()) if len(finite) else 0.0
    try:
        torch.testing.assert_close(
            result, expected, rtol=relative, atol=absolute * scale, equal_nan=True
        )
    except AssertionError as error:
        return str(error)
    return None
