"""A training call of compiled code: what it saves for backward, and how its tensors are read."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import graph
from torch.utils.hooks import unserializable_hook

from tvmbridge.calls.layouts import Strides
from tvmbridge.calls.surroundings import in_checkpoint
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.types import TensorSpec
from tvmbridge.runtime import siblings
from tvmbridge.runtime.backward import CompiledFunction
from tvmbridge.runtime.cuda_graphs import Replayed
from tvmbridge.runtime.gradient_parts import GradientParts, linked
from tvmbridge.runtime.guards.watch import watch
from tvmbridge.runtime.halves import BackwardHalves
from tvmbridge.runtime.primals import overwritten_by, packed_into, picker
from tvmbridge.runtime.saved_versions import SavedVersions
from tvmbridge.runtime.second_order import SecondOrderCall
from tvmbridge.runtime.siblings import Watched
from tvmbridge.runtime.step import ConvertedTensors, TrainingStep

_CALLED_ALONE = Reason(Kind.AGAIN_ALONE)
_numbers = itertools.count(1)


class TrainingCall:
    """Runs the forward and backward of a compiled module as one autograd function.

    Args:
        packing: the module's packed weights, which backward reads; None: there are none.
    """

    def __init__(self, compiled: CompiledModule, packing: ModulePacks | None = None) -> None:
        parts = compiled.split
        assert parts is not None
        position = {name: i for i, name in enumerate(parts.primals)}
        self.compiled = compiled
        self.packing = nullcontext() if packing is None else packing
        self.parts = parts
        self.number = next(_numbers)
        self.reads = [position[name] for name in parts.reads]
        # Backward reads packed values of these parameters. Autograd sees writes by a tensor's
        # version, which packed values do not have, so the parameters are saved as well.
        self.guarded = [
            i for i in packed_into(compiled, set(self.reads)) if i not in set(self.reads)
        ]
        self.gradient_of = [position[name] for name in parts.wanted]
        self.sources_of = picker(self.gradient_of)
        self.num_primals = len(parts.primals)
        self.place_of_residuals = len(self.reads) + len(parts.kept_outputs)
        self.overwritten = overwritten_by(compiled)
        computed = [o for o in compiled.captured.outputs if o.is_computed]
        self.orders = {
            n: layout.order for n, layout in compiled.layouts.outputs.items() if layout.moves
        }
        # Outputs that backward reads in another shape or order of dimensions than forward returns.
        self.reshaped = [
            (i, number, shape)
            for i, (number, shape) in enumerate(parts.kept_outputs, start=len(self.reads))
            if number in self.orders or shape != getattr(computed[number].spec, "shape", None)
        ]
        self.constant_outputs = [
            i for i in range(parts.num_outputs) if i not in set(parts.cotangent_of)
        ]
        self.readers = compiled.siblings
        self.versions = SavedVersions(compiled, self.reads, self.overwritten)
        self.halves = BackwardHalves.of(compiled, self.gradient_of)
        self.cotangent_specs = [computed[i].spec for i in parts.cotangent_of]
        self.gradient_parts = GradientParts(compiled)
        # How often the whole backward ran without a CUDA graph.
        self.backwards = 0

    @property
    def half_runs(self) -> Mapping[str, int]:
        """How often the code of each half of backward ran; see :class:`BackwardHalves`."""
        return {} if self.halves is None else self.halves.runs

    def __call__(
        self,
        primals: Sequence[Any],
        strides: Strides = None,
        again: SecondOrderCall | Reason = _CALLED_ALONE,
        held: ConvertedTensors | None = None,
        replayed: Replayed | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of forward, connected to ``primals`` in autograd's graph.

        Args:
            again: computes gradients that can be differentiated, or says why there are none.
            replayed: the results of a CUDA graph that has replayed forward; None: run forward.
        """
        step = TrainingStep(self, primals, strides, again, held, replayed)
        sources, link = self.sources_of(primals), None
        step.parts = self.gradient_parts.now()
        if step.parts:
            step.sources = sources
            link = linked(step.parts, sources, self.compiled.captured.device)
            sources = [sources[i] for i in step.parts[0].gradients]
        results: tuple[torch.Tensor, ...] = CompiledFunction.apply(step, link, *sources)  # type: ignore[no-untyped-call]
        step.primals = ()
        if len(self.parts.cotangent_of) > 1:
            let_hooks_wait(results[i] for i in self.parts.cotangent_of)
        node = results[self.parts.cotangent_of[0]].grad_fn if self.readers else None
        if node is not None:
            node.watched = Watched(results, self.readers)  # type: ignore[attr-defined]
        return results

    def hold(
        self, primals: Mapping[int, torch.Tensor], as_they_are: Sequence[int]
    ) -> ConvertedTensors:
        """Convert the primals that stay the same from call to call, once for all calls.

        Args:
            as_they_are: positions of primals that compiled code can read without a copy.
        """
        parts, loaded = self.parts, self.compiled.loaded
        forward = loaded.bind("forward", primals, self.num_primals, as_they_are)
        rereads = {
            i: primals[p]
            for i, p in enumerate(self.reads)
            if p in primals and p not in self.overwritten
        }
        count = self.place_of_residuals + 1 + len(parts.cotangent_of)
        backward = loaded.bind("backward", rereads, count, [self.place_of_residuals])
        read = [
            None if v is None else rereads[i]
            for i, v in enumerate(backward.values[: len(self.reads)])
        ]
        saved = [i for i, tensor in enumerate(read) if tensor is None]
        places = [p for p, t in zip(self.reads, read, strict=True) if t is not None]
        places += self.guarded
        # Packed weights are the last primals, and have no versions of their own.
        count = self.num_primals - len(self.compiled.packs)
        watched = {p: primals[p] for p in places if p < count}
        addresses = watch((), (), tuple(watched.values()))
        watched |= {p: primals[p] for p in self.versions.parameters if p in primals}
        readers = tuple(map(self.versions.readers_of_primal, watched))
        return ConvertedTensors(
            forward, backward, saved, read, tuple(watched.values()), readers, addresses
        )

    def as_read(self, values: list[Any]) -> list[Any]:
        """Bring kept outputs among ``values`` into the shapes and orders that backward reads.

        ``values`` are the arguments of backward before the cotangents; the list is changed.
        """
        for i, number, shape in self.reshaped:
            order = self.orders.get(number)
            values[i] = values[i].reshape(shape) if order is None else values[i].permute(order)
        return values

    def filled(self, cotangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the cotangents that backward takes, in the orders that it reads; zero for None."""
        numbers = self.parts.cotangent_of
        specs = zip((cotangents[number] for number in numbers), self.cotangent_specs, strict=True)
        filled = [_zeros(s) if c is None or c._is_zerotensor() else c for c, s in specs]
        if not self.orders:
            return filled
        orders = [self.orders.get(number) for number in numbers]
        return [c if o is None else c.permute(o) for c, o in zip(filled, orders, strict=True)]

    def marks(self) -> tuple[torch.Tensor, ...]:
        """Return a marker tensor to save first inside a checkpoint; nothing outside of one.

        A checkpoint repeats forward, and replaces each saved tensor by the one that the repetition
        saves at the same position with the same shape. The marker's shape is unique to this code,
        so a repetition that runs forward itself or other code is noticed.
        """
        if not in_checkpoint():
            return ()
        return (torch.empty((0, self.number), dtype=torch.bool, device="cpu"),)

    def kept_primal(self, primals: Sequence[torch.Tensor], position: int) -> torch.Tensor:
        """Return a primal that backward reads, as a copy if the call itself writes into it."""
        primal = primals[position]
        return primal.clone() if position in self.overwritten else primal


def _zeros(spec: TensorSpec | None) -> torch.Tensor:
    assert spec is not None
    return spec.empty().zero_()


class _HooksOfOutput(OrderedDict[int, Callable[..., Any]]):
    """The hooks of one output by handle number; added hooks are wrapped to ignore None."""

    def __setitem__(self, number: int, hook: Callable[..., Any]) -> None:
        # Multi-tensor hooks of torch.autograd.graph count calls with None as well, and the hooks
        # of siblings.py handle None.
        takes_none = getattr(hook, "__module__", None) in (graph.__name__, siblings.__name__)
        super().__setitem__(number, hook if takes_none else _where_it_arrives(hook))


def _where_it_arrives(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def called(gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else hook(gradient)

    if hasattr(hook, "__torch_unserializable__"):
        unserializable_hook(called)
    return called


def let_hooks_wait(outputs: Iterable[torch.Tensor]) -> None:
    """Prepare the new ``outputs`` of one autograd node for hooks that are registered later.

    In eager PyTorch each output has a node of its own, which runs only if a gradient reaches it.
    The one node of compiled code runs if any output gets a gradient, and would call the hooks of
    the other outputs with None.
    """
    for output in outputs:
        if output.grad_fn is not None:
            # The same steps as Tensor.register_hook at the first hook.
            output._backward_hooks = _HooksOfOutput()
            output.grad_fn._register_hook_dict(output)
