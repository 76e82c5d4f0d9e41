"""Run a program in eager PyTorch and through TVM, and compare."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tvmbridge
from tests.architectures.compare import Tolerance, difference, leaves, magnitude
from tests.device import DEVICE, generators
from tests.random_graphs.outcome import Outcome, text_of
from tests.random_graphs.program import Drawn, Program
from tests.random_graphs.running import SEED
from tests.random_graphs.session import check_calls, starts
from tvmbridge.core.errors import BridgeError

# Rounding error that a line may add, in units in the last place of the largest value.
UNITS = 2000.0
Found = dict[str, Any]
# On GPUs PyTorch computes the factor 1/6 of hardswish in float32, even for float64.
_ROUGH_ON_GPUS = ("hardswish",)


def is_valid(program: Program) -> bool:
    """Whether eager PyTorch runs the program, backward included.

    For a program with calls, only the first call is tried.
    """
    if program.calls:
        return starts(program)
    try:
        for training in (True, False):
            _run(program.build().train(training), program.inputs(), gradients=training)
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def check(program: Program) -> Outcome:
    """Run a program both ways and compare: its calls, if it has any.

    Otherwise run forward and backward in train mode, and forward in eval mode.
    """
    if program.calls:
        return check_calls(program)
    start = time.perf_counter()
    if not is_valid(program):
        return Outcome("invalid")
    if DEVICE != "cpu" and any(name in program.source() for name in _ROUGH_ON_GPUS):
        return Outcome("invalid", "PyTorch's own kernel rounds to float32 on the way")
    joint = ""
    for training in (True, False):
        name = "train" if training else "eval"
        try:
            found, joint_here = _dispatched(program, training)
        except BridgeError as error:
            return Outcome("refused", f"{name}: {text_of(error)}", joint, _since(start))
        except Exception as error:
            return Outcome("error", f"{name}: {text_of(error)}", joint, _since(start))
        joint = joint or joint_here
        if isinstance(found, str):
            return Outcome("refused", f"{name}: fell back: {found}", joint, _since(start))
        expected = _run(program.build().train(training), program.inputs(), gradients=training)
        try:
            tolerance = _tolerance(program, expected, training)
        except Exception:
            return Outcome("invalid", "it cannot be run in float64, to be judged by")
        for what in expected:
            departure = difference(found[what], expected[what], tolerance)
            if departure:
                result = "overflown" if _overflows(program, training) else "wrong"
                return Outcome(result, f"{name}: {what}{departure}", joint, _since(start))
    return Outcome("right", "", joint, _since(start))


def _overflows(program: Program, training: bool) -> bool:
    """Whether an intermediate result is finite, but its square overflows in the program's dtype.

    The result after an overflow depends on how a kernel sums: a variance is infinite or NaN. In
    eager PyTorch it depends on the machine's vectors and on the element's position in a row.
    """
    module, inputs = program.build().train(training), program.inputs()
    with _Largest() as largest:
        _run(module, inputs, gradients=training)
    return largest.value > torch.finfo(getattr(torch, program.dtype)).max ** 0.5


def _since(start: float) -> float:
    return time.perf_counter() - start


def _dispatched(program: Program, training: bool) -> tuple[Found | str, str]:
    """Return the values of compiled code, and the source of the joint function.

    If compiled code did not serve the call, the reason takes the place of the values. The sample
    of the dispatch has other values than the call.
    """
    module = program.build().train(training)
    with torch.set_grad_enabled(training):
        sample = tuple(program.inputs(seed=1))
        tvmbridge.add_tvm_dispatch(module, sample, options=dict(program.options))
    found = _run(module, program.inputs(), gradients=training)
    report = tvmbridge.dispatch_report(module)
    return next(iter(report.fallbacks), found), report.specializations[-1].joint or ""


class _Largest(TorchDispatchMode):
    """A mode that records in ``value`` the largest finite number that an operator returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in pytree.tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                self.value = max(self.value, magnitude(result))
        return results


def _run(
    module: Drawn,
    inputs: list[torch.Tensor],
    *,
    gradients: bool,
    during_backward: AbstractContextManager[object] | None = None,
) -> Found:
    """Run a module; return its results, which of them are arguments, its state, and gradients."""
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(gradients):
        results = module(*inputs)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = {"buffers": buffers, "generators": generators()}
    tensors = [leaf for _, leaf in leaves(results) if isinstance(leaf, torch.Tensor)]
    passed = [[a is b for b in inputs] for a in tensors]
    # ``requires_grad`` is recorded only below: under no_grad, eager views of inputs may have it.
    found = {"results": _detached(results), "state": state, "passed": passed}
    if not gradients:
        return found
    wanted = list({id(t): t for t in tensors if t.requires_grad}.values())
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in wanted]
    kept = {"needs": [t.requires_grad for t in tensors]}
    if wanted:
        with during_backward or nullcontext():
            torch.autograd.backward(wanted, cotangents)
    grads = [x.grad for x in inputs], {name: p.grad for name, p in module.named_parameters()}
    return {**found, **kept, "gradients": grads}


def _detached(results: Any) -> Any:
    if isinstance(results, torch.Tensor):
        return results.detach().clone()
    if isinstance(results, dict):
        return {key: _detached(value) for key, value in results.items()}
    return type(results)(_detached(value) for value in results)


def _tolerance(program: Program, expected: Found, training: bool) -> Tolerance:
    """Return a tolerance that grows with the number of lines; in float32 also with eager's error.

    Gradients that are zero by cancellation have the rounding error of the terms that cancel. The
    absolute tolerance therefore depends on the largest value in backward.
    """
    epsilon = torch.finfo(getattr(torch, program.dtype)).eps
    module = program.build(torch.float64).train(training)
    given, largest_on_the_way = program.inputs(dtype=torch.float64), _Largest()
    exact = _run(module, given, gradients=training, during_backward=largest_on_the_way)
    rounding = 8 * epsilon * len(program.lines)
    absolute = rounding * largest_on_the_way.value
    if program.dtype != "float32":
        bound = UNITS * epsilon * len(program.lines)
        return Tolerance(bound, bound, absolute)
    errors, largest = [0.0], 0.0
    for what in expected:
        pairs = zip(leaves(expected[what]), leaves(exact[what]), strict=False)
        for (_, a), (_, b) in pairs:
            if isinstance(b, torch.Tensor) and b.is_floating_point() and b.numel():
                off = (a.detach().double() - b.detach().double()).abs()
                errors.append(magnitude(off))
                largest = max(largest, magnitude(b))
    own = 8 * max(errors) / largest if largest else 0.0
    return Tolerance(rounding, rounding + min(own, 1e-3), absolute)
