"""The eager reference of a call: the module's own forward on copies, with equal random draws."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tvmbridge.backends import backend_of
from tvmbridge.calls.arguments import Arguments, ArgumentWatch
from tvmbridge.calls.standins import tensors_of
from tvmbridge.core.autocast import autocast_now, under_autocast, without_autocast
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import IntermediateBase
from tvmbridge.inspect.compare.reference import named_bases, output_names
from tvmbridge.inspect.compare.sample import Sample, state_name
from tvmbridge.runtime.dispatcher import Dispatcher

GeneratorStates = list[tuple[torch.Generator, torch.Tensor]]


def generator_states(device: torch.device) -> GeneratorStates:
    """Return the default generators that a call may draw from, each with its present state."""
    generators = [torch.default_generator, *backend_of(device).generators(device)]
    return [(g, g.get_state()) for g in generators]


@contextmanager
def restarted(states: GeneratorStates) -> Iterator[None]:
    """Set the generators to ``states`` in this context, and restore their states afterwards."""
    now = [(g, g.get_state()) for g, _ in states]
    for generator, state in states:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in now:
            generator.set_state(state)


@dataclass(frozen=True)
class CallOutcome:
    """The results and effects of one call of forward.

    - ``returned``: the value that forward returned.
    - ``leaves``: the leaves of the returned value and of changed arguments, by name.
    - ``structure``: the pytree structure of ``leaves``.
    - ``state``: the tensors of the module and of the arguments after the call, by name.
    - ``bases``: the intermediate view bases of the outputs: tensors that are no outputs, but whose
      views are.
    """

    returned: Any
    leaves: Mapping[str, Any]
    structure: Any
    state: Mapping[str, Any]
    bases: Mapping[str, torch.Tensor]

    @property
    def differentiable(self) -> Mapping[str, Any]:
        """The values that gradients may arrive for, by name: leaves and intermediate bases."""
        return {**self.leaves, **self.bases}


def observed_call(
    forward: Callable[..., Any],
    module: nn.Module,
    arguments: Arguments,
    inputs: Sequence[Any],
    bases: Sequence[IntermediateBase] = (),
) -> CallOutcome:
    """Call ``forward`` on ``arguments``, and return its results and effects."""
    returned: list[Any] = []

    def keeping(*args: Any, **kwargs: Any) -> Any:
        returned.append(forward(*args, **kwargs))
        return returned[0]

    args, kwargs = arguments
    watched = ArgumentWatch(keeping, checks=False)(*args, **kwargs)
    leaves, structure = pytree.tree_flatten(watched)
    results = dict(zip(output_names(watched), leaves, strict=True))
    tensors = {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    state = {**tensors, **tensors_of(module)}
    return CallOutcome(
        returned[0],
        results,
        structure,
        {state_name(name): value for name, value in state.items()},
        named_bases(results, bases),
    )


class Twin:
    """The eager reference of a call: the module's own forward on a copy of the module.

    It is constructed before the call, and runs at once on copies of the arguments, with its own
    autograd graph. The caller's module, arguments and generators are not changed.

    - ``sample``: the copies of module and arguments before the call.
    - ``states``, ``states_after``: the states of the generators before and after the call.
    - ``error``: the error that forward raised; None if it returned.
    - ``outcome``: the results and effects of forward, if it returned.

    Args:
        bases: intermediate view bases that gradients may arrive for.

    Raises:
        Exception: the module cannot be copied, or an attribute is a closure over the module: the
            copy's closure would still read the original.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Arguments,
        device: torch.device,
        bases: Sequence[IntermediateBase],
    ) -> None:
        args, kwargs = arguments
        closure = _closure_over(module)
        if closure is not None:
            raise ValueError(f"{closure} is a closure over it, which a copy would share")
        self.sample = Sample.of(module, tuple(args), kwargs)
        self.states = generator_states(device)
        self.error: Exception | None = None
        copied = copy.deepcopy(self.sample.module)
        own_args, own_kwargs, inputs = self.sample.arguments()
        self._own = replace(self.sample, module=copied, leaves=inputs)
        autocast = autocast_now()
        with restarted(self.states), without_autocast(), under_autocast(autocast):
            try:
                own_arguments = (own_args, own_kwargs)
                self.outcome = observed_call(copied.forward, copied, own_arguments, inputs, bases)
            except Exception as error:
                self.error = error
            self.states_after = generator_states(device)

    def gradients(
        self, cotangents: Mapping[str, torch.Tensor], wanted: Sequence[str]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of ``wanted`` for the outputs' cotangents; None if none flows."""
        outputs = {n: o for n, o in self.outcome.differentiable.items() if n in cotangents}
        flowing = [name for name, output in outputs.items() if output.requires_grad]
        leaves = [self._own.tensor(name) for name in wanted]
        if not flowing:
            return [None] * len(leaves)
        return list(
            torch.autograd.grad(
                [outputs[name] for name in flowing],
                leaves,
                [cotangents[name] for name in flowing],
                retain_graph=True,
                allow_unused=True,
            )
        )


def _closure_over(module: nn.Module) -> str | None:
    """Return the name of an attribute that is a closure over the module or its parts, or None."""
    own = {id(t) for t in (*module.modules(), *module.parameters(), *module.buffers())}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Dispatcher):
                value = value.code.original
            if isinstance(value, types.FunctionType) and _reads(value, own):
                return f"{path}.{name}".lstrip(".")
    return None


def _reads(function: types.FunctionType, own: Collection[int]) -> bool:
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # the cell has no value yet
            continue
        if id(held) in own or id(getattr(held, "__self__", None)) in own:
            return True
        if isinstance(held, types.FunctionType) and held is not function and _reads(held, own):
            return True
    return False
