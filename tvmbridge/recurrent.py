"""Recurrent layers taken apart one layer at a time, with the dropout between them that eager has.

The decomposition that comes with PyTorch takes a stack of layers apart without its dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decompositions
from torch.overrides import TorchFunctionMode

from tvmbridge.patches import patched_here

aten = torch.ops.aten

_STACKS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
_PACKED = (aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data)

Decomposition = Callable[..., Any]


def recurrent_decompositions(table: dict[Any, Decomposition]) -> dict[Any, Decomposition]:
    """Those of ``table`` for recurrent layers, made right for dropout.

    A packed sequence with dropout is not taken apart.
    """
    stacks = {op: _with_dropout(table[op]) for op in _STACKS if op in table}
    packed = {op: _unless_dropout(table[op]) for op in _PACKED if op in table}
    return stacks | packed


def _unless_dropout(whole: Decomposition) -> Decomposition:
    def decompose(*args: Any) -> Any:
        dropout, train = args[6:8]
        if dropout and train:
            return NotImplemented
        return _with_states_of(whole(*args), args[2])

    return decompose


def _with_states_of(results: Sequence[torch.Tensor], state: Any) -> tuple[torch.Tensor, ...]:
    """``results`` with final states shaped like the first ones: PyTorch 2.11 adds a dimension."""
    output, *finals = results
    states = state if isinstance(state, list | tuple) else [state]
    return output, *(f.reshape(s.shape) for f, s in zip(finals, states, strict=True))


def _with_dropout(whole: Decomposition) -> Decomposition:
    def decompose(
        x: torch.Tensor,
        state: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if not dropout or not train:
            results = whole(
                x, state, params, has_biases, num_layers, 0.0, train, bidirectional, batch_first
            )
            return _with_states_of(results, state)
        x = x.transpose(0, 1) if batch_first else x
        states = list(state) if isinstance(state, list | tuple) else [state]
        per_layer = len(params) // num_layers
        finals: list[tuple[torch.Tensor, ...]] = []
        for i in range(num_layers):
            own = [s.chunk(num_layers)[i] for s in states]
            weights = params[i * per_layer : (i + 1) * per_layer]
            given: Any = own if isinstance(state, list | tuple) else own[0]
            results = whole(x, given, weights, has_biases, 1, 0.0, train, bidirectional, False)
            x, *final = _with_states_of(results, given)
            finals.append(tuple(final))
            if i < num_layers - 1:
                x = torch.dropout(x, dropout, True)
        x = x.transpose(0, 1) if batch_first else x
        return x, *(torch.cat(layers) for layers in zip(*finals, strict=True))

    return decompose


class LongShortTermMemoryTakenApart(TorchFunctionMode):
    """Within it an LSTM whose gradient is wanted runs as its single steps.

    Else it may run as one operator of oneDNN, whose forward keeps a workspace for its backward only
    under autograd, of a size that its fake kernel does not tell: compiled code runs without.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.lstm and not kwargs and _is_one_tensor_with_gradient(args):
            with patched_here(
                decompositions,
                "select_one_layer_lstm_function",
                lambda *_: decompositions.one_layer_lstm,
            ):
                return _TAKE_APART(*args)
        return func(*args, **(kwargs or {}))


def _is_one_tensor_with_gradient(args: Sequence[Any]) -> bool:
    """Whether an LSTM is called with a tensor, not a packed sequence, and a gradient is wanted."""
    if isinstance(args[1], torch.Tensor) or not torch.is_grad_enabled():
        return False
    tensors = [args[0], *args[1], *args[2]]
    return any(tensor.requires_grad for tensor in tensors)


_TAKE_APART = _with_dropout(decompositions.lstm_impl)
