"""Recurrent layers (LSTM, GRU, tanh and ReLU RNN) as the operators of their time steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from tvmbridge.graph_capture.trace.recurrent_ops import STACKS
from tvmbridge.relay.registry import Refused

Tensors = Sequence[torch.Tensor]
# The states of one layer after a step: (gates of the input, states, weight, bias).
_Step = Callable[[torch.Tensor, Tensors, torch.Tensor, torch.Tensor | None], list[torch.Tensor]]


def _lstm(
    given: torch.Tensor, states: Tensors, weight: torch.Tensor, bias: torch.Tensor | None
) -> list[torch.Tensor]:
    gates = given + functional.linear(states[0], weight, bias)
    enter, forget, new, leave = gates.chunk(4, 1)
    cell = forget.sigmoid() * states[1] + enter.sigmoid() * new.tanh()
    return [leave.sigmoid() * cell.tanh(), cell]


def _gru(
    given: torch.Tensor, states: Tensors, weight: torch.Tensor, bias: torch.Tensor | None
) -> list[torch.Tensor]:
    hidden = functional.linear(states[0], weight, bias).chunk(3, 1)
    reset, update, new = given.chunk(3, 1)
    update = (update + hidden[1]).sigmoid()
    new = (new + (reset + hidden[0]).sigmoid() * hidden[2]).tanh()
    return [(states[0] - new) * update + new]


def _rnn(
    activation: Callable[[torch.Tensor], torch.Tensor],
    given: torch.Tensor,
    states: Tensors,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> list[torch.Tensor]:
    return [activation(given + functional.linear(states[0], weight, bias))]


def _layer(
    step: _Step, x: torch.Tensor, states: list[torch.Tensor], weights: Tensors, biased: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the hidden states of all steps of ``x``, and the last states, of one direction."""
    b_ih, b_hh = weights[2:4] if biased else (None, None)
    projection = weights[-1] if len(weights) % 2 else None
    found = []
    for given in functional.linear(x, weights[0], b_ih).unbind(0):
        states = step(given, states, weights[1], b_hh)
        if projection is not None:
            states[0] = functional.linear(states[0], projection)
        found.append(states[0])
    return found, states


def _stack(
    step: _Step, input: torch.Tensor, states: Tensors, weights: Tensors, *flags: Any
) -> tuple[torch.Tensor, ...]:
    """Return the output and the last states of layers, as the operators of ``recurrent_ops``."""
    biased, layers, bidirectional, batch_first, _, _, autocast = flags
    if autocast is not None:
        raise Refused("a recurrent layer under autocast")
    x, count = input.transpose(0, 1) if batch_first else input, 2 if bidirectional else 1
    each, ended = len(weights) // (layers * count), []
    for layer in range(layers):
        outputs = []
        for number in range(layer * count, (layer + 1) * count):
            own, backward = weights[number * each : (number + 1) * each], number % count == 1
            steps = x.flip(0) if backward else x
            found, last = _layer(step, steps, [s[number] for s in states], own, biased)
            outputs.append(torch.stack(found[::-1] if backward else found))
            ended.append(last)
        x = torch.cat(outputs, 2) if bidirectional else outputs[0]
    return x, *(torch.stack(each) for each in zip(*ended, strict=True))


_STEPS: dict[Any, _Step] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: partial(_rnn, torch.tanh),
    torch.rnn_relu: partial(_rnn, torch.relu),
}
RECURRENT = {STACKS[function]: partial(_stack, step) for function, step in _STEPS.items()}
