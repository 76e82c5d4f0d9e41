"""PyTorch's recurrent functions as opaque operators, each with an operator for its backward.

The functions are composite: a trace would decompose them into their time steps. As operators they
run the same kernels as in eager PyTorch. Forward saves only inputs and outputs. Backward runs the
function again under autograd, except for layers that ``recurrent_backward.py`` differentiates from
their outputs. LSTM layers that keep a workspace for backward have an operator of their own, in
``recurrent_workspace.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tvmbridge.backends import backend_of
from tvmbridge.core.custom_operator import NAMESPACE
from tvmbridge.core.torch_private import (
    DisablePythonDispatcher,
    disable_current_modes,
    mkldnn_enabled,
    set_mkldnn_enabled,
)
from tvmbridge.graph_capture.trace.recurrent_backward import layer_gradients

# - ``batch_first`` applies to the input alone: the outputs and the input's gradient have their
#   steps first, which is their order in memory in eager PyTorch.
# - ``learned`` (weights require a gradient) and ``recorded`` (autograd records) decide which kernel
#   PyTorch chooses, even if no gradient is computed.
# - ``autocast`` is the dtype of autocast, or None.
_PARAMETERS = (
    "Tensor input, Tensor[] states, Tensor[] weights, bool has_biases, int num_layers, "
    "bool bidirectional, bool batch_first, bool learned, bool recorded, ScalarType? autocast"
)
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
Tensors = Sequence[torch.Tensor]


def _call(
    function: Callable[..., Any],
    input: torch.Tensor,
    states: Tensors,
    weights: Tensors,
    settings: Sequence[Any],
    autocast: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:
    """Call PyTorch's ``function`` without dropout; the steps are the input's first dimension."""
    has_biases, num_layers, bidirectional = settings
    given: Any = states if function is torch.lstm else states[0]
    flags = (has_biases, num_layers, 0.0, False, bidirectional, False)
    with torch.autocast(input.device.type, autocast, enabled=autocast is not None):
        results: tuple[torch.Tensor, ...] = function(input, given, weights, *flags)
    return results


def _define(function: Callable[..., Any]) -> Any:
    """Register and return an operator for PyTorch's recurrent ``function``, without dropout."""
    name = f"{function.__name__}_stack"

    def run(input: torch.Tensor, states: Tensors, weights: Tensors, *flags: Any) -> Any:
        *settings, batch_first, learned, recorded, autocast = flags
        weights = [weight.detach().requires_grad_(learned) for weight in weights]
        steps = steps_first(input, batch_first)
        # In float16, on some processors, oneDNN's layer is used only if autograd does not record.
        by_mode = torch.float16 in (input.dtype, autocast)
        with torch.set_grad_enabled(by_mode and recorded):
            results = _call(function, steps, states, weights, settings, autocast)
        return tuple(result.detach() for result in results)

    def fake(
        input: torch.Tensor, states: Tensors, weights: Tensors, *flags: Any
    ) -> tuple[torch.Tensor, ...]:
        _, _, bidirectional, batch_first, _, _, autocast = flags
        steps = steps_first(input, batch_first)
        size = states[0].shape[-1] * (2 if bidirectional else 1)
        results = [steps.new_empty([*steps.shape[:2], size]), *map(empty_like, states)]
        if autocast is not None:
            # Run the function on one step of one sequence to get the dtypes of its results.
            shapes = [[1, 1, input.shape[-1]], *([len(s), 1, s.shape[-1]] for s in states)]
            with _as_in_eager_pytorch():
                x, *zeros = map(_zeros, shapes, [input, *states])
                found = run(x, zeros, [_zeros(w.shape, w) for w in weights], *flags)
            results = [r.to(f.dtype) for r, f in zip(results, found, strict=True)]
        return tuple(results)

    results = ", ".join(["Tensor"] * (3 if function is torch.lstm else 2))
    _LIBRARY.define(f"{name}({_PARAMETERS}) -> ({results})")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    _register_autograd(name, _define_backward(function, f"{name}_backward"))
    return getattr(torch.ops.tvmbridge, name).default


def _define_backward(function: Callable[..., Any], name: str) -> Any:
    """Register and return the operator that computes gradients of PyTorch's ``function``.

    It returns gradients of the inputs at the positions ``wanted``; each state and each weight has
    a position of its own.
    """

    def run(
        gradients: Sequence[torch.Tensor | None],
        wanted: Sequence[int],
        output: torch.Tensor,
        *args: Any,
    ) -> list[torch.Tensor]:
        input, states, weights, *settings, batch_first, _, _, autocast = args
        steps = steps_first(input, batch_first)
        if settings[1] == 1 and differentiated_from_outputs(function, steps, autocast):
            each = layer_gradients(gradients, output, steps, states[0], weights)
            return unaliased([each[place] for place in wanted], gradients)
        given = (steps, states, weights)
        found = gradients_by_autograd(function, gradients, wanted, *given, settings, autocast)
        return unaliased(found, gradients)

    def fake(gradients: Any, wanted: Sequence[int], output: Any, *args: Any) -> list[torch.Tensor]:
        input, states, weights, _, _, _, batch_first, *_ = args
        steps = steps_first(input, batch_first)
        return [empty_like([steps, *states, *weights][place]) for place in wanted]

    _LIBRARY.define(
        f"{name}(Tensor?[] gradients, int[] wanted, Tensor output, {_PARAMETERS}) -> Tensor[]"
    )
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.tvmbridge, name).default


def gradients_by_autograd(
    function: Callable[..., Any],
    gradients: Sequence[torch.Tensor | None],
    wanted: Sequence[int],
    input: torch.Tensor,
    states: Tensors,
    weights: Tensors,
    settings: Sequence[Any],
    autocast: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:
    """Run the function again under autograd, and return gradients of the inputs.

    Args:
        wanted: the positions of the inputs whose gradients are returned; each state and each
            weight has a position of its own.
        settings: ``has_biases``, ``num_layers`` and ``bidirectional``.
    """
    leaves = [leaf.detach() for leaf in (input, *states, *weights)]
    operands = [leaves[place].requires_grad_() for place in wanted]
    split = 1 + len(states)
    given = leaves[0], leaves[1:split], leaves[split:]
    with torch.enable_grad():
        results = _call(function, *given, settings, autocast)
    pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None]
    outputs, arriving = zip(*pairs, strict=True)
    found: tuple[torch.Tensor, ...] = torch.autograd.grad(
        outputs, operands, arriving, materialize_grads=True
    )
    return found


def differentiated_from_outputs(
    function: Any, input: torch.Tensor, autocast: torch.dtype | None
) -> bool:
    """Whether :func:`layer_gradients` computes the gradients of a layer of ``function``.

    It does for a GRU or a tanh RNN on the CPU, but not in half precision or under autocast. There
    the function runs again instead, so that gradients are rounded as in eager PyTorch.
    """
    exact = autocast is None and input.dtype in (torch.float32, torch.float64)
    return (
        exact
        and function in (torch.gru, torch.rnn_tanh)
        and backend_of(input.device).recurs_by_onednn
    )


def unaliased(results: Tensors, others: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return ``results``, each contiguous and in its own memory, which ``others`` do not share.

    oneDNN returns the gradients of two biases in one tensor.
    """
    seen = {other.untyped_storage().data_ptr() for other in others if other is not None}
    own = []
    for result in results:
        memory = result.untyped_storage().data_ptr()
        own.append(result.clone() if memory in seen else result.contiguous())
        seen.add(memory)
    return own


def _register_autograd(name: str, differentiate: Callable[..., list[torch.Tensor]]) -> None:
    """Register ``differentiate``, the backward operator, as gradient of the operator ``name``."""

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        input, states, weights, *ctx.flags = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[0], input, *states, *weights)
        ctx.states = len(states)

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        output, input, *others = ctx.saved_tensors
        states, weights = others[: ctx.states], others[ctx.states :]
        of_input, of_states, of_weights = ctx.needs_input_grad[:3]
        needed = [of_input, *of_states, *of_weights]
        projected = ctx.states == 2 and states[0].shape[-1] != states[1].shape[-1]
        if projected and gradients[:2] == (None, None) and len(output) == 1:
            # The cell state after one step does not depend on the projection, the last weight.
            has_biases, _, bidirectional, *_ = ctx.flags
            for direction in range(2 if bidirectional else 1):
                needed[-1 - direction * (5 if has_biases else 3)] = False
        wanted = [place for place, is_needed in enumerate(needed) if is_needed]
        found: dict[int, torch.Tensor] = {}
        if wanted and any(gradient is not None for gradient in gradients):
            args = (output, input, states, weights, *ctx.flags)
            found = dict(zip(wanted, differentiate(list(gradients), wanted, *args), strict=True))
        if 0 in found:
            found[0] = steps_first(found[0], ctx.flags[3])
        each = [found.get(place) for place in range(len(needed))]
        nothing = [None] * len(ctx.flags)
        return each[0], each[1 : 1 + ctx.states], each[1 + ctx.states :], *nothing

    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=set_up, lib=_LIBRARY
    )


@contextmanager
def _as_in_eager_pytorch() -> Iterator[None]:
    """Leave the modes of the trace and turn oneDNN on, as in eager PyTorch, within the context.

    torch.export turns oneDNN off.
    """
    before = mkldnn_enabled()
    set_mkldnn_enabled(True)
    try:
        with disable_current_modes(), DisablePythonDispatcher(), torch.no_grad():
            yield
    finally:
        set_mkldnn_enabled(before)


def steps_first(tensor: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Return ``tensor`` with its first two dimensions exchanged if ``batch_first``."""
    return tensor.transpose(0, 1) if batch_first else tensor


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


STACKS: dict[Any, Any] = {
    function: _define(function)
    for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
}
