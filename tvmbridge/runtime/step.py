"""The state of one training call, from the compiled forward to its backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tvmbridge.calls.layouts import Strides
from tvmbridge.compiler.backward_code import BackwardPart
from tvmbridge.compiler.executable import Bound, LoadedModule, Residuals, tensors_of
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.torch_private import backward_keeps_graph
from tvmbridge.core.writes import version_of
from tvmbridge.graph_capture.surroundings import hooks_of_user
from tvmbridge.kernels.allocation import residuals_emptied
from tvmbridge.runtime.cuda_graphs import Replayed
from tvmbridge.runtime.guards.watch import Watch, versions_of
from tvmbridge.runtime.halves import BackwardHalves, Waiting, weights_follow
from tvmbridge.runtime.saved_versions import NotedVersion
from tvmbridge.runtime.second_order import SecondOrderCall

WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: backward reads it, in eager PyTorch too, or hooks on saved tensors kept it without "
    "a copy"
)

_NOTHING = nullcontext()

_FAILED = (
    "an earlier backward of this call ended with an error, and has freed values that backward "
    "reads: run forward again"
)

_FREED = (
    "backward has computed the gradients of the inputs, and has freed what other gradients than "
    "those of the weights need: forward ran in a ZeroBubbleStage. Ask for the gradients of the "
    "weights alone, with the same gradients of the outputs, or use PyTorch's PipelineStage"
)


@dataclass(frozen=True, eq=False)
class ConvertedTensors:
    """The tensors of a module, converted for compiled code once for many calls.

    Autograd does not save these tensors, so their versions are compared here.

    - ``forward``, ``backward``: the converted arguments of both functions.
    - ``saved``: numbers of the primals that backward reads and autograd has to save.
    - ``read``: the primals that backward reads, by number; None for the numbers in ``saved``.
    - ``watched``: tensors that must not be written between forward and backward.
    - ``readers``: for each watched tensor, the cotangents whose backward reads it; None: any.
    - ``addresses``: compares the addresses of the tensors that backward reads.
    - ``partial``: converted arguments of backwards without some of the cotangents.
    - ``outdated``: memory that calls in progress may still read.
    """

    forward: Bound
    backward: Bound
    saved: Sequence[int]
    read: Sequence[torch.Tensor | None]
    watched: tuple[torch.Tensor, ...]
    readers: tuple[frozenset[int] | None, ...]
    addresses: Watch
    partial: weakref.WeakKeyDictionary[LoadedModule, Bound] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    outdated: list[torch.Tensor] = field(default_factory=list)

    def for_partial(self, loaded: LoadedModule, count: int, given: Iterable[int]) -> Bound:
        """Return the converted arguments of a backward without some of the cotangents.

        Args:
            given: the positions of arguments that are results of compiled code.
        """
        bound = self.partial.get(loaded)
        if bound is None:
            held = {i: t for i, t in enumerate(self.read) if t is not None}
            bound = self.partial[loaded] = loaded.bind("backward", held, count, tuple(given))
        return bound


class TrainingStep:
    """One call of forward, and the state that its backward needs.

    Args:
        again: computes gradients that can be differentiated, or says why there are none.
        held: the module's converted tensors; None: not converted.
        replayed: the results of a CUDA graph; None: forward has not been replayed.
    """

    def __init__(
        self,
        call: Any,
        primals: Sequence[Any],
        strides: Strides,
        again: SecondOrderCall | Reason,
        held: ConvertedTensors | None,
        replayed: Replayed | None = None,
    ) -> None:
        self.call = call
        self.primals = primals
        self.strides = strides
        self.again = again
        self.held = held
        self._replayed = replayed
        self.lease = None if replayed is None else replayed.lease
        # None if hooks on saved tensors are active: then autograd saves the residuals.
        self.residuals: Residuals | None = None
        self.versions: tuple[int, ...] = ()
        self.marks: tuple[torch.Tensor, ...] = ()
        # Versions of tensors that went through hooks on saved tensors. Autograd does not compare
        # versions of what hooks return, which may be the same memory.
        self.hooked_versions: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.noted: list[NotedVersion] = []
        # The parts that backward runs in, and the primals of its gradients; empty: it runs whole.
        self.parts: Sequence[BackwardPart] = ()
        self.sources: Sequence[torch.Tensor] = ()
        # Runs backward in halves; None: a whole backward runs, whatever the engine asks for.
        self.halves: BackwardHalves | None = call.halves
        # What the gradients of weights need after those of inputs; None: nothing is computed.
        self.waiting: Waiting | None = None
        # Whether residuals are freed between the halves of backward.
        self.frees = self.halves is not None and weights_follow()
        # Why the residuals are freed; empty: they are not.
        self.freed = ""

    def run(self) -> list[Any]:
        """Run forward; return the outputs followed by the residuals. Called once."""
        if self._replayed is not None:
            # Released, because outputs hold autograd's node, which holds this step: a cycle.
            replayed, self._replayed = self._replayed, None
            return [*replayed.outputs, replayed.residuals]
        bound = None if self.held is None else self.held.forward
        results: list[Any] = self.call.compiled.forward(self.primals, self.strides, bound)
        return results

    def to_save(self, outputs: Sequence[torch.Tensor], residuals: Any) -> list[torch.Tensor]:
        """Return the tensors that autograd saves: primals, outputs, and residuals for hooks."""
        call, held = self.call, self.held
        # A detached output is another tensor than the one that eager PyTorch saves: the user may
        # exchange its memory (``.data =``).
        kept = [
            outputs[number].detach() if number in call.constant_outputs else outputs[number]
            for number, _ in call.parts.kept_outputs
        ]
        if held is not None:
            self.residuals = residuals
            self.versions = versions_of(held.watched)
            places = [call.reads[i] for i in held.saved]
            read = [call.kept_primal(self.primals, i) for i in places]
            return call.versions.noted(self, places, read, outputs, kept)
        read = [call.kept_primal(self.primals, i) for i in call.reads]
        # Saved only so that autograd notices writes into them.
        guards = [self.primals[i] for i in call.guarded]
        if not hooks_of_user():
            self.residuals = residuals
            return [*call.versions.noted(self, call.reads, read, outputs, kept), *guards]
        self.marks = call.marks()
        reads = set(call.reads)
        others = [p for i, p in enumerate(self.primals) if i not in reads]
        originals = (t for t in (*read, *others) if isinstance(t, torch.Tensor))
        self.hooked_versions = [(weakref.ref(t), version_of(t)) for t in originals]
        return [*self.marks, *read, *kept, *tensors_of(residuals), *guards]

    def restored(self, saved: Sequence[torch.Tensor]) -> list[Any]:
        """Return backward's arguments before the cotangents, from the tensors autograd has saved.

        Raises:
            RuntimeError: a tensor that backward reads was written since forward.
        """
        call, held = self.call, self.held
        if held is not None:
            values: list[Any] = list(held.read)
            for i, value in zip(held.saved, saved, strict=False):
                values[i] = value
            return [*values, *saved[len(held.saved) :], self.residuals]
        read = saved[len(self.marks) : len(saved) - len(call.guarded)]
        _refuse_written(read[: len(call.reads)], self.hooked_versions)
        if self.residuals is not None:
            return [*read, self.residuals]
        count = len(call.reads) + len(call.parts.kept_outputs)
        return [*read[:count], tuple(read[count:])]

    def refuse_written(self, cotangents: Sequence[torch.Tensor | None]) -> None:
        """Check that no tensor that this backward reads was written since forward.

        Raises:
            RuntimeError: a tensor was written, as in eager PyTorch.
        """
        held = self.held
        same = held is None or versions_of(held.watched) == self.versions
        if same and all(version_of(noted.tensor) == noted.version for noted in self.noted):
            return
        numbers = enumerate(self.call.parts.cotangent_of)
        present = {i for i, number in numbers if cotangents[number] is not None}
        if held is not None:
            versions = versions_of(held.watched)
            changed = zip(held.readers, versions, self.versions, strict=True)
            if any(a != b and (r is None or r & present) for r, a, b in changed):
                raise RuntimeError(WRITTEN)
        for noted in self.noted:
            if version_of(noted.tensor) != noted.version and noted.readers & present:
                raise RuntimeError(WRITTEN)

    def rereads_unwritten(self) -> bool:
        """Whether nobody has written this module's tensors since forward, if hooks saved them.

        A checkpoint would compute residuals again, from the values that were written.
        """
        return all(
            (tensor := reference()) is None or version_of(tensor) == version
            for reference, version in self.hooked_versions
        )

    def unchanged(self) -> ConvertedTensors | None:
        """Return the converted tensors if their addresses are unchanged; otherwise None."""
        held = self.held
        return held if held is not None and held.addresses.unchanged() else None

    def packing(self, held: ConvertedTensors | None) -> AbstractContextManager[Any]:
        """Return the context that backward runs in; ``held`` is the result of :meth:`unchanged`.

        Converted tensors keep the old memory of parameters that are moved meanwhile.
        """
        return _NOTHING if held is not None else self.call.packing

    def residuals_end(self) -> AbstractContextManager[None]:
        """Return the context of a whole backward, which frees the residuals unless it runs again.

        A CUDA graph owns the residuals of its forward, so that this context frees none of them.
        """
        if backward_keeps_graph() or self.residuals is None or self.lease is not None:
            return _NOTHING
        self.freed = _FAILED
        return residuals_emptied()

    def free_residuals(self) -> None:
        """Free the residuals, of which the gradients of weights hold what they read."""
        self.residuals = None
        self.freed = _FREED

    def refuse_freed(self) -> None:
        """Check that the residuals are there, which a whole backward reads.

        Raises:
            RuntimeError: they were freed, between the halves of backward or by one that failed.
        """
        if self.freed:
            raise RuntimeError(self.freed)

    def free(self) -> None:
        """Free the residuals, and release the CUDA graph's memory for the next call."""
        self.residuals = None
        self.waiting = None
        self.noted = []
        if self.lease is not None:
            self.lease.end()

    def forget(self) -> None:
        """Free everything that backward has read, because it will not run again."""
        self.free()
        self.again = Reason(Kind.AGAIN_FREED)


def _refuse_written(
    saved: Sequence[torch.Tensor], versions: Sequence[tuple[weakref.ref[torch.Tensor], int]]
) -> None:
    """Raise if a saved tensor shares memory with an original that was written since forward."""
    for tensor, (reference, version) in zip(saved, versions, strict=False):
        original = reference()
        if original is None or version_of(original) == version:
            continue
        if original.data_ptr() == tensor.data_ptr():
            raise RuntimeError(WRITTEN)
