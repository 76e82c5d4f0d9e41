"""A specialisation: one input signature, with the code compiled for it in each mode."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tvmbridge.autograd import TrainingCall
from tvmbridge.compiled import CompiledModule
from tvmbridge.guarding.mode import Mode
from tvmbridge.guarding.plain import other_answer
from tvmbridge.guarding.signature import Signature
from tvmbridge.guarding.state import ModuleState
from tvmbridge.guarding.surroundings import in_checkpoint
from tvmbridge.kernels.aten_call import foreign_among
from tvmbridge.kernels.dtypes import as_pairs
from tvmbridge.layout_guard import LayoutGuard
from tvmbridge.memory.aliasing import made_again
from tvmbridge.memory.packing import Packing
from tvmbridge.noise import draw_noise
from tvmbridge.observing.arguments import Arguments, rebuild
from tvmbridge.observing.effects import no_draws_by
from tvmbridge.reads import Question
from tvmbridge.tail import try_tail
from tvmbridge.tracing.standins import without_inference_tensors
from tvmbridge.types import InputKind, OutputAlias, OutputDescriptor, OutputKind

_OF_MODULE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.ATTRIBUTE)


class Variant:
    """The code of one specialisation for one mode, ready to be called.

    Args:
        state: the dispatched module's state, which is read at each call.
        compiled: the code.
        packing: the module's packed weights.
    """

    def __init__(self, state: ModuleState, compiled: CompiledModule, packing: Packing) -> None:
        captured = compiled.captured
        self.state = state
        self.compiled = compiled
        self.calls = 0
        self.checked = 0
        self.checked_gradients = 0
        self._counting = threading.Lock()
        # Forward has yet to fill a cache: with tensors, which are then others than were traced.
        self.fills_first = False
        self._declined = 0
        users = [d for d in captured.inputs if d.kind is InputKind.USER]
        self._positions = [d.position or 0 for d in users]
        self._input_grads = [(d.position or 0, d.requires_grad) for d in users]
        noise = captured.noise
        specs = [d.spec for d in captured.inputs] + [n.spec for n in noise]
        self._has_complex = any(spec.dtype.is_complex for spec in specs)
        self._noise_order = [i for i, n in enumerate(noise) if n.drop_probability is None]
        self._noise_order += [i for i, n in enumerate(noise) if n.drop_probability is not None]
        given = {d.name: i for i, d in enumerate(captured.inputs)}
        reads = captured.head.reads if captured.head is not None else ()
        self._head_reads = [given[name] for name in reads]
        outputs = captured.outputs
        self._user_of = {d.name: d.position or 0 for d in users}
        self._state_of = {name: i for i, name in enumerate(state.names)}
        returned = [o for o in outputs if o.kind is OutputKind.USER]
        self._aliases = [(i, o.alias) for i, o in enumerate(returned) if o.alias is not None]
        # Views of outputs come after what they are views of.
        self._aliases.sort(key=lambda numbered: numbered[1].kind is None)
        views = [alias for _, alias in self._aliases if alias.shape is not None]
        self._views = [alias for alias in views if alias.kind is not None]
        rebound = [(o.target or "", o.alias) for o in outputs if o.rebinds]
        self._rebound_views = [(name, alias) for name, alias in rebound if alias is not None]
        self._written = [o for o in outputs if o.kind is not OutputKind.USER and not o.rebinds]
        self._asks = captured.asks
        # Gradients that forward turns on flow where tensors require them.
        self._flags_matter = compiled.recorded or Question.GRADIENTS in captured.asks
        self._layouts = LayoutGuard(state, compiled)
        self._packing = packing
        self._packs = [
            (names, [state.names.index(name) for name in names]) for names in compiled.packs
        ]
        self._training = TrainingCall(compiled, packing) if compiled.split is not None else None
        self._records_writes = self._training is not None and len(returned) < len(outputs)

    def is_to_be_renewed(self) -> bool:
        """Whether the first call, which forward served itself, has not made the code fit."""
        if not self.fills_first or self.calls:
            return False
        self._declined += 1
        return self._declined == 2 and self.state.value_changed() is not None

    def mismatch(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]) -> str | None:
        """Why the code cannot serve this call; None when it can."""
        # The calls that add a dispatch may be in another mode than those that come.
        if Question.INFERENCE in self._asks and not torch.is_inference_mode_enabled():
            return "forward returns tensors that it makes in inference mode"
        if self._records_writes and in_checkpoint():  # of which eager would repeat the first
            return "forward writes buffers or arguments, and a checkpoint repeats a part of it"
        reason = self.state.changed(tensors, check_grad=self._flags_matter)
        if reason is None and self._flags_matter:
            for position, requires_grad in self._input_grads:
                if leaves[position].requires_grad is not requires_grad:
                    return "requires_grad of an input differs"
        if reason is None and self._written:
            reason = self._overlap(leaves, tensors)
        for alias in self._views if reason is None else ():
            base = self._base(alias, leaves)
            if base is None or base.stride() != alias.base_stride:
                return "a tensor of which a view is returned has other strides"
        if reason is None and self._asks:
            reason = other_answer(self._asks, leaves, tensors)
        return reason or self._layouts.mismatch(leaves, tensors)

    def _overlap(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> str | None:
        """Whether a tensor that is written shares memory with another that the code reads."""
        read = [*(leaves[p] for p in self._positions), *tensors]
        storages = [t.untyped_storage().data_ptr() for t in read if t.numel()]
        written = {id(self._target(o, leaves, tensors)) for o in self._written}
        changing = {t.untyped_storage().data_ptr() for t in read if id(t) in written and t.numel()}
        if sum(s in changing for s in storages) > len(changing):
            return "a tensor that forward writes shares memory with another"
        return None

    def _target(
        self, output: OutputDescriptor, leaves: Sequence[Any], tensors: Sequence[Any]
    ) -> torch.Tensor:
        """The tensor that is written, or exchanged, with this output."""
        if output.kind is OutputKind.INPUT_MUTATION:
            return leaves[self._user_of[output.target or ""]]
        return tensors[self._state_of[output.target or ""]]

    def _base(self, alias: OutputAlias, leaves: Sequence[Any]) -> torch.Tensor | None:
        if alias.kind is InputKind.USER:
            return leaves[int(alias.key)]
        return self.state.tensor(str(alias.key))

    def try_out(self, leaves: Sequence[Any]) -> None:
        """Run forward and backward once and throw the results away.

        What cannot run must show itself now, when the module still has its own forward, and not
        in the middle of a training step. State, arguments and random state stay as they are.
        """
        with torch.random.fork_rng(devices=[]):
            tensors: Sequence[Any] = self._sample_state()
            primals = [p.detach() for p in self._primals(leaves, tensors)]
            primals = without_inference_tensors(primals)
            # Nothing is moved before the code is known to run.
            primals += [self._packing.copied([tensors[i] for i in s]) for _, s in self._packs]
            with no_draws_by(foreign_among(self.compiled.aten_calls)):
                self._try(primals, leaves)

    def _try(self, primals: list[torch.Tensor], leaves: Sequence[Any]) -> None:
        if self._training is None:
            self._try_tail(self.compiled.forward(primals), leaves)
            return
        wanted = [primals[p].requires_grad_() for p in self._training.gradient_of]
        with torch.enable_grad():
            results = self._training(primals)
        self._try_tail(results, leaves)
        outputs = [o for o in results if o.requires_grad]
        cotangents = [torch.zeros_like(o) for o in outputs]
        torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)

    def _try_tail(self, results: Sequence[torch.Tensor], leaves: Sequence[Any]) -> None:
        captured = self.compiled.captured
        if captured.tail is None:
            return
        computed = iter(results)
        values = [(o.kind, next(computed) if o.is_computed else o.value) for o in captured.outputs]
        returned = [value for kind, value in values if kind is OutputKind.USER]
        self._make_again(returned, leaves)
        try_tail(captured.tail, self._without_bases(returned))

    def _sample_state(self) -> list[torch.Tensor]:
        """The module's tensors; zeros where forward has yet to make one."""
        specs = [d.spec for d in self.compiled.captured.inputs if d.kind in _OF_MODULE]
        return [
            torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) if t is None else t
            for t, spec in zip(self.state.tensors(), specs, strict=True)
        ]

    def _primals(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> list[torch.Tensor]:
        """User inputs, state, draws and masks, in the order of the compiled code."""
        captured = self.compiled.captured
        primals = [leaves[p] for p in self._positions]
        primals += tensors
        noise = draw_noise(captured.noise, captured.head, [primals[i] for i in self._head_reads])
        primals += [noise[i] for i in self._noise_order]
        return list(map(as_pairs, primals)) if self._has_complex else primals

    def run(self, leaves: Sequence[Any], tensors: Sequence[Any], arguments: Arguments) -> Any:
        """Draw the noise, run the code, write mutations back, and rebuild the outputs."""
        return self.assemble(self.results(leaves, tensors), leaves, tensors, arguments)

    def results(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Draw the noise and run the code: the computed outputs, in order."""
        primals = self._primals(leaves, tensors)
        for names, slots in self._packs:
            primals.append(self._packing.tensor(names, [tensors[i] for i in slots]))
        strides = self._layouts.strides(leaves, tensors)
        if self._training is not None:
            results: Sequence[torch.Tensor] = self._training(primals, strides)
        else:
            results = self.compiled.forward(primals, strides)
        with self._counting:
            self.calls += 1
        return results

    def assemble(
        self,
        results: Sequence[torch.Tensor],
        leaves: Sequence[Any],
        tensors: Sequence[Any],
        arguments: Arguments,
    ) -> Any:
        """Write mutations back, and rebuild what forward returns from the computed outputs."""
        captured = self.compiled.captured
        computed = iter(results)
        flat: list[Any] = []
        for output in captured.outputs:
            value = next(computed) if output.is_computed else output.value
            if output.kind is OutputKind.USER:
                flat.append(value)
            elif output.rebinds and output.alias is None:
                self.state.rebind(output.target or "", value.detach())
            elif not output.rebinds:
                with torch.no_grad():
                    self._target(output, leaves, tensors).copy_(value)
        self.state.assign()
        self.state.norms.renew()
        # Last, because they show what was written.
        self._make_again(flat, leaves)
        for name, alias in self._rebound_views:
            self.state.rebind(name, made_again(alias, flat[int(alias.key)]))
        flat = self._without_bases(flat)
        if captured.tail is not None:
            flat = captured.tail.resolve(flat)
        changed, checks = captured.changed_arguments, captured.checks
        return rebuild(flat, captured.out_spec, changed, arguments, checks)

    def _make_again(self, flat: list[Any], leaves: Sequence[Any]) -> None:
        for number, alias in self._aliases:
            base = flat[int(alias.key)] if alias.kind is None else self._base(alias, leaves)
            assert base is not None
            flat[number] = made_again(alias, base)

    def _without_bases(self, flat: Sequence[Any]) -> list[Any]:
        return list(flat[: len(flat) - len(self.compiled.captured.bases)])


class Checks(Protocol):
    """Serves calls in place of :meth:`Variant.run`, and checks some of them."""

    unchecked: Counter[str]

    def run(
        self,
        module: nn.Module,
        variant: Variant,
        leaves: Sequence[Any],
        tensors: Sequence[Any],
        arguments: Arguments,
    ) -> Any:
        """What the call returns."""

    def renewed(self) -> Checks:
        """The same for a copy of the module."""


class Specialization:
    """One signature and its variants by mode; a mode whose compilation failed holds the reason."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.variants: dict[Mode, Variant] = {}
        self.failures: dict[Mode, str] = {}
        self.last_use = 0

    def rebound(self, memo: Mapping[int, Any], packing: Packing) -> Specialization:
        """The same code for a deep copy of the module, with counters at zero.

        Code that no longer fits the module is not copied: the copy could not tell.
        """
        copy = Specialization(self.signature)
        copy.variants = {
            mode: Variant(v.state.rebound(memo), v.compiled, packing)
            for mode, v in self.variants.items()
            if not v.state.replaced()
        }
        copy.failures = dict(self.failures)
        copy.last_use = self.last_use
        return copy
