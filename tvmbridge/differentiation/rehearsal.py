"""Eager replay: run the module's own forward again, in eager PyTorch, on other tensors.

The captured graph does not fully determine the gradient: torch.export drops ``detach``,
``no_grad`` regions and the backward of custom autograd functions. An eager replay on fake tensors,
recorded by PyTorch's autograd, has this information.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.standins import tensors_replaced
from tvmbridge.calls.views import laid_out, shares_elements
from tvmbridge.core.autocast import without_autocast
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.errors import BridgeError, UnsupportedOperatorError
from tvmbridge.core.kernel_settings import cudnn_switched_off
from tvmbridge.core.number_inputs import number_inputs, with_tensors
from tvmbridge.core.structure import unflatten
from tvmbridge.core.torch_private import FakeTensorMode, pytree
from tvmbridge.core.types import InputDescriptor, InputKind, OutputKind, TensorSpec
from tvmbridge.graph_capture.observe.refusal import first_paragraph
from tvmbridge.graph_capture.observe.undo import current_undo
from tvmbridge.graph_capture.trace.answers import known_values
from tvmbridge.graph_capture.trace.functions import functions_replaced
from tvmbridge.graph_capture.trace.held_numbers import HeldOfCall
from tvmbridge.graph_capture.trace.left import data_dependent_assigned
from tvmbridge.graph_capture.trace.number_calls import numbers_in_backward
from tvmbridge.graph_capture.traced_forward import TracedForward


class Rehearsal:
    """Replays a module's forward as a function of its primals (inputs, parameters, buffers).

    A call returns the computed outputs in the order of ``captured.outputs``: final values of
    written buffers and inputs, and results. It leaves the module's own tensors, attributes and
    random state unchanged.

    - ``inputs``: descriptions of the primals.
    - ``originals``: the tensors of the sample and the module that the primals replace.
    - ``outputs``: descriptions of the computed outputs.
    - ``mode``: the fake tensor mode of the primals.
    - ``stand_ins``: the tensors that the last call passed for the primals.

    Args:
        captured: the captured graph, which determines the order of primals and outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        captured: CapturedGraph,
    ) -> None:
        self.module = module
        self.captured = captured
        self.inputs = captured.primals
        self.outputs = [o for o in captured.outputs if o.is_computed]
        leaves, self.structure = pytree.tree_flatten((args, dict(kwargs)))
        self.leaves, self.numbers = with_tensors(leaves), number_inputs(leaves)
        self.originals = [self._original(d) for d in self.inputs]
        self.written = {o.target for o in captured.outputs if o.kind is OutputKind.INPUT_MUTATION}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Clones of the primals that forward writes, otherwise the primals themselves.
        self.stand_ins: list[torch.Tensor] = []
        self._held: HeldOfCall | None = None

    @property
    def wanted(self) -> list[int]:
        """The positions of the primals that require a gradient."""
        return [i for i, d in enumerate(self.inputs) if d.requires_grad]

    def _original(self, descriptor: InputDescriptor) -> torch.Tensor:
        if descriptor.kind is InputKind.USER:
            value: torch.Tensor = self.leaves[descriptor.position or 0]
            return value
        path, _, name = (descriptor.target or "").rpartition(".")
        return getattr(self.module.get_submodule(path), name)

    def fakes(self) -> list[torch.Tensor]:
        """Return fake primals with the sample's shapes and strides; none requires a gradient."""
        return [self.mode.from_tensor(t.detach(), static_shapes=True) for t in self.originals]

    def leaves_of(self, primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Detach ``primals`` to leaves of a new autograd graph; wanted ones require a gradient."""
        detached = [p.detach() for p in primals]
        for position in self.wanted:
            detached[position].requires_grad_()
        return detached

    def __call__(self, primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run forward on ``primals``, and return the computed outputs.

        Raises:
            UnsupportedOperatorError: forward fails, or its results differ in shape or dtype from
                the captured outputs.
        """
        leaves = list(self.leaves)
        held: dict[int, torch.Tensor] = {}
        self.stand_ins = []
        for descriptor, original, primal in zip(self.inputs, self.originals, primals, strict=True):
            if descriptor.kind is InputKind.BUFFER or descriptor.name in self.written:
                primal = _cloned(primal)
            self.stand_ins.append(primal)
            if descriptor.kind is InputKind.USER:
                leaves[descriptor.position or 0] = primal
            else:
                held[id(original)] = primal
        args, kwargs = unflatten(leaves, self.structure)
        values = known_values(self.module, *unflatten(self.leaves, self.structure))
        with ExitStack() as stack:
            stack.enter_context(without_autocast())
            stack.enter_context(torch.enable_grad())
            # cuDNN's batch norm writes statistics that its schema does not declare.
            stack.enter_context(cudnn_switched_off())
            stack.enter_context(functions_replaced(self.module, on_fakes=True))
            stack.enter_context(tensors_replaced(self.module, held))
            stack.enter_context(data_dependent_assigned())
            stack.enter_context(current_undo().run())
            forward = TracedForward(
                module=self.module,
                is_compiling=self.captured.assumptions.is_compiling,
                differentiated=any(p.requires_grad for p in primals),
                values=values,
                bases=self.captured.convention.bases,
                autocast=self.captured.assumptions.autocast,
                left=[key for key in self.captured.convention.left if len(key) == 2],
                numbers=self.numbers,
            )
            results = pytree.tree_leaves(_called(forward, args, kwargs))
            self._held = forward.held
            return self._ordered(results, leaves)

    def backward(self) -> AbstractContextManager[None]:
        """Return the context in which the results of the last call are differentiated."""
        if self._held is None or not (self.numbers or self._held.ranges):
            return nullcontext()
        return numbers_in_backward(self.numbers, self._held)

    def _ordered(self, results: list[Any], leaves: list[Any]) -> list[torch.Tensor]:
        """Return written buffers, written inputs and results in the order of captured outputs."""
        users = iter(results)
        positions = {d.name: d.position or 0 for d in self.inputs}
        ordered: list[torch.Tensor] = []
        for output in self.captured.outputs:
            if output.kind is OutputKind.BUFFER_MUTATION:
                path, _, name = (output.target or "").rpartition(".")
                value = getattr(self.module.get_submodule(path), name)
            elif output.kind is OutputKind.INPUT_MUTATION:
                value = leaves[positions[output.target or ""]]
            else:
                value = next(users, None)
            if output.spec is None or output.alias is not None:
                continue
            if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (
                torch.Size(output.spec.shape),
                output.spec.dtype,
            ):
                found = TensorSpec.of(value) if isinstance(value, torch.Tensor) else value
                raise UnsupportedOperatorError(
                    f"run again, forward returns {found} for {output.name}, captured as "
                    f"{output.spec}"
                )
            ordered.append(value)
        return ordered


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Clone a tensor with its strides, since random draws into it depend on the memory order."""
    return tensor.clone() if shares_elements(tensor) else laid_out(tensor, tensor.stride())


def _called(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return forward(*args, **kwargs)
    except BridgeError:
        raise
    except Exception as error:
        raise UnsupportedOperatorError(
            f"forward cannot be run again on fake tensors: {first_paragraph(error)}"
        ) from error
