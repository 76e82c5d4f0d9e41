"""An operator for one float32 LSTM layer on the CPU, whose backward does not run it again.

oneDNN's training kernel stores the gates in a workspace, which its backward reads. The workspace is
an additional result of the operator. Only oneDNN knows its length, so oneDNN runs once during the
trace to get it. If a call yields no such workspace, the result is zeros, and backward runs the
layer again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tvmbridge.backends import backend_of
from tvmbridge.core.custom_operator import NAMESPACE
from tvmbridge.core.decisions import sizes_vary
from tvmbridge.core.torch_private import (
    DisablePythonDispatcher,
    disable_current_modes,
    mkldnn_enabled,
)
from tvmbridge.graph_capture.trace.recurrent_ops import (
    STACKS,
    empty_like,
    gradients_by_autograd,
    steps_first,
    unaliased,
)

Tensors = Sequence[torch.Tensor]
Optionals = Sequence[torch.Tensor | None]

# ``length`` is the length of the workspace of one direction, in bytes.
_PARAMETERS = (
    "Tensor input, Tensor[] states, Tensor[] weights, bool has_biases, bool bidirectional, "
    "bool batch_first, int length"
)
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
# The number that oneDNN's layers have for an LSTM.
_LSTM = 2
# A workspace begins with gates. If all of its first bytes, this many, are zero, there is none.
_LOOKED_AT = 4096


def workspace_length(
    function: Any, input: torch.Tensor, states: Tensors, autocast: torch.dtype | None
) -> int:
    """Return the length in bytes of oneDNN's workspace for one direction of a layer.

    The input has its steps first. Return 0 if the layer has no workspace or its sizes are unknown;
    the operator of this module is then not used.
    """
    sizes = [*input.shape, *(state.shape[-1] for state in states)]
    if function is not torch.lstm or autocast is not None or input.dtype is not torch.float32:
        return 0
    if sizes_vary() or not all(isinstance(size, int) and size > 0 for size in sizes):
        return 0
    is_onednn = backend_of(input.device).recurs_by_onednn and torch.backends.mkldnn.is_available()
    if not is_onednn or len(sizes) != 5 or sizes[3] != sizes[4]:
        return 0
    return _length(*sizes[:4], torch.get_num_threads())


@functools.lru_cache(maxsize=256)
def _length(steps: int, batch: int, features: int, size: int, _threads: int) -> int:
    """Return the length of the workspace that oneDNN returns for a layer of zeros, or 0."""
    with disable_current_modes(), DisablePythonDispatcher():
        x, state = torch.zeros(steps, batch, features), torch.zeros(batch, size)
        weights = [torch.zeros(4 * size, n) for n in (features, size)]
        workspace = _forward(x, state, state, weights, False, (False, False))[3]
    return 0 if workspace is None else workspace.numel()


def _forward(
    x: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    weights: Tensors,
    reverse: bool,
    settings: tuple[bool, bool],
) -> Any:
    """Run one direction of the layer by oneDNN.

    Returns:
        The outputs, the two final states, and the workspace or None.
    """
    has_biases, bidirectional = settings
    flags = (hidden.shape[-1], 1, has_biases, bidirectional, False, True)
    four = weights if has_biases else [*weights, *weights]
    with torch.enable_grad():  # Otherwise there is no workspace.
        layer = torch.ops.aten.mkldnn_rnn_layer.default
        return layer(x, *four, hidden, cell, reverse, [], _LSTM, *flags)


def _run(
    input: torch.Tensor,
    states: Tensors,
    weights: Tensors,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    length: int,
) -> tuple[torch.Tensor, ...]:
    directions = 2 if bidirectional else 1
    nothing = torch.zeros(directions, length, dtype=torch.uint8)
    if not mkldnn_enabled():
        settings = (has_biases, 1, bidirectional, batch_first, True, True, None)
        return *STACKS[torch.lstm](input, states, weights, *settings), nothing
    x, count = steps_first(input, batch_first).contiguous(), len(weights) // directions
    found = [
        _forward(
            x,
            states[0][i],
            states[1][i],
            weights[i * count : (i + 1) * count],
            i == 1,
            (has_biases, bidirectional),
        )
        for i in range(directions)
    ]
    outputs, hidden, cells, kept = zip(*found, strict=True)
    if any(w is None or w.numel() != length for w in kept):
        workspace = nothing
    else:
        workspace = torch.stack(kept) if bidirectional else kept[0].view(1, -1)
    output = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return output.detach(), torch.stack(hidden).detach(), torch.stack(cells).detach(), workspace


def _fake(
    input: torch.Tensor, states: Tensors, weights: Tensors, *flags: Any
) -> tuple[torch.Tensor, ...]:
    _, bidirectional, batch_first, length = flags
    x, directions = steps_first(input, batch_first), 2 if bidirectional else 1
    output = x.new_empty([*x.shape[:2], directions * states[0].shape[-1]])
    workspace = x.new_empty([directions, length], dtype=torch.uint8)
    return output, *map(empty_like, states), workspace


def _run_backward(
    gradients: Optionals, wanted: Sequence[int], results: Tensors, *args: Any
) -> list[torch.Tensor]:
    """Return the gradients of the inputs ``wanted``; ``results`` include the workspace."""
    input, states, weights, has_biases, bidirectional, batch_first, _ = args
    x, workspace = steps_first(input, batch_first), results[3]
    if not mkldnn_enabled() or not workspace[:, :_LOOKED_AT].any(1).all():
        given, settings = (x, states, weights), (has_biases, 1, bidirectional)
        found = gradients_by_autograd(torch.lstm, gradients, wanted, *given, settings, None)
        return unaliased(found, gradients)
    each = _gradients(gradients, results, x.contiguous(), states, weights, has_biases)
    return unaliased([each[place] for place in wanted], gradients)


def _gradients(
    gradients: Optionals,
    results: Tensors,
    x: torch.Tensor,
    states: Tensors,
    weights: Tensors,
    has_biases: bool,
) -> list[torch.Tensor]:
    """Return oneDNN's gradients of the input, the states and the weights, in this order."""
    output, hidden, cells, workspace = results
    directions = len(workspace)
    count = len(weights) // directions
    backward = torch.ops.aten.mkldnn_rnn_layer_backward.default
    sizes: list[int] = []  # No sequence is packed.
    flags = (_LSTM, hidden.shape[-1], 1, has_biases, True, directions == 2, sizes, False)
    found = []
    for i in range(directions):
        own = weights[i * count : (i + 1) * count]
        four = own if has_biases else [*own, *own]
        mine = output.chunk(directions, -1)[i].contiguous()
        arriving = None if gradients[0] is None else gradients[0].chunk(directions, -1)[i]
        of_states = [None if g is None else g[i] for g in gradients[1:3]]
        starts = [state[i] for state in states]
        given = (x, *four, *starts, mine, hidden[i], cells[i], arriving, *of_states)
        found.append(backward(*given, i == 1, *flags, workspace[i]))
    of_inputs, *of_weights, of_hidden, of_cells = zip(*found, strict=True)
    of_input = of_inputs[0] if directions == 1 else of_inputs[0] + of_inputs[1]
    by_direction = [g for each in zip(*of_weights[:count], strict=True) for g in each]
    return [of_input, torch.stack(of_hidden), torch.stack(of_cells), *by_direction]


def _fake_backward(
    gradients: Any, wanted: Sequence[int], results: Any, *args: Any
) -> list[torch.Tensor]:
    input, states, weights, _, _, batch_first, _ = args
    operands = [steps_first(input, batch_first), *states, *weights]
    return [empty_like(operands[place]) for place in wanted]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    input, states, weights, *ctx.flags = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[3])
    ctx.save_for_backward(*output, input, *states, *weights)


def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
    results, (input, *others) = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
    of_input, of_states, of_weights = ctx.needs_input_grad[:3]
    needed = [of_input, *of_states, *of_weights]
    wanted = [place for place, is_needed in enumerate(needed) if is_needed]
    found: dict[int, torch.Tensor] = {}
    if wanted and any(gradient is not None for gradient in gradients[:3]):
        args = (input, others[:2], others[2:], *ctx.flags)
        operator = torch.ops.tvmbridge.lstm_layer_backward.default
        each = operator(list(gradients[:3]), wanted, list(results), *args)
        found = dict(zip(wanted, each, strict=True))
    if 0 in found:
        found[0] = steps_first(found[0], ctx.flags[2])
    each = [found.get(place) for place in range(len(needed))]
    return each[0], each[1:3], each[3:], None, None, None, None


_LIBRARY.define(f"lstm_layer({_PARAMETERS}) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "lstm_layer_backward(Tensor?[] gradients, int[] wanted, Tensor[] results, "
    f"{_PARAMETERS}) -> Tensor[]"
)
_LIBRARY.impl("lstm_layer", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("lstm_layer_backward", _run_backward, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::lstm_layer", _fake, lib=_LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::lstm_layer_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd(
    f"{NAMESPACE}::lstm_layer", _backward, setup_context=_set_up, lib=_LIBRARY
)
LSTM_LAYER: Any = torch.ops.tvmbridge.lstm_layer.default
