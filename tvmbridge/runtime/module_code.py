"""The compiled code of a dispatched module, which serves the calls that it fits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.arguments import Arguments
from tvmbridge.calls.surroundings import in_checkpoint
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.core.libraries import register_batches
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.recall import SharedPlans
from tvmbridge.runtime.background import COMPILING, Background
from tvmbridge.runtime.changing_attributes import ChangingAttributes
from tvmbridge.runtime.checks import Checks
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.entry_compiler import Compiler
from tvmbridge.runtime.executor import Executor, Served
from tvmbridge.runtime.fallbacks import Tally
from tvmbridge.runtime.guards.signature import nearest
from tvmbridge.runtime.native_aside import NativeCalls, native_aside
from tvmbridge.runtime.parts_trial import PartsTrials
from tvmbridge.runtime.pinning import renewed_path
from tvmbridge.runtime.policy import GivenCall, Policy, Unserved, Wanted
from tvmbridge.runtime.specialization import USES
from tvmbridge.runtime.specializations import Specializations
from tvmbridge.runtime.speed_trial import SpeedTrial, SpeedVerdict, only_if_faster_now
from tvmbridge.runtime.timed_path import AsidePath, ServingPath, TimedPath

# Sizes of code for any size are timed after this many calls: a trial of rare sizes costs more than
# it can gain.
_RESTS = 8
# Reasons that equal calls have for ever, unless the module is dispatched again.
_LASTING = (Kind.NO_PART, Kind.FAILED)


class ModuleCode(Executor):
    """Serves the calls of a module by compiled code.

    - ``kept``: the specialisations for signatures.
    - ``policy``: finds the code of a call, and decides which code a call may add.
    - ``background``: compiles in another process.
    - ``checker``: compares some calls with eager PyTorch; None: none.

    Args:
        own: the forward that was set on the instance; None if it has only that of its class.
    """

    removal = "remove_tvm_dispatch"

    def __init__(
        self,
        module: nn.Module,
        own: Callable[..., Any] | None,
        target: Any,
        options: CompileOptions,
        on_fallback: str = "warn",
    ) -> None:
        super().__init__(module, own, Tally(type(module).__name__, on_fallback))
        self.options = options
        self.kept = Specializations(options.max_specializations, self.paths)
        self.packing: ModulePacks = ModulePacks(module)
        self.background = Background(options)
        compiler = Compiler(
            module,
            own,
            target,
            options,
            self.packing,
            background=self.background,
            attributes=ChangingAttributes(module),
        )
        self.policy = Policy(compiler, self.kept)
        self.checker: Checks | None = None
        self.parts_trials = PartsTrials(self.tally.note_verdict)
        # The module's own forward would not keep to a memory budget, and two ranks may measure
        # different times.
        alike = options.memory_budget is None and not options.compiler_collectives
        self._times_calls = alike and only_if_faster_now(options.only_if_faster)

    def serve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool = False
    ) -> Served | Reason:
        """Serve a call; compile code for it first if it has none and may add it.

        Args:
            again: whether code was added for this call, which then adds no more.
        """
        policy, call = self.policy, GivenCall(args, kwargs, self.kept.known)
        policy.join_if_unhooked()
        if policy.cut.why is not None and not any(s.compiled() for s in policy.specializations()):
            return self._run_in_parts(args, kwargs)
        found = self._serve_by(call)
        if not isinstance(found, Unserved):
            return found
        if register_batches():
            return self.serve(args, kwargs, again)
        if policy.cut.why is not None:
            return self._run_in_parts(args, kwargs)
        why = found.reason or nearest(found.misfits)
        if not again:
            added, why = policy.add(call, found, why)
            if added:
                return self.serve(args, kwargs, again=True)
            if why is COMPILING:
                return why
        if (
            policy.cut_for_object(why)
            or policy.cut_for_texts(why)
            or policy.cut_for_numbers(call)
            or policy.cut_for_resized_state(found)
        ):
            return self._run_in_parts(args, kwargs)
        other = next((m for m in found.misfits if m.kind is Kind.SHAPE), None)
        limited = why is not None and why.kind in (Kind.FULL, Kind.CONSTANT)
        further = other or (why if limited else None)
        if further is not None and policy.cut_for_any_size(further):
            return self._run_in_parts(args, kwargs)
        if other is not None and not again and policy.turn_to_any_size():
            return self.serve(args, kwargs, again=True)
        if why is None:
            return Reason(Kind.FROZEN_COPY if self.options.freeze else Kind.NOT_COMPILED)
        why = policy.explained(why)
        return self._run_in_parts(args, kwargs) if policy.cut_for_object(why) else why

    def _serve_by(self, call: GivenCall) -> Served | Reason | Unserved:
        """Serve a call by known specialisations, or by one for any size.

        Return a reason if the module's own forward serves the call; no code is added then.
        """
        started, policy = time.perf_counter(), self.policy
        unserved = Unserved([])
        lacking: Wanted | None = None
        for specialization in policy.candidates(call, unserved.misfits):
            matched = specialization.signature.match(call.args, call.kwargs)
            if isinstance(matched, Reason):
                unserved.misfits.append(matched)
                continue
            mode = policy.mode(specialization, matched.leaves)
            if isinstance(mode, Reason):
                return mode
            wanted = Wanted(specialization, mode, matched)
            entry = specialization.chosen(mode, matched.leaves)
            if entry is None:
                lacking = lacking or wanted
                continue
            served = self._run(wanted, entry, started, unserved.misfits)
            if isinstance(served, Served):
                return served
            unserved = served
        if lacking is None:
            return unserved
        found = policy.compiled(lacking, f"the first in mode {lacking.mode}")
        if isinstance(found, CompiledEntry):
            return self._run(lacking, found, started, unserved.misfits)
        if found is not COMPILING and (
            policy.cut.why or policy.cut_for_any_size(found) or policy.cut_for_object(found)
        ):
            return self._run_in_parts(call.args, call.kwargs)
        return found

    def _run(
        self, wanted: Wanted, entry: CompiledEntry, started: float, misfits: list[Reason]
    ) -> Served | Unserved:
        """Serve a call by ``entry``, or by code that is compiled in its place.

        ``started`` is the ``time.perf_counter()`` at which the guards of the call began;
        ``misfits`` are the mismatches so far, for the result.
        """
        specialization, _, (leaves, arguments) = wanted
        tensors = entry.state.tensors()
        reason = entry.mismatch(leaves, tensors)
        settling = reason is not None and entry.awaits_first()
        if reason is not None:
            instead = self.policy.instead(wanted, entry)
            if isinstance(instead, Reason):
                return Unserved(misfits, replace(instead, settles=settling))
            if instead is not None:
                entry, tensors = instead, instead.state.tensors()
                reason = entry.mismatch(leaves, tensors)
        if reason is not None:
            return Unserved(misfits, replace(reason, settles=settling), None if settling else entry)
        specialization.last_use = next(USES)
        if self.checker is not None:
            return Served(self.checker.run(self.module, entry, leaves, tensors, arguments))
        run, trial = functools.partial(entry.run, leaves, tensors, arguments), None
        if self._times_calls and not in_checkpoint():
            trial = self._trial(wanted, entry)
        if trial is None:
            results = run()
        else:
            own = functools.partial(self.run_own, arguments)
            # Calls of many sizes pass these guards whichever side serves them.
            guards = time.perf_counter() - started if specialization.family is None else 0.0
            results = trial.serve(run, own, guards)
        self._remember(wanted, entry, trial)
        return Served(results)

    def _trial(self, wanted: Wanted, entry: CompiledEntry) -> SpeedTrial | None:
        """Return the speed trial of ``entry``; None if compiled code serves its calls untimed.

        Code for any size has a trial for each choice of sizes that calls repeat.
        """
        specialization, mode, _ = wanted
        if self.tally.on_fallback == "raise" or mode.deterministic:
            return None
        if entry.trial is None:
            what = f"{mode} {specialization.signature}"
            of_one_size = specialization.family is None
            entry.trial = SpeedTrial(
                entry.question if of_one_size else None,
                entry.compiled.captured.device,
                functools.partial(self._conclude, what, entry),
                trains=mode.training and entry.training is not None,
                rests=0 if of_one_size else _RESTS,
            )
        return entry.trial

    def _conclude(self, what: str, entry: CompiledEntry, verdict: SpeedVerdict) -> None:
        """Take the verdict of a speed trial of ``entry``; ``what`` describes its calls."""
        self.tally.note_verdict(what, verdict)
        if verdict.pays:
            self.paths.end_timing(entry)

    def _remember(self, wanted: Wanted, entry: CompiledEntry, trial: SpeedTrial | None) -> None:
        """Give ``entry`` a fast path, if it can have one, and check that path first from now on."""
        specialization, mode, (leaves, _) = wanted
        signature = specialization.signature
        path: ServingPath | None
        if trial is not None and trial.steps_aside:
            path = AsidePath(entry, trial, self.run_own, signature, leaves)
        else:
            path = fast = renewed_path(entry, signature, leaves)
            if fast is not None and trial is not None and trial.verdict is None:
                path = TimedPath(fast, trial, self.run_own)
        if path is not None and self.policy.mode(specialization, leaves) == mode:
            self.paths.put_first(path, specialization)

    def _run_in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Served | Reason:
        """Serve a call by the compiled parts of the module, with eager PyTorch between them."""
        reason = self.policy.cut.refusal(args, kwargs)
        if reason is not None:
            return reason
        trial = self._parts_trial(args, kwargs)
        if trial is None:
            return Served(self._call_of_parts(args, kwargs, None))
        own = functools.partial(self.run_own, (args, kwargs))
        results = trial.serve(functools.partial(self._call_of_parts, args, kwargs, trial), own)
        if trial.steps_aside and not self.policy.cut.of_hooks:
            self._pass_on((args, kwargs), trial.passed_on, of_any_size=True)
        return Served(results)

    def _call_of_parts(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], trial: SpeedTrial | None
    ) -> Any:
        """Return the results of a call in parts; a call that compiles a part is not timed."""
        cut = self.policy.cut
        made = 0 if cut.parts is None else cut.parts.made
        results, unserved = cut.run(self, args, kwargs)
        if unserved is not None:
            self.tally.note(unserved)
        self.policy.retry_if_settled()
        if trial is not None and (cut.parts is None or cut.parts.made != made):
            self.parts_trials.begin_anew(trial)
        return results

    def _parts_trial(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SpeedTrial | None:
        """Return the speed trial of a call in parts; None if it is not timed."""
        timed = self._times_calls and self.checker is None and self.tally.on_fallback != "raise"
        if not timed or self.policy.cut.of_regions:  # each block has trials of its own
            return None
        return self.parts_trials.of(self.module, args, kwargs)

    def _pass_on(self, arguments: Arguments, counter: NativeCalls, of_any_size: bool) -> None:
        """Let native code pass calls like this one to the module's own forward, and count them."""
        if not counter.has_room:
            return
        records = torch.is_grad_enabled()
        native = native_aside(self.module, self.own, arguments, records, of_any_size)
        if native is not None:
            counter.add(native)
            self.paths.pass_on(native)

    def become_region(self, shared: SharedPlans) -> None:
        """Share code with equal blocks of the same model, and compile code at calls."""
        policy = self.policy
        policy.compiler = replace(policy.compiler, shared=shared)
        policy.compiles_signatures = True

    def served(self) -> int:
        """Return how many calls compiled code has served, code that was dropped included."""
        return self.kept.served(self.policy.specializations()) + self.policy.cut.served

    def fell_back(self, reason: Reason, arguments: Arguments) -> None:
        """Note that the module's own forward has served a call, because of ``reason``.

        If that is so for each call like this one, native code passes them on from now on.
        """
        self.policy.retry_if_settled()
        self.policy.note_fallback(reason)
        counter = self.tally.passed_on(reason) if reason.kind in _LASTING else None
        if counter is not None:
            self._pass_on(arguments, counter, of_any_size=reason.kind is Kind.NO_PART)

    def renewed(
        self, module: nn.Module, own: Callable[..., Any] | None, memo: Mapping[int, Any]
    ) -> ModuleCode:
        """Return the same code for ``module``, a deep copy, with counters at zero."""
        policy, fallback = self.policy, self.tally.on_fallback
        copy = ModuleCode(module, own, policy.compiler.target, self.options, fallback)
        copy.policy.compiles_signatures = policy.compiles_signatures
        if policy.compiler.shared is not None:
            copy.become_region(policy.compiler.shared)
        copy.policy.serve_sizes_like(policy)
        copy.share(self, memo)
        copy.policy.cut = policy.cut.renewed()
        copy.checker = None if self.checker is None else self.checker.renewed()
        return copy

    def share(self, other: ModuleCode, memo: Mapping[int, Any]) -> None:
        """Serve calls by the code of ``other`` too; its module differs in its tensors alone.

        ``memo`` is the memo of a deep copy of that module to this one.
        """
        if not self.options.freeze:  # no guard compares a copy's weights with the frozen ones
            kept = other.kept.known
            self.kept.known = tuple(s.rebound(memo, self.packing) for s in kept)
        self.packing.claim_like(other.packing)
