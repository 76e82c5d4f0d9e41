"""The first run of compiled code, as a test before it serves calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.calls.generators import refuse_draws_by
from tvmbridge.calls.standins import without_inference_tensors
from tvmbridge.core.devices import gpus_of
from tvmbridge.graph_capture.epilogue import try_epilogue
from tvmbridge.kernels.aten_call import foreign_among
from tvmbridge.runtime.entry import CompiledEntry


def try_out(entry: CompiledEntry, leaves: Sequence[Any]) -> None:
    """Run forward and backward once and discard the results.

    Code that cannot run must fail now, not in the middle of a training step: the module's own
    forward can still serve the call. Module state, arguments and random state do not change.
    """
    foreign = foreign_among(entry.compiled.aten_calls)
    draws = bool(entry.compiled.captured.noise or foreign)
    # Fork the generator only if the code draws: other threads may be drawing from it.
    with torch.random.fork_rng(gpus_of(entry.compiled.captured.device), enabled=draws):
        tensors: Sequence[Any] = _sample_state(entry)
        primals = [p.detach() for p in entry.given.of_call(leaves, tensors)]
        primals = without_inference_tensors(primals)
        # Packed copies, because parameters move into packs only after the code has run.
        primals += [entry.packing.copied([tensors[i] for i in s]) for _, s in entry.packs]
        refuse_draws_by(foreign, lambda: _try(entry, primals, leaves))


def _try(entry: CompiledEntry, primals: list[torch.Tensor], leaves: Sequence[Any]) -> None:
    if entry.training is None:
        if entry.frozen is not None:
            primals = entry.frozen.arguments(primals)
        _try_epilogue(entry, entry.compiled.forward(primals), leaves)
        return
    wanted = [primals[p].requires_grad_() for p in entry.training.gradient_of]
    with torch.enable_grad():
        results = entry.training(primals)
    _try_epilogue(entry, results, leaves)
    outputs = [o for o in results if o.requires_grad]
    cotangents = [torch.zeros_like(o) for o in outputs]
    torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)


def _try_epilogue(
    entry: CompiledEntry, results: Sequence[torch.Tensor], leaves: Sequence[Any]
) -> None:
    epilogue = entry.compiled.captured.epilogue
    if epilogue is not None:
        try_epilogue(epilogue, entry.outputs.before_epilogue(results, leaves))


def _sample_state(entry: CompiledEntry) -> list[torch.Tensor]:
    """Return the module's tensors; zeros for tensors that forward's first call will replace."""
    specs = [d.spec for d in entry.compiled.captured.inputs if d.kind.is_of_module]
    return [
        torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
        if t is None or t.shape != torch.Size(spec.shape) or t.dtype != spec.dtype
        else t
        for t, spec in zip(entry.state.tensors(), specs, strict=True)
    ]
