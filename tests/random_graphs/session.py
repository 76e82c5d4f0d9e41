"""Call a module several times in eager PyTorch and through TVM, and compare after each call."""

from __future__ import annotations

import time

import torch

import tvmbridge
from tests.architectures.compare import Tolerance, difference
from tests.device import generators
from tests.random_graphs.outcome import Outcome, text_of
from tests.random_graphs.program import Call, Program
from tests.random_graphs.running import (
    SEED,
    Found,
    Raised,
    can_be_made,
    executed,
    leaves_of,
    mode_of,
    run,
    state_of,
)
from tvmbridge.core.errors import BridgeError

# Tolerance by the least precise dtype of a program.
ROUNDING = {"float64": 1e-9, "float32": 5e-4, "float16": 0.05, "bfloat16": 0.2}


def check_calls(program: Program) -> Outcome:
    """Make the calls of ``program`` both ways, and dispatch the module before the first call."""
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
    """Whether eager PyTorch can make the first call of a program."""
    module, call = program.build().train(program.calls[0].training), program.calls[0]
    try:
        run(module, program, call)
    except Raised:
        return False
    return can_be_made(module, program, call)


class _Changed(Exception):
    """The dispatch changed the state of the module or of a generator."""


class _Session:
    """Two modules of one program: ``theirs`` runs in eager PyTorch, ``ours`` is dispatched."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.theirs, self.ours = program.build(), program.build()
        self.tolerance = _tolerance(program)

    @property
    def joint(self) -> str:
        """Return the source of compiled code's joint function; empty if there is none."""
        try:
            report = tvmbridge.dispatch_report(self.ours)
        except ValueError:
            return ""
        return next((s.joint for s in report.specializations if s.joint), "")

    def served(self) -> tuple[str, str]:
        """Return *right* if compiled code served a call, else *refused* with the reason.

        The caller has found no difference.
        """
        report = tvmbridge.dispatch_report(self.ours)
        if report.tvm_calls:
            return "right", ""
        return "refused", f"fell back: {next(iter(report.fallbacks), '')}"

    def step(self, number: int, call: Call) -> tuple[str, str]:
        """Make one call both ways; return result and reason if the session ends, else ``""``."""
        if not can_be_made(self.theirs, self.program, call):
            return ("", "") if number else ("invalid", "no arguments")
        ended = self._before(call)
        if ended:
            return "wrong", ended
        try:
            expected = run(self.theirs, self.program, call)
            raised = None
        except Raised as error:
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
            found = run(self.ours, self.program, call)
        except Raised as error:
            if isinstance(error.error, BridgeError):
                return "refused", str(error)
            if raised is None:
                return ("stopped", "") if error.is_of_eager_alone else ("wrong", f"raises {error}")
            return self._compared(error.found, expected) or ("stopped", str(raised))
        if raised is not None:
            return (
                ("stopped", "")
                if raised.is_of_eager_alone
                else ("wrong", f"does not raise {raised}")
            )
        raised_after = expected.get("after", {}).get("raised", [None])
        if all(raised_after) and raised_after != found["after"]["raised"]:
            # Autograd forbids more writes to views; compiled code may return a tensor that is none.
            return "stopped", ""
        return self._compared(found, expected) or ("", refusal)

    def _compared(self, found: Found, expected: Found) -> tuple[str, str] | None:
        # Compiled code may return a dense tensor where eager PyTorch's result has gaps.
        pairs = zip(found.get("strides", ()), expected.get("strides", ()), strict=False)
        found["strides"] = [None if b is None else a for a, b in pairs]
        for what in expected:
            departure = difference(found.get(what), expected[what], self.tolerance)
            if departure:
                return "wrong", f"{what}{departure}"
        return None

    def _before(self, call: Call) -> str:
        for text in call.before:
            self.theirs, expected = executed(text, self.theirs)
            self.ours, raised = executed(text, self.ours)
            if (raised is None) != (expected is None):
                return f"{text} raises {raised or 'nothing'} instead of {expected or 'nothing'}"
        for module in (self.theirs, self.ours):
            if module.training != call.training:
                module.train(call.training)
        return ""

    def _dispatch(self, call: Call) -> None:
        """Dispatch the module with a sample like the call's arguments, but with other values.

        Raises:
            _Changed: the dispatch changed the module's state or a generator.
        """
        sample = call.given(leaves_of(self.ours, self.program, call.seed + 100))
        state = state_of(self.ours)
        torch.manual_seed(SEED)
        state["generators"] = generators()
        options = dict(self.program.options)
        try:
            with mode_of(call):
                tvmbridge.add_tvm_dispatch(self.ours, tuple(sample), options=options)
        finally:
            now = {**state_of(self.ours), "generators": generators()}
            departure = difference(now, state, self.tolerance)
            if departure:
                raise _Changed(f"dispatch changed {departure}")


def _tolerance(program: Program) -> Tolerance:
    narrowest = program.dtype
    said = (text for call in program.calls for text in (*call.arguments, *call.before))
    text = program.source() + " ".join(said)
    for word, dtype in (("float()", "float32"), ("half", "float16"), ("bfloat16", "bfloat16")):
        if word in text and ROUNDING[dtype] > ROUNDING[narrowest]:
            narrowest = dtype
    bound = ROUNDING[narrowest]
    return Tolerance(bound, bound, bound)
