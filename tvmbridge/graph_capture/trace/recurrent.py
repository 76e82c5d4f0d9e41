"""Recurrent layers: calls of PyTorch's functions for them become opaque operators.

A stack of layers is one operator. It is one a layer where dropout is drawn, for the masks are drawn
outside of compiled code, and where gradients are computed from the outputs of each layer, or from
the workspace that it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from tvmbridge.core.errors import DataDependentError, UnsupportedOperatorError
from tvmbridge.core.torch_private import innermost_transform, pack_padded_sequence
from tvmbridge.graph_capture.trace.function_table import Call, replaces
from tvmbridge.graph_capture.trace.recurrent_ops import (
    STACKS,
    differentiated_from_outputs,
    steps_first,
)
from tvmbridge.graph_capture.trace.recurrent_workspace import LSTM_LAYER, workspace_length

aten = torch.ops.aten

_PACKETS = (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)
_FUNCTIONS: dict[Any, Any] = {function: function for function in STACKS} | {
    packet.input: function for function, packet in zip(STACKS, _PACKETS, strict=True)
}


def recurrent_decompositions(table: dict[Any, Any]) -> dict[Any, Callable[..., NoReturn]]:
    """Refusals in place of PyTorch's decompositions, which leave dropout out."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedOperatorError(
            "forward calls a recurrent layer in a way that a trace does not see; call torch.lstm, "
            "torch.gru, torch.rnn_tanh or torch.rnn_relu"
        )

    overloads = [getattr(p, name) for p in _PACKETS for name in ("input", "data")]
    return {overload: refuse for overload in overloads if overload in table}


@replaces(*_FUNCTIONS, pack_padded_sequence)
def _recurrent_layers(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of a recurrent function as calls of the operators that stand for it.

    Raises:
        UnsupportedOperatorError: a sequence is packed, a transform of ``torch.func`` is active, or
            the tensors differ in dtype or device.
    """
    # For packed sequences the sizes of the batches come before the states.
    of_packed = "batch_sizes" in kwargs or (len(args) > 3 and isinstance(args[3], list | tuple))
    if call.function is pack_padded_sequence or of_packed:
        raise DataDependentError(
            "forward packs a padded sequence, and the values of the lengths decide what shape "
            "it has then; leave it padded, or dispatch the submodules before and behind it"
        )
    if innermost_transform() is not None:
        raise UnsupportedOperatorError(
            "forward calls a recurrent layer within a transform of torch.func"
        )
    return _stack(_FUNCTIONS[call.function], *args, **kwargs)


def _stack(
    function: Any,
    input: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """A stack of layers with the parameters of PyTorch's functions."""
    states = list(hx) if isinstance(hx, list | tuple) else [hx]
    tensors = [input, *states, *params]
    device = input.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if autocast is None and len({(t.dtype, t.device) for t in tensors}) > 1:
        raise UnsupportedOperatorError("the tensors of a recurrent layer differ in dtype or device")

    drawn = dropout and train and num_layers > 1
    recorded = torch.is_grad_enabled()
    differentiated = recorded and any(t.requires_grad for t in tensors)
    by_layer = differentiated and (
        differentiated_from_outputs(function, input, autocast)
        or workspace_length(function, steps_first(input, batch_first), states, autocast) > 0
    )
    groups = num_layers if drawn or by_layer else 1
    x, count = input, len(params) // groups
    each: list[Sequence[torch.Tensor]] = []
    for i, own in enumerate(zip(*(s.chunk(groups) for s in states), strict=True)):
        weights = list(params[i * count : (i + 1) * count])
        learned = any(weight.requires_grad for weight in weights)
        swapped = batch_first and i == 0
        length = 0
        if by_layer:
            length = workspace_length(function, steps_first(x, swapped), own, autocast)
        if length:
            kept = (has_biases, bidirectional, swapped, length)
            x, *final, _ = LSTM_LAYER(x, list(own), weights, *kept)
        else:
            settings = (has_biases, num_layers // groups, bidirectional, swapped)
            flags = (*settings, learned, recorded, autocast)
            x, *final = STACKS[function](x, list(own), weights, *flags)
        each.append(final)
        if function is torch.lstm and groups > 1 and x.dtype != input.dtype != torch.float32:
            raise UnsupportedOperatorError(
                "autocast changes the dtype of an LSTM with dropout from one half precision to "
                "another, and PyTorch chooses its kernel by the first; give it float32"
            )
        if drawn and i < groups - 1:
            x = torch.dropout(x, dropout, True)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.cat(layers) for layers in zip(*each, strict=True))
