"""Find out how eager PyTorch differentiates a module, beyond what the captured graph shows.

The captured graph holds forward alone. TVM's Gradient of it would be silently wrong where PyTorch
does not differentiate forward as written:

- at ``detach``, under ``no_grad``, and in custom autograd functions;
- at operators whose decomposition has another derivative than PyTorch's formula, at kinks or where
  a side is infinite.

An eager replay of forward finds these places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tvmbridge.calls.layouts import Layout
from tvmbridge.core.collectives import no_exchanges
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import storage_key
from tvmbridge.core.types import OutputKind
from tvmbridge.differentiation.custom_functions import FunctionWatch
from tvmbridge.differentiation.draws import captured_draw
from tvmbridge.differentiation.flow import AutogradWatch, FlowWatch
from tvmbridge.differentiation.reach import reached_by_gradients
from tvmbridge.differentiation.rehearsal import Rehearsal
from tvmbridge.differentiation.saved import SavedMemory, readers_by_storage
from tvmbridge.graph_capture.noise import OTHER_DRAWS


class NothingToDifferentiateError(UnsupportedOperatorError):
    """Raised if no output of a module requires a gradient: the module needs forward alone."""


@dataclass(frozen=True)
class GradientFacts:
    """How eager PyTorch differentiates a module.

    - ``lost``: the reasons why the captured graph alone must not be differentiated.
    - ``cotangent_of``: the numbers of the outputs that require a gradient.
    - ``wanted``: the names of the primals that get a gradient.
    - ``gradient_reads``: for each wanted primal, the cotangents (positions in ``cotangent_of``)
      that its gradient depends on; the gradient is None if none of them arrives.
    - ``layouts``: memory layouts of the gradients that are not contiguous, by number, if
      cotangents have the layouts of their outputs.
    - ``draws``: the number of random draws of forward.
    - ``saved``: the user's tensors that autograd saves.
    """

    lost: tuple[str, ...]
    cotangent_of: tuple[int, ...]
    wanted: tuple[str, ...]
    gradient_reads: tuple[frozenset[int], ...]
    layouts: Mapping[int, Layout]
    draws: int
    saved: SavedMemory


def gradient_facts(rehearsal: Rehearsal) -> GradientFacts:
    """Replay forward once on fake tensors, and examine its gradient.

    Raises:
        NothingToDifferentiateError: no computed output requires a gradient.
        UnsupportedOperatorError: forward uses autograd in a way that compiled code cannot repeat
            at each call (hooks, gradients left in buffers).
    """
    with rehearsal.mode:
        leaves = rehearsal.leaves_of(rehearsal.fakes())
        watch = FlowWatch()
        uses = AutogradWatch(watch.reasons)
        functions = FunctionWatch(watch.reasons)
        with functions.noticing(), watch, uses:
            outputs = rehearsal(leaves)
        watch.look_at(outputs, "an output")
        _refuse(rehearsal, outputs, uses)
        differentiable = [i for i, o in enumerate(outputs) if o.requires_grad]
        if not differentiable:
            raise NothingToDifferentiateError("no computed output requires a gradient")
        saved = _saved_memory(rehearsal, outputs, differentiable)
        layouts: dict[int, Layout | None] = {}
        with no_exchanges(), rehearsal.backward():
            reached = reached_by_gradients(
                rehearsal, leaves, [outputs[i] for i in differentiable], layouts
            )
    if not _draws_alike(watch, rehearsal):
        watch.reasons[OTHER_DRAWS] = None
    flowing = [i for i, reads in reached.items() if reads]
    return GradientFacts(
        lost=tuple(watch.reasons),
        cotangent_of=tuple(differentiable),
        wanted=tuple(rehearsal.inputs[i].name for i in flowing),
        gradient_reads=tuple(reached[i] for i in flowing),
        layouts={n: v for n, i in enumerate(flowing) if (v := layouts[i]) is not None},
        draws=len(watch.draws),
        saved=saved,
    )


def _saved_memory(
    rehearsal: Rehearsal, outputs: Sequence[torch.Tensor], differentiable: Sequence[int]
) -> SavedMemory:
    """Return which of the user's tensors autograd has saved in an eager replay."""
    readers = readers_by_storage([outputs[i] for i in differentiable])
    nobody: frozenset[int] = frozenset()
    names = [d.name for d in rehearsal.inputs]
    primals = [readers.get(storage_key(t), nobody) for t in rehearsal.stand_ins]
    # Values written into buffers and arguments belong to the call, not to the user.
    held = [o.kind is OutputKind.USER or o.rebinds for o in rehearsal.outputs]
    return SavedMemory.of(
        primals=dict(zip(names, primals, strict=True)),
        outputs={
            i: readers.get(storage_key(output), nobody)
            for i, output in enumerate(outputs)
            if held[i]
        },
    )


def refuse_other_draws(rehearsal: Rehearsal) -> None:
    """Replay forward without gradients, and compare its random draws with the captured graph's."""
    watch = FlowWatch()
    with rehearsal.mode, watch:
        rehearsal([f.detach() for f in rehearsal.fakes()])
    if not _draws_alike(watch, rehearsal):
        raise UnsupportedOperatorError(OTHER_DRAWS)


def _draws_alike(watch: FlowWatch, rehearsal: Rehearsal) -> bool:
    return watch.draws == [captured_draw(n) for n in rehearsal.captured.noise]


def _refuse(rehearsal: Rehearsal, outputs: Sequence[torch.Tensor], uses: AutogradWatch) -> None:
    """Raise if forward does something that neither source of the joint function can repeat."""
    if uses.found:
        raise UnsupportedOperatorError(
            f"forward uses {', '.join(uses.found)}, which compiled code would not call again"
        )
    for output, described in zip(outputs, rehearsal.outputs, strict=True):
        if described.kind is not OutputKind.USER and output.requires_grad:
            raise UnsupportedOperatorError(
                f"forward writes a value that requires a gradient into {described.target}"
            )
    held = list(rehearsal.captured.constant_tensors.items())
    held += [
        (d.name, t)
        for d, t in zip(rehearsal.inputs, rehearsal.originals, strict=True)
        if not d.requires_grad
    ]
    for name, tensor in held:
        if tensor.requires_grad:
            raise UnsupportedOperatorError(
                f"{name} requires a gradient, but is neither a parameter nor an input"
            )
