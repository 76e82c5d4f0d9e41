"""A program in eager PyTorch and through TVM, compared."""

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

# Rounding that a line may add, in units of the last place of the largest value around.
UNITS = 2000.0
Found = dict[str, Any]
# A sixth of it is float32's in float64 too.
_ROUGH_ON_GPUS = ("hardswish",)


def is_valid(program: Program) -> bool:
    """Whether eager PyTorch runs it, backward included; of several calls the first one."""
    if program.calls:
        return starts(program)
    try:
        for training in (True, False):
            _run(program.build().train(training), program.inputs(), gradients=training)
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def check(program: Program) -> Outcome:
    """Run forward and backward in train mode, and forward in eval mode, both ways; or the calls
    that the program comes with."""
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
    """Whether there are finite numbers on the way whose squares are none in the program's dtype.

    What then becomes of them depends on how a kernel adds: in eager PyTorch, on the machine's
    vectors and on the place in a row (a variance is infinite, or NaN).
    """
    module, inputs = program.build().train(training), program.inputs()
    with _Largest() as largest:
        _run(module, inputs, gradients=training)
    return largest.value > torch.finfo(getattr(torch, program.dtype)).max ** 0.5


def _since(start: float) -> float:
    return time.perf_counter() - start


def _dispatched(program: Program, training: bool) -> tuple[Found | str, str]:
    """What compiled code gives (or why it did not serve the call), and the joint source.

    The sample has other values than the call.
    """
    module = program.build().train(training)
    with torch.set_grad_enabled(training):
        sample = tuple(program.inputs(seed=1))
        tvmbridge.add_tvm_dispatch(module, sample, options=dict(program.options))
    found = _run(module, program.inputs(), gradients=training)
    report = tvmbridge.dispatch_report(module)
    return next(iter(report.fallbacks), found), report.specializations[-1].joint or ""


class _Largest(TorchDispatchMode):
    """Within it the largest finite number that an operator gives is kept as ``value``."""

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
    """Results, which of them are arguments, state afterwards, and gradients."""
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(gradients):
        results = module(*inputs)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = {"buffers": buffers, "generators": generators()}
    tensors = [leaf for _, leaf in leaves(results) if isinstance(leaf, torch.Tensor)]
    passed = [[a is b for b in inputs] for a in tensors]
    # Views that eager PyTorch takes of its inputs may require gradients even under no_grad.
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
    """Rounding for as many lines; in float32 also what eager PyTorch's own results are off by.

    Where all gradients are zero by cancellation their rounding is that of what cancels.
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
