"""What the functions of a lowered module get and return, by value and by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tvmbridge.compiler.lowering import LoweredModule
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.types import (
    InputDescriptor,
    InputKind,
    OutputAlias,
    OutputDescriptor,
    OutputKind,
)
from tvmbridge.graph_capture.memory.aliasing import made_again
from tvmbridge.graph_capture.memory.views import laid_out
from tvmbridge.inspect.compare.eager import state_name
from tvmbridge.inspect.compare.inputs import base_name, title
from tvmbridge.inspect.compare.sample import Sample
from tvmbridge.inspect.compare.trace import TraceBuilder


def draws_of(sample: Sample, lowered: LoweredModule) -> dict[str, torch.Tensor]:
    """The values of the draws by name; masks in the dtype that the graph takes.

    Raises:
        UnsupportedOperatorError: the graph does not draw what the module draws.
    """
    noise, draws = lowered.captured.noise, sample.draws or []
    if [n.spec.shape for n in noise] != [tuple(d.shape) for d in draws]:
        raise UnsupportedOperatorError(
            "the captured graph draws other random numbers than the module"
        )
    return {n.name: d.to(n.spec.dtype).contiguous() for n, d in zip(noise, draws, strict=True)}


@dataclass
class CallingConvention:
    """The arguments and the results of a sample's graphs.

    Args:
        sample: the module and its arguments.
        lowered: the graphs.
        draws: the random numbers by name.
    """

    sample: Sample
    lowered: LoweredModule
    draws: dict[str, torch.Tensor]

    # What the functions get ------------------------------------------------------------------

    @property
    def inputs(self) -> list[InputDescriptor]:
        """The user inputs, parameters and buffers, in calling order."""
        return [d for d in self.lowered.captured.inputs if d.kind is not InputKind.CONSTANT]

    def tensor(self, descriptor: InputDescriptor) -> torch.Tensor:
        """The value of an input."""
        if descriptor.kind is InputKind.USER:
            value: torch.Tensor = self.sample.leaves[descriptor.position or 0]
            return value.detach().contiguous()
        path, _, name = (descriptor.target or "").rpartition(".")
        return getattr(self.sample.module.get_submodule(path), name).detach().contiguous()

    def primals(self) -> list[torch.Tensor]:
        """Inputs, state, draws and packed weights, in calling order."""
        plain = [*(self.tensor(d) for d in self.inputs), *self.noise(False)]
        return [*plain, *self.noise(True), *self.packed()]

    def packed(self) -> list[torch.Tensor]:
        """The packed weights, concatenated here: the module's own stay where they are."""
        module = self.sample.module
        return [
            torch.cat([module.get_parameter(name).detach() for name in names])
            for names in self.lowered.packs
        ]

    def noise(self, masks: bool) -> list[torch.Tensor]:
        """The masks of dropout, or all other draws, in program order."""
        return [
            self.draws[n.name]
            for n in self.lowered.captured.noise
            if (n.drop_probability is not None) is masks
        ]

    def cotangents(self) -> list[torch.Tensor]:
        """The gradients that arrive, in the order of the joint function."""
        derivation = self.lowered.derivation
        if derivation is None:
            return []
        names = self.result_names()
        return [self.sample.cotangents[names[i]] for i in derivation.joint.cotangent_of]

    # What they return -------------------------------------------------------------------------

    def result_names(self) -> list[str]:
        """The names of the computed outputs, in order."""
        return [name for name, output in self.outputs() if output.is_computed]

    def gradient_names(self) -> list[str]:
        """The names of the gradients, in the order of the joint function."""
        derivation = self.lowered.derivation
        by_name = {d.name: d for d in self.inputs}
        wanted = () if derivation is None else derivation.joint.wanted
        return [f"gradient of {title(by_name[name])}" for name in wanted]

    def outputs(self) -> Iterator[tuple[str, OutputDescriptor]]:
        """The outputs of the captured graph with the names that the report gives them."""
        users = iter(self.sample.output_names)
        by_name = {d.name: d for d in self.lowered.captured.inputs}
        for output in self.lowered.captured.outputs:
            if output.kind is OutputKind.USER:
                yield next(users), output
            elif output.kind is OutputKind.INPUT_MUTATION:
                yield state_name(title(by_name[output.target or ""])), output
            else:
                yield state_name(output.target or ""), output

    def add_returned_inputs(self, builder: TraceBuilder) -> None:
        """Outputs that are not computed: inputs and state given back, views of them or of others.

        What is written during the call is seen in them.
        """
        users = [name for name, output in self.outputs() if output.kind is OutputKind.USER]
        outputs = sorted(self.outputs(), key=lambda pair: pair[1].kind is not OutputKind.USER)
        aliased = [(n, o.alias) for n, o in outputs if o.alias is not None]
        # Views of outputs come after what they are views of, exchanged buffers after these.
        for name, alias in sorted(aliased, key=lambda pair: pair[1].kind is None):
            base = users[int(alias.key)] if alias.kind is None else state_name(base_name(alias))
            number = builder.results.get(base)
            if number is None:
                number = builder.given(base, self._base(alias))
            if alias.shape is not None:
                whole = laid_out(builder.steps[number].value, alias.base_stride)
                number = builder.computed(name, "view", "", (number,), made_again(alias, whole))
            builder.results[name] = number

    def _base(self, alias: OutputAlias) -> torch.Tensor:
        if alias.kind is InputKind.USER:
            value: torch.Tensor = self.sample.leaves[int(alias.key)]
            return value.detach()
        path, _, name = str(alias.key).rpartition(".")
        held: torch.Tensor = getattr(self.sample.module.get_submodule(path), name)
        return held.detach()
