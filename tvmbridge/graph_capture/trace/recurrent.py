"""Recurrent layers, kept whole: all of a stack, or one layer and one direction at a time.

A stack without a gradient is one operator. In training it is one a layer and direction, and without
a gradient one a layer where dropout is drawn, for its masks are drawn outside of compiled code. The
decomposition that comes with PyTorch takes a stack apart into its steps, and without its dropout;
it stays for calls that no operator of ours stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.graph_capture.trace.recurrent_layers import gru, lstm, rnn_relu, rnn_tanh
from tvmbridge.graph_capture.trace.recurrent_onednn import (
    onednn_lstm_layer,
    trains_by_onednn,
    workspace_size,
)
from tvmbridge.graph_capture.trace.recurrent_stacks import STACKS

aten = torch.ops.aten

_STACKS: dict[Any, Any] = {
    torch.lstm: aten.lstm.input,
    torch.gru: aten.gru.input,
    torch.rnn_tanh: aten.rnn_tanh.input,
    torch.rnn_relu: aten.rnn_relu.input,
}
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Decomposition = Callable[..., Any]


def recurrent_decompositions(table: dict[Any, Decomposition]) -> dict[Any, Decomposition]:
    """Those of ``table`` for recurrent layers, made right for dropout."""
    return {op: _with_dropout(table[op]) for op in _STACKS.values() if op in table}


def _with_states_of(results: Sequence[torch.Tensor], state: Any) -> tuple[torch.Tensor, ...]:
    """``results`` with final states shaped like the first ones: PyTorch 2.11 adds a dimension."""
    output, *finals = results
    return output, *(f.reshape(s.shape) for f, s in zip(finals, _listed(state), strict=True))


def _listed(state: Any) -> list[torch.Tensor]:
    return list(state) if isinstance(state, list | tuple) else [state]


def _with_dropout(whole: Decomposition) -> Decomposition:
    """A stack by ``whole``, which takes stacks without dropout, of one layer after the other."""

    def layer(*args: Any) -> tuple[torch.Tensor, ...]:
        *tensors, has_biases, bidirectional = args
        results = whole(*tensors, has_biases, 1, 0.0, False, bidirectional, False)
        return _with_states_of(results, args[1])

    return _stack_of(layer)


def _stack_of(layer: Callable[..., tuple[torch.Tensor, ...]]) -> Decomposition:
    """PyTorch's function for a stack, of one for a layer; drawing dropout as PyTorch does."""

    def stack(
        x: torch.Tensor,
        state: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        x = x.transpose(0, 1) if batch_first else x
        per_layer = len(params) // num_layers
        states = [s.chunk(num_layers) for s in _listed(state)]
        finals: list[list[torch.Tensor]] = []
        for i in range(num_layers):
            own = [s[i] for s in states]
            given: Any = own if isinstance(state, list | tuple) else own[0]
            weights = params[i * per_layer : (i + 1) * per_layer]
            x, *final = layer(x, given, weights, has_biases, bidirectional)
            finals.append(final)
            if dropout and train and i < num_layers - 1:
                x = torch.dropout(x, dropout, True)
        x = x.transpose(0, 1) if batch_first else x
        return x, *(torch.cat(layers) for layers in zip(*finals, strict=True))

    return stack


def _kept_whole(function: Any) -> Decomposition:
    """A stack by our operators for the layers of PyTorch's ``function``."""
    one_direction = _LAYERS[function]

    def layer(
        x: torch.Tensor,
        state: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        bidirectional: bool,
    ) -> tuple[torch.Tensor, ...]:
        directions = 2 if bidirectional else 1
        per_direction = len(params) // directions
        found = []
        for i in range(directions):
            weights: list[Any] = list(params[i * per_direction : (i + 1) * per_direction])
            if not has_biases:
                weights[2:2] = [None, None]
            states = [s[i] for s in _listed(state)]
            output, *finals = one_direction(x.flip(0) if i else x, *states, *weights)
            found.append((output.flip(0) if i else output, *finals))
        outputs, *of_states = zip(*found, strict=True)
        return torch.cat(outputs, -1), *(torch.stack(s) for s in of_states)

    return _stack_of(layer)


def _lstm_layer(
    x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *weights: Any
) -> tuple[torch.Tensor, ...]:
    """One layer in one direction by the kernel that PyTorch trains it by."""
    if len(weights) == 4 and trains_by_onednn(x, hidden, cell):
        size = workspace_size(x, hidden, weights[2])
        results: tuple[torch.Tensor, ...] = onednn_lstm_layer(x, hidden, cell, *weights, size)
        return results[:3]
    gates = linear(x, weights[0], weights[2])
    projection = weights[4] if len(weights) == 5 else None
    results = lstm(gates, hidden, cell, weights[1], weights[3], projection)
    return results[:3]


def _one_state(steps: Any, x: torch.Tensor, hidden: torch.Tensor, *weights: Any) -> Any:
    """The outputs and the final state of a layer that has one state."""
    return steps(linear(x, weights[0], weights[2]), hidden, weights[1], weights[3])[:2]


def _without_gradient(function: Any, x: torch.Tensor, state: Any, params: Any, *flags: Any) -> Any:
    """A stack by PyTorch's ``function``; by one call of it a layer where dropout is drawn."""
    has_biases, num_layers, dropout, train, bidirectional, batch_first = flags
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    learned = any(parameter.requires_grad for parameter in params)

    def layers(*args: Any, count: int = 1, batch_first: bool = False) -> tuple[torch.Tensor, ...]:
        x, state, params, has_biases, bidirectional = args
        settings = (has_biases, count, bidirectional, batch_first, learned, autocast)
        output, *finals = STACKS[function](x, _listed(state), params, *settings)
        return output.transpose(0, 1) if batch_first else output, *finals

    if dropout and train and num_layers > 1:
        return _stack_of(layers)(x, state, params, *flags)
    given = (x, state, params, has_biases, bidirectional)
    return layers(*given, count=num_layers, batch_first=batch_first)


_LAYERS: dict[Any, Callable[..., tuple[torch.Tensor, ...]]] = {
    torch.lstm: _lstm_layer,
    torch.gru: partial(_one_state, gru),
    torch.rnn_tanh: partial(_one_state, rnn_tanh),
    torch.rnn_relu: partial(_one_state, rnn_relu),
}
_WHOLE = {function: _kept_whole(function) for function in _LAYERS}


class RecurrentLayersKeptWhole(TorchFunctionMode):
    """Within it recurrent layers of tensors are operators of ours.

    Where a gradient is wanted, one a layer and direction; elsewhere one for all layers, unless
    dropout is drawn between them. What these cannot stand for is taken apart into its steps.

    Raises:
        UnsupportedOperatorError: a sequence is packed, or autocast makes of an LSTM in training
            what a trace does not show.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._pack_padded_sequence or (func in _WHOLE and _is_of_packed(args)):
            raise UnsupportedOperatorError(
                "forward packs a padded sequence, and the values of the lengths decide what shape "
                "it has then; leave it padded, or dispatch the submodules before and behind it"
            )
        if func in _WHOLE and not kwargs and not _is_transformed():
            autocast = torch.is_autocast_enabled(args[0].device.type)
            if not _gradient_is_wanted(args):
                if autocast or _are_alike(args):
                    return _without_gradient(func, *args)
            elif autocast:
                return _under_autocast(func, args)
            elif _are_alike(args):
                return _WHOLE[func](*args)
        return func(*args, **(kwargs or {}))


def _under_autocast(function: Any, args: Sequence[Any]) -> Any:
    """A stack in training taken apart here: later on autocast would be forgotten."""
    if function is torch.lstm and trains_by_onednn(args[0], *args[1]):
        raise UnsupportedOperatorError(
            "an LSTM under autocast trains as oneDNN's layer in eager PyTorch, in another dtype "
            "than in a trace; call it outside of autocast"
        )
    return _with_dropout(decomposition_table[_STACKS[function]])(*args)


def _is_of_packed(args: Sequence[Any]) -> bool:
    """Whether the call is of a packed sequence: the sizes of its batches come before the states."""
    return len(args) > 3 and isinstance(args[3], list | tuple)


def _is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _gradient_is_wanted(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args))


def _are_alike(args: Sequence[Any]) -> bool:
    """Whether the tensors have one dtype that layers compute in, and one device."""
    x, *others = _tensors(args)
    alike = all((t.dtype, t.device) == (x.dtype, x.device) for t in others)
    return alike and x.dtype in _FLOATING


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    return [args[0], *_listed(args[1]), *args[2]]
