"""A compiled entry: the code of one specialisation for one mode and one set of requires_grad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tvmbridge.backends import backend_of
from tvmbridge.calls.arguments import Arguments
from tvmbridge.calls.plain import other_answer
from tvmbridge.calls.surroundings import in_checkpoint, repeated_by_checkpoint
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.core.assumptions import Question
from tvmbridge.core.called_in_mode import with_autocast_off
from tvmbridge.core.locks import Lock
from tvmbridge.core.profiling import profiling, region
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.torch_private import saved_tensors_hooks_in_force
from tvmbridge.core.types import InputKind
from tvmbridge.runtime.autograd import TrainingCall
from tvmbridge.runtime.fast_path import FastPath
from tvmbridge.runtime.frozen import FrozenWeights
from tvmbridge.runtime.guards.fast import may_be_fast
from tvmbridge.runtime.guards.layout import LayoutGuard
from tvmbridge.runtime.guards.mode import Flags
from tvmbridge.runtime.guards.state import ModuleState
from tvmbridge.runtime.guards.watch import MovingTensors
from tvmbridge.runtime.outputs import Outputs
from tvmbridge.runtime.primals import GivenPrimals
from tvmbridge.runtime.second_order import SecondOrder
from tvmbridge.runtime.speed_trial import SpeedTrial


class CompiledEntry:
    """The compiled code for one signature of arguments, one mode and one set of flags.

    Args:
        packing: the module's packed weights.
        flags: ``requires_grad`` of each tensor that the code was compiled for.
    """

    def __init__(
        self, state: ModuleState, compiled: CompiledModule, packing: ModulePacks, flags: Flags = ()
    ) -> None:
        captured = compiled.captured
        self.state = state
        self.flags = flags
        self.compiled = compiled
        self.calls = 0
        self.checked = 0
        self.checked_gradients = 0
        # Replays of CUDA graphs ("forward", "backward"), and calls without a graph by the reason.
        self.graph_replays: Counter[str] = Counter()
        self.graph_skips: Counter[str] = Counter()
        self.counting = Lock()
        # True if the code fits the module only after forward's first call, which fills a cache,
        # say: the module's own forward serves that call.
        self.fills_first = False
        # Whether the code came from disk without capture, or why not; empty: the option is off.
        self.recalled = ""
        # Why equal modules do not share the code; None: they do, or there are none.
        self.alone: str | None = None
        # The digest of the key of the plan on disk; empty if there is none.
        self.plan = ""
        self._declined = 0
        self.given = GivenPrimals(captured)
        users = [d for d in captured.inputs if d.kind is InputKind.USER]
        self._input_grads = [(d.position or 0, d.requires_grad) for d in users]
        self.outputs = Outputs(state, captured)
        self._asks = captured.assumptions.asks
        tied = captured.assumptions.aliases
        self._untied = [n for n, name in enumerate(state.names) if name not in tied]
        self.autocast = captured.assumptions.autocast
        # If forward itself enables gradients, they flow by requires_grad in any mode.
        self._flags_matter = compiled.recorded or Question.GRADIENTS in captured.assumptions.asks
        self.layouts = LayoutGuard(state, compiled)
        self.packing = packing
        self.packs = [
            (names, [state.names.index(name) for name in names]) for names in compiled.packs
        ]
        self.frozen: FrozenWeights | None = None
        if compiled.freezing is not None:
            tensors, first = state.tensors(), len(self.given.inputs)
            self.frozen = FrozenWeights(
                compiled.freezing, compiled.loaded, state.names, tensors, first
            )
        self.training = TrainingCall(compiled, packing) if compiled.split is not None else None
        self.second_order = SecondOrder(state, captured, self.mismatch)
        writes = self.outputs.writes or state.carries_over
        self.records_writes = self.training is not None and writes
        self.may_be_fast = may_be_fast(state, captured)
        # Consecutive calls that no fast guard accepted and the full guards did.
        self.slow_calls = 0
        # The addresses of the module's tensors when the last fast path was built.
        self.addresses: list[int] = []
        # Watches tensors that have moved from one call to the next; None: they have not.
        self.moving: MovingTensors | None = None
        # Decides whether this code is faster than the module's own forward; None: no trial yet.
        self.trial: SpeedTrial | None = None

    @property
    def gradients(self) -> tuple[str, ...]:
        """Return the names of the inputs and parameters whose gradients the code computes."""
        if self.compiled.split is None:
            return ()
        inputs = self.compiled.captured.inputs
        return tuple(d.target or d.name for d in inputs if d.requires_grad)

    @property
    def variant(self) -> tuple[Any, ...]:
        """Return what distinguishes the entries of a specialisation in one mode."""
        return self.flags, self.state.branches.outcomes

    @property
    def question(self) -> str | None:
        """Return the key for the speed trial's verdict on disk; None if the code has no key."""
        compiled = self.compiled
        if not compiled.key:
            return None
        device = compiled.captured.device
        name = backend_of(device).name(device)
        where = f" on {name}" if name else ""
        return f"seconds of {compiled.origin} by code {compiled.key[:32]}{where}"

    def rebound(self, memo: Mapping[int, Any], packing: ModulePacks) -> CompiledEntry:
        """Return an entry with the same code for a deep copy of the module, counters at zero.

        ``memo`` is the memo of :func:`copy.deepcopy`.
        """
        copied = CompiledEntry(self.state.rebound(memo), self.compiled, packing, self.flags)
        copied.fills_first = self.awaits_first()
        copied.recalled, copied.plan = self.recalled, self.plan
        return copied

    def is_to_be_renewed(self) -> bool:
        """Whether the code is outdated, because forward's first call changed what it reads.

        The first call asks this as well, so only the second one gets True.
        """
        if not self.awaits_first() or repeated_by_checkpoint():
            return False
        self._declined += 1
        return self._declined == 2 and self.state.is_otherwise()

    def awaits_first(self) -> bool:
        """Whether the code fits only after forward's own first call and has served no call yet."""
        return self.fills_first and not self.calls

    def mismatch(
        self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]
    ) -> Reason | None:
        """Return why the code cannot serve this call; None if it can."""
        # add_tvm_dispatch may have been called in another mode than this call.
        if Question.INFERENCE in self._asks and not torch.is_inference_mode_enabled():
            return Reason(Kind.INFERENCE)
        if Question.STARTED in self._asks and torch.is_grad_enabled():
            return Reason(Kind.STARTED)
        if self.records_writes and in_checkpoint():  # the repetition would write a second time
            return Reason(Kind.CHECKPOINT_WRITES)
        if self.awaits_first() and repeated_by_checkpoint():
            return Reason(Kind.CHECKPOINT_FIRST)
        reason = self.state.changed(tensors, check_grad=self._flags_matter)
        if reason is None and self._flags_matter and not self._inputs_fit_flags(leaves):
            return Reason(Kind.INPUT_FLAG)
        if reason is None and not self.state.branches.hold(leaves):
            return Reason(Kind.BRANCH)
        if reason is None:
            reason = self.outputs.mismatch(leaves, tensors)
        if reason is None and self._asks:
            reason = other_answer(self._asks, leaves, [tensors[n] for n in self._untied])
        if reason is None and self.frozen is not None:
            reason = self.frozen.changed(tensors)
        return reason or self.layouts.mismatch(leaves, tensors)

    def fits_flags(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether the code was compiled for ``requires_grad`` of these tensors, if it matters."""
        if not self._flags_matter:
            return True
        return self._inputs_fit_flags(leaves) and self.state.kinds.fits_flags(tensors)

    def is_variant_for(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether the code was compiled for these flags, and for the branches that forward takes.

        A specialisation has an entry for each of these.
        """
        return self.fits_flags(leaves, tensors) and self.state.branches.hold(leaves)

    def _inputs_fit_flags(self, leaves: Sequence[Any]) -> bool:
        for position, requires_grad in self._input_grads:
            if leaves[position].requires_grad is not requires_grad:
                return False
        return True

    def is_other_variant(
        self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]
    ) -> bool:
        """Whether only ``requires_grad``, or a branch, keeps the code from serving a call now."""
        fits = self.is_variant_for(leaves, tensors)
        return not fits and self.state.changed_beside_flags(tensors) is None

    # Calls that a fast guard has accepted --------------------------------------------------------

    def run_fast(
        self, fast: FastPath[CompiledEntry], leaves: Sequence[Any], arguments: Arguments
    ) -> Any:
        """Serve a call that the guard of ``fast`` has accepted."""
        if fast.direct is not None and not profiling():
            return fast.direct(leaves)
        self.slow_calls = 0
        results = self._results(leaves, fast.tensors, fast)
        return self.outputs.assemble(results, leaves, fast.tensors, arguments)

    # Calls in general ----------------------------------------------------------------------------

    def run(self, leaves: Sequence[Any], tensors: Sequence[Any], arguments: Arguments) -> Any:
        """Serve a call: draw random numbers, run the code, write mutations, rebuild the outputs."""
        results = self.results(leaves, tensors)
        return self.outputs.assemble(results, leaves, tensors, arguments)

    def results(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Draw random numbers and run the code; return the computed outputs, in order."""
        return self._results(leaves, tensors, None)

    def _results(
        self, leaves: Sequence[Any], tensors: Sequence[Any], fast: FastPath[CompiledEntry] | None
    ) -> Sequence[torch.Tensor]:
        if not (self.autocast or profiling()):
            return self._computed(leaves, tensors, fast)
        # The casts of autocast are part of the compiled code.
        with region(f"{self.compiled.origin} forward"):
            return with_autocast_off(self._computed, leaves, tensors, fast)

    def _computed(
        self, leaves: Sequence[Any], tensors: Sequence[Any], fast: FastPath[CompiledEntry] | None
    ) -> Sequence[torch.Tensor]:
        training = self.training
        # Hooks on saved tensors take PyTorch tensors, which a fast path does not save.
        if (
            training is not None
            and fast is not None
            and saved_tensors_hooks_in_force(True) is not None
        ):
            fast = None
        if training is not None:
            again = self.second_order.call(leaves, tensors, fast.pinned if fast else None)
        results: Sequence[torch.Tensor] | None = None
        replayed = None
        if fast is not None and fast.graphs is not None:
            inputs = [leaves[p] for p in self.given.inputs]
            replayed = fast.graphs(inputs)
        if replayed is not None:
            primals = [*inputs, *replayed.primals[len(inputs) :]]
        else:
            primals = self.given.of_call(leaves, tensors)
            for names, slots in self.packs:
                members = [tensors[i] for i in slots]
                primals.append(None if fast else self.packing.tensor(names, members))
        strides = fast.strides if fast else self.layouts.strides(leaves, tensors)
        if training is not None:
            held = fast.held if fast else None
            results = training(primals, strides, again, held, replayed)
        elif replayed is not None:
            results = replayed.outputs
        else:
            if self.frozen is not None:
                primals = self.frozen.arguments(primals)
            results = self.compiled.forward(primals, strides, fast.bound if fast else None)
        with self.counting:
            self.calls += 1
        return results
