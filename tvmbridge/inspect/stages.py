"""The graphs of a module at each stage of compilation, for drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import torch
import tvm
from torch import nn
from tvm import relax

from tvmbridge.calls.standins import anything_requires_grad
from tvmbridge.coloring import Coloring
from tvmbridge.compiler.combining import Combining
from tvmbridge.compiler.lowering import LoweredModule, lower_module
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.compiler.split import colored, split
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.turns import compiling
from tvmbridge.differentiation.differentiate import JointModule
from tvmbridge.frontend import to_relax
from tvmbridge.graph_capture.capture import capture, normalize_sample
from tvmbridge.graph_capture.surroundings import tracing_here, undisturbed
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.places import with_places
from tvmbridge.pipeline import lowering_passes, run_passes


@dataclass(frozen=True)
class Drawable:
    """The graph of one stage.

    - ``graph``: the module or function to draw.
    - ``coloring``: the colors of a joint function; None for other functions.
    - ``gradients``: for each result that is a gradient, by its number, the name of its parameter
      or input.
    """

    graph: tvm.IRModule | relax.Function
    coloring: Coloring | None = None
    gradients: Mapping[int, str] = field(default_factory=dict)


class Stages:
    """The stages of a module in its present mode; the module is not changed."""

    def __init__(
        self, module: nn.Module, sample_input: Any, options: CompileOptions | None = None
    ) -> None:
        self.options = options or CompileOptions()
        args, kwargs = normalize_sample(sample_input, None)
        self.sample = Sample.of(module, args, kwargs)
        self.needs_grad = module.training and anything_requires_grad(module, (args, kwargs))

    def draw(self, name: str) -> Drawable:
        """Return the graph of the stage ``name``, one of :data:`STAGES`.

        Raises:
            BridgeError: the module cannot be lowered, or it has no such stage.
            KeyError: ``name`` is not among :data:`STAGES`.
        """
        with compiling(), self._apart():
            return STAGES[name](self)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        with tracing_here(), torch.random.fork_rng(), undisturbed():
            yield

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the module's stages; without gradients it has no joint and no backward.

        Raises:
            BridgeError: the module cannot be lowered.
        """
        with compiling(), self._apart():
            differentiated = self._lowered.derivation is not None
        return tuple(n for n in STAGES if differentiated or n not in ("joint", "backward"))

    def captured(self) -> Drawable:
        """Return the Relax module as it is imported from PyTorch's graph."""
        args, kwargs, _ = self.sample.arguments()
        made = capture(self.sample.module, args, sample_kwargs=kwargs, needs_grad=self.needs_grad)
        return Drawable(to_relax(made))

    def passes(self) -> Drawable:
        """Return the Relax module after the graph passes.

        In training by TVM's Gradient it is forward before differentiation; in training by PyTorch's
        derivatives it is the joint function.
        """
        derivation = self._lowered.derivation
        if derivation is None:
            return Drawable(self._lowered.mod)
        if derivation.source != "relax":
            return Drawable(derivation.joint.mod)
        return Drawable(run_passes(derivation.imported.mod, lowering_passes(), []))

    def joint(self) -> Drawable:
        """Return the joint function with its coloring."""
        joint = self._joint
        gradients = dict(enumerate(map(self._titled, joint.wanted), joint.num_outputs))
        return Drawable(joint.mod["joint"], self._colored()[1], gradients)

    def forward(self) -> Drawable:
        """Return the forward function that is built."""
        if self._lowered.derivation is None:
            return Drawable(self._lowered.mod["forward"])
        return Drawable(self._split("forward"))

    def backward(self) -> Drawable:
        """Return the backward function that is built."""
        gradients = dict(enumerate(map(self._titled, self._joint.wanted)))
        return Drawable(self._split("backward"), gradients=gradients)

    def _split(self, name: str) -> relax.Function:
        return split(*self._colored()).mod[name]

    def _colored(self) -> tuple[JointModule, Coloring]:
        return colored(self._joint, self.options, self._lowered.captured.device)

    def _titled(self, name: str) -> str:
        """Return the user's name of a parameter or an input of the joint function."""
        inputs = self._lowered.captured.inputs
        return next((d.target or d.name for d in inputs if d.name == name), name)

    @cached_property
    def _joint(self) -> JointModule:
        """The joint function before the split, with the submodule of each call recorded in it."""
        derivation = self._lowered.derivation
        if derivation is None:
            raise BridgeError(
                "nothing is differentiated, so that there is no such stage: the factory must "
                "return a module in train mode, with an output that requires a gradient"
            )
        combining = Combining.of(
            derivation.captured, ModulePacks(self.sample.module), self.options, []
        )
        holders = {name: target.rpartition(".")[0] for name, target in combining.targets.items()}
        return with_places(combining.joint(derivation.joint)[0], holders)

    @cached_property
    def _lowered(self) -> LoweredModule:
        args, kwargs, _ = self.sample.arguments()
        return lower_module(
            CompileRequest(
                self.sample.module,
                args,
                kwargs,
                needs_grad=self.needs_grad,
                options=self.options,
                packing=None if self.needs_grad else ModulePacks(self.sample.module),
            )
        )


#: The stages by their names, in order.
STAGES: Final[Mapping[str, Callable[[Stages], Drawable]]] = MappingProxyType(
    {
        "captured": Stages.captured,
        "passes": Stages.passes,
        "joint": Stages.joint,
        "forward": Stages.forward,
        "backward": Stages.backward,
    }
)
