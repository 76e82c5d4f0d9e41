"""Backward in two functions: the gradients of inputs first, and those of weights later.

Schedules of pipelines without bubbles send the gradients of a stage's inputs on before they compute
the gradients of its weights. *Halves* of a backward are two compiled functions that together
compute what the whole backward computes, and nothing twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import tvm
from tvm import relax

from tvmbridge.coloring import color_backward
from tvmbridge.compiler.backward_code import BackwardLoader, PartialBackward
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.compiler.laying_out import put_on_some
from tvmbridge.compiler.pieces import Pieces
from tvmbridge.compiler.split import SplitModule, build_function, split
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.turns import compiling
from tvmbridge.differentiation.differentiate import JointModule
from tvmbridge.differentiation.saved import SavedMemory
from tvmbridge.passes.base import flat_results
from tvmbridge.passes.relax.remove_borders import RemoveBorders
from tvmbridge.passes.relax.return_whole import ReturnWhole
from tvmbridge.passes.relax.separate_convolution_gradients import SeparateConvolutionGradients
from tvmbridge.pipeline import AnyPass, run_passes, tidy_passes

logger = logging.getLogger(__name__)

# How often the gradients of inputs alone are asked for before halves are compiled for speed.
_LOOKS = 2
_NO_GRADIENTS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Halves:
    """The compiled halves of a backward.

    - ``loaded``: the code. Its function ``forward`` takes the arguments of backward, with the
      residuals one by one, and returns the gradients of inputs, then its own residuals as a tuple.
      Its function ``backward`` takes the arguments in ``reads``, then these residuals, and returns
      the gradients of weights.
    - ``inputs``: the numbers of the gradients that ``forward`` returns.
    - ``copied``: the numbers of results of ``forward`` that share memory with another tensor, and
      are copied.
    - ``reads``: which arguments of ``forward`` are arguments of ``backward`` too.
    - ``weights``: the function ``backward``.
    """

    loaded: LoadedModule
    inputs: tuple[int, ...]
    copied: frozenset[int]
    reads: tuple[int, ...]
    weights: PartialBackward

    def of_inputs(self, values: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
        """Return the gradients of inputs, and the arguments for :meth:`of_weights`.

        Args:
            values: the arguments of backward, with the residuals one by one.
        """
        values = self.loaded.prepare("forward", values)
        *gradients, residuals = self.loaded.call("forward", values)
        for i in self.copied:
            gradients[i] = gradients[i].clone()
        put_on_some(self.weights.layouts, self.inputs, gradients)
        return gradients, [*(values[i] for i in self.reads), residuals]

    def of_weights(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Return the gradients of weights from the values that :meth:`of_inputs` returned."""
        return self.weights.results(values)


class CompiledHalves:
    """The halves of the backward of a module, compiled when they are first needed."""

    def __init__(self, loader: BackwardLoader) -> None:
        # Why the halves cannot be compiled; empty if they can.
        self.refused = ""
        self._loader = loader
        self._asked = 0
        self._halves: Halves | None = None

    def known(self, inputs: Sequence[int], *, at_once: bool) -> Halves | None:
        """Return the halves; None to run the whole backward instead.

        Args:
            at_once: whether to compile the halves now, without waiting for more such backwards.
        """
        if self._halves is not None or self.refused:
            return self._halves
        self._asked += 1
        if not at_once and self._asked <= _LOOKS:
            return None
        with compiling():
            if self._halves is None and not self.refused:
                try:
                    self._halves = self._compile(tuple(inputs))
                except BridgeError as error:
                    self.refused = str(error)
                    logger.info("backward has no halves: %s", error)
        return self._halves

    def _compile(self, inputs: tuple[int, ...]) -> Halves:
        halved, reads = in_halves(self._loader.parts, self._loader.whole(), inputs)
        built = self._loader.built(halved.mod, halved.bundle)
        pieces = Pieces.of_function(halved.mod["backward"])
        loaded = LoadedModule(built.machine, built.unaligned, self._loader.device, pieces)
        weights = _others(self._loader.parts, inputs)
        copied = pieces.places(built.shared["backward"])
        logger.info("compiled the gradients of inputs and those of weights separately")
        return Halves(
            loaded=loaded,
            inputs=inputs,
            copied=built.shared["forward"].intersection(range(len(inputs))),
            reads=reads,
            weights=PartialBackward(loaded, weights, copied, self._loader.layouts),
        )


def in_halves(
    parts: SplitModule, backward: relax.Function, inputs: tuple[int, ...]
) -> tuple[SplitModule, tuple[int, ...]]:
    """Split a backward function; ``forward`` of the result computes the gradients of inputs.

    Args:
        inputs: the numbers of the gradients that belong to inputs.

    Returns:
        The two functions, and which parameters of ``backward`` the second one reads.

    Raises:
        UnsupportedOperatorError: a value that the gradients of weights read cannot be kept.
    """
    joint = as_joint(parts, backward, inputs)
    coloring = color_backward(joint)
    position = {p: i for i, p in enumerate(joint.mod["joint"].params)}
    halved = split(joint, coloring)
    halved = replace(halved, mod=run_passes(halved.mod, [ReturnWhole()], []))
    return halved, tuple(position[v] for v in coloring.reads)


def as_joint(parts: SplitModule, backward: relax.Function, inputs: Sequence[int]) -> JointModule:
    """Return a backward function as a joint function without cotangents.

    Its outputs are the gradients of inputs, its gradients are those of weights; arguments as for
    :func:`in_halves`.
    """
    mod = tvm.IRModule({"backward": backward})
    passes: list[AnyPass] = [RemoveBorders(), SeparateConvolutionGradients(), *tidy_passes()]
    backward = run_passes(mod, passes, [])["backward"]
    weights = _others(parts, inputs)
    results = flat_results(backward)
    bindings = [b for block in backward.body.blocks for b in block.bindings]
    function = build_function(
        "joint", backward.params, bindings, [results[i] for i in (*inputs, *weights)]
    )
    return JointModule(
        mod=tvm.IRModule({"joint": function}),
        primals=tuple(p.name for p in function.params),
        cotangents=(),
        cotangent_of=(),
        num_outputs=len(inputs),
        wanted=tuple(parts.wanted[i] for i in weights),
        gradient_reads=(_NO_GRADIENTS,) * len(weights),
        # The engine may write into gradients of inputs, so that the second function reads copies.
        saved=SavedMemory({}, {}, frozenset(), frozenset(range(len(inputs)))),
    )


def _others(parts: SplitModule, inputs: Sequence[int]) -> tuple[int, ...]:
    of_inputs = set(inputs)
    return tuple(i for i in range(len(parts.wanted)) if i not in of_inputs)
