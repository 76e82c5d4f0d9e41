"""A module called several times, in eager PyTorch and through TVM, compared after each call."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

import tvmbridge
from tests.architectures.compare import Tolerance, difference
from tests.random_graphs.outcome import Outcome, text_of
from tests.random_graphs.program import NAMES, Call, Program
from tests.random_graphs.tensors import detached, order, sharing, tensors_in
from tvmbridge.errors import BridgeError

SEED = 2
# What rounding may do to values of a size, by the dtype that rounds the most.
ROUNDING = {"float64": 1e-9, "float32": 5e-4, "float16": 0.05, "bfloat16": 0.2}
Found = dict[str, Any]


def check_calls(program: Program) -> Outcome:
    """Make the calls of ``program`` both ways, the first one with a dispatch before it."""
    start = time.perf_counter()
    session = _Session(program)
    result, reason = "", ""
    for number, call in enumerate(program.calls):
        try:
            result, reason = session.step(number, call)
        except BridgeError as error:
            result, reason = "refused", text_of(error)
        if result:
            reason = f"call {number}: {reason}"
            break
    if result in ("", "stopped"):
        result, reason = session.served()
    return Outcome(result, reason, session.joint, time.perf_counter() - start)


def starts(program: Program) -> bool:
    """Whether eager PyTorch makes the first call."""
    module, call = program.build().train(program.calls[0].training), program.calls[0]
    try:
        _run(module, program, call)
    except _Raised:
        return False
    return _can_be_made(module, program, call)


class _Changed(Exception):
    """The dispatch has left something changed."""


class _Raised(Exception):
    """What the module raised, of which ``found`` is known nevertheless."""

    def __init__(self, error: Exception, found: Found) -> None:
        super().__init__(text_of(error))
        self.error, self.found = error, found

    @property
    def is_of_version(self) -> bool:
        """Whether backward found that what it reads was written after forward.

        Compiled code may read something else in backward than eager PyTorch does.
        """
        modified = "modified by an inplace operation" in str(self.error)
        return modified and self.found["stage"] == "backward" and "after" in self.found


class _Session:
    """Two modules of one program, the second of which is dispatched."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.theirs, self.ours = program.build(), program.build()
        self.tolerance = _tolerance(program)

    @property
    def joint(self) -> str:
        """Where the joint function of compiled code came from."""
        try:
            report = tvmbridge.dispatch_report(self.ours)
        except ValueError:
            return ""
        return next((s.joint for s in report.specializations if s.joint), "")

    def served(self) -> tuple[str, str]:
        """The outcome of a session without a difference: was compiled code used?"""
        report = tvmbridge.dispatch_report(self.ours)
        if report.tvm_calls:
            return "right", ""
        return "refused", f"fell back: {next(iter(report.fallbacks), '')}"

    def step(self, number: int, call: Call) -> tuple[str, str]:
        """One call; result and reason where the session ends with it, else empty text."""
        if not _can_be_made(self.theirs, self.program, call):
            return ("", "") if number else ("invalid", "no arguments")
        ended = self._before(call)
        if ended:
            return "wrong", ended
        try:
            expected = _run(self.theirs, self.program, call)
            raised = None
        except _Raised as error:
            expected, raised = error.found, error
        if raised and not number:
            return "invalid", str(raised)
        refusal = ""
        if call.dispatched or not number:
            try:
                self._dispatch(call)
            except BridgeError as error:
                if not number:
                    return "refused", text_of(error)
                refusal = text_of(error)
            except _Changed as error:
                return "wrong", str(error)
            except Exception as error:
                if raised is None:
                    return "error", f"dispatch: {text_of(error)}"
        try:
            found = _run(self.ours, self.program, call)
        except _Raised as error:
            if isinstance(error.error, BridgeError):
                return "refused", str(error)
            if raised is None:
                return ("stopped", "") if error.is_of_version else ("wrong", f"raises {error}")
            return self._compared(error.found, expected) or ("stopped", str(raised))
        if raised is not None:
            return (
                ("stopped", "") if raised.is_of_version else ("wrong", f"does not raise {raised}")
            )
        raised_after = expected.get("after", {}).get("raised", [None])
        if all(raised_after) and raised_after != found["after"]["raised"]:
            # Autograd forbids more of what is a view; of compiled code it may be none.
            return "stopped", ""
        return self._compared(found, expected) or ("", refusal)

    def _compared(self, found: Found, expected: Found) -> tuple[str, str] | None:
        # Results whose elements do not lie side by side in eager PyTorch may be dense.
        pairs = zip(found.get("strides", ()), expected.get("strides", ()), strict=False)
        found["strides"] = [None if b is None else a for a, b in pairs]
        for what in expected:
            departure = difference(found.get(what), expected[what], self.tolerance)
            if departure:
                return "wrong", f"{what}{departure}"
        return None

    def _before(self, call: Call) -> str:
        for text in call.before:
            self.theirs, expected = _executed(text, self.theirs)
            self.ours, raised = _executed(text, self.ours)
            if (raised is None) != (expected is None):
                return f"{text} raises {raised or 'nothing'} instead of {expected or 'nothing'}"
        for module in (self.theirs, self.ours):
            if module.training != call.training:
                module.train(call.training)
        return ""

    def _dispatch(self, call: Call) -> None:
        """Tell the dispatch of the call's arguments, with other values; nothing else changes."""
        sample = call.given(_leaves(self.ours, self.program, call.seed + 100))
        state = _state(self.ours)
        torch.manual_seed(SEED)
        state["generator"] = torch.get_rng_state()
        options = dict(self.program.options)
        try:
            with _mode(call):
                tvmbridge.add_tvm_dispatch(self.ours, tuple(sample), options=options)
        finally:
            now = {**_state(self.ours), "generator": torch.get_rng_state()}
            departure = difference(now, state, self.tolerance)
            if departure:
                raise _Changed(f"dispatch changed {departure}")


def _can_be_made(module: nn.Module, program: Program, call: Call) -> bool:
    try:
        call.given(_leaves(module, program, call.seed))
    except Exception:
        return False
    return True


def _executed(text: str, module: nn.Module, **names: Any) -> tuple[nn.Module, Exception | None]:
    """Run a statement; the module, which may be another one then, and what was raised."""
    torch.manual_seed(SEED)
    scope = {**NAMES, **names, "module": module}
    try:
        exec(text, scope)
    except Exception as error:
        return module, error
    return scope["module"], None


def _mode(call: Call) -> AbstractContextManager[object]:
    if call.gradients == "inference":
        return torch.inference_mode()
    return torch.set_grad_enabled(call.gradients == "grad")


def _leaves(module: nn.Module, program: Program, seed: int) -> dict[str, Any]:
    return {**program.tensors(seed), "self": module}


def _state(module: nn.Module) -> Found:
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    needs = [p.requires_grad for p in module.parameters()]
    flags = {name: m.training for name, m in module.named_modules()}
    return {"parameters": parameters, "buffers": buffers, "needs": needs, "flags": flags}


def _run(module: nn.Module, program: Program, call: Call) -> Found:
    """What a call and its backward give and change.

    Raises:
        _Raised: the module raised, or backward did.
    """
    leaves = _leaves(module, program, call.seed)
    given = call.given(leaves)
    found: Found = {}
    torch.manual_seed(SEED)
    try:
        with _mode(call):
            results = [module(*given) for _ in range(1 + call.twice)]
    except Exception as error:
        raise _Raised(error, {**_afterwards(module, given), "stage": "forward"}) from error
    found.update(_told(results, given, module), **_afterwards(module, given))
    if call.after:
        found["after"] = _between(results, given, module, call)
    # Inference tensors cannot take part in autograd.
    if call.gradients == "grad":
        wanted = _wanted(results, call)
        try:
            _backward(wanted)
        except Exception as error:
            raise _Raised(error, {**found, "stage": "backward"}) from error
        found["gradients"] = _gradients(module, leaves, given)
        found["generator after backward"] = torch.get_rng_state()
    return {**found, "stage": "end"}


def _told(results: Any, given: list[Any], module: nn.Module) -> Found:
    tensors = tensors_in(results)
    others = [*tensors_in(given), *module.parameters(), *module.buffers()]
    return {
        "results": detached(results),
        "needs": [(t.requires_grad, t.is_leaf, t.is_inference()) for t in tensors],
        "strides": [order(t) for t in tensors],
        "sharing": sharing(tensors, others),
    }


def _afterwards(module: nn.Module, given: list[Any]) -> Found:
    arguments = tensors_in(given)
    return {
        "arguments": detached(given),
        "lying": [order(t) for t in arguments],
        "written": [not t.is_inference() and t._version > 0 for t in arguments],
        "state": _state(module),
        "attributes": {k: v for k, v in vars(module).items() if k[0] in "ak" and len(k) == 2},
        "generator": torch.get_rng_state(),
    }


def _between(results: Any, given: list[Any], module: nn.Module, call: Call) -> Found:
    """What statements between forward and backward raise, and what the results are then."""
    names = {"made": tensors_in(results), "given": tensors_in(given)}
    errors = [_executed(text, module, **names)[1] for text in call.after]
    raised = [None if error is None else type(error).__name__ for error in errors]
    return {"raised": raised, "results": detached(results), **_afterwards(module, given)}


def _wanted(results: Any, call: Call) -> list[torch.Tensor]:
    tensors = tensors_in(results)
    chosen = [t for n, t in enumerate(tensors) if call.used is None or n in call.used]
    return list({id(t): t for t in chosen if t.requires_grad}.values())


def _backward(wanted: list[torch.Tensor]) -> None:
    if not wanted:
        return
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in wanted]
    torch.autograd.backward(wanted, cotangents)


def _gradients(module: nn.Module, leaves: dict[str, Any], given: list[Any]) -> Found:
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    of_arguments = [t.grad for t in tensors_in(given) if t.is_leaf]
    of_parameters = {name: p.grad for name, p in module.named_parameters()}
    kept = {
        "leaves": {name: leaf.grad for name, leaf in tensors.items()},
        "arguments": of_arguments,
        "parameters": of_parameters,
    }
    return {name: detached(value) for name, value in kept.items()}


def _tolerance(program: Program) -> Tolerance:
    narrowest = program.dtype
    text = program.source() + " ".join(a for call in program.calls for a in call.arguments)
    for word, dtype in (("float()", "float32"), ("half", "float16"), ("bfloat16", "bfloat16")):
        if word in text and ROUNDING[dtype] > ROUNDING[narrowest]:
            narrowest = dtype
    bound = ROUNDING[narrowest]
    return Tolerance(bound, bound, bound)
