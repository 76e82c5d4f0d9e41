"""Backward of a GRU or an Elman RNN for which forward saves nothing but inputs and outputs.

The outputs are the states between the steps, so the gates of all steps are recomputed at once. Only
the gradient of the state is computed step by step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

Tensors = tuple[torch.Tensor, ...]


def layer_gradients(
    gradients: Sequence[torch.Tensor | None],
    output: torch.Tensor,
    input: torch.Tensor,
    state: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the gradients of one layer of ``torch.gru`` or ``torch.rnn_tanh``.

    Args:
        gradients: the gradients of the outputs and of the final state; None means zero.
        output: the outputs, ``[steps, batch, directions * size]``.
        state: the initial state, ``[directions, batch, size]``; there are one or two directions.

    Returns:
        The gradients of the input, the state and the weights, in this order.
    """
    directions = len(state)
    count = len(weights) // directions
    of_output, of_final = gradients
    found = []
    for i in range(directions):
        arriving = torch.zeros_like(output) if of_output is None else of_output
        mine, arriving = (_turned(t.chunk(directions, -1)[i], i) for t in (output, arriving))
        if of_final is not None:
            arriving = torch.cat([arriving[:-1], arriving[-1:] + of_final[i]])
        own = weights[i * count : (i + 1) * count]
        of_input, *others = _direction(arriving, mine, _turned(input, i), state[i], own)
        found.append((_turned(of_input, i), *others))
    of_inputs, of_states, *_ = zip(*found, strict=True)
    of_input = of_inputs[0] if directions == 1 else of_inputs[0] + of_inputs[1]
    return [of_input, torch.stack(of_states), *(g for each in found for g in each[2:])]


def _turned(tensor: torch.Tensor, direction: int) -> torch.Tensor:
    """Return ``tensor`` with its steps reversed if ``direction`` is 1."""
    return tensor.flip(0) if direction else tensor


def _direction(
    arriving: torch.Tensor,
    output: torch.Tensor,
    input: torch.Tensor,
    state: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> Tensors:
    """Return the gradients of input, initial state and weights of one direction, in its order."""
    before = torch.cat([state.unsqueeze(0), output[:-1]])
    if len(weights[1]) == state.shape[-1]:
        slopes, kept, to_new = (1 - output * output).unsqueeze(2), None, None
    else:
        slopes, kept, to_new = _gru_slopes(input, before, weights)
    of_gates, flowing, of_state = _through_time(arriving, slopes, kept, weights[1])
    of_input_gates = of_gates
    if to_new is not None:
        of_input_gates = torch.cat([of_gates[:, :, :2], (flowing * to_new).unsqueeze(2)], 2)
    by_input, by_state = of_input_gates.flatten(2).flatten(0, 1), of_gates.flatten(2).flatten(0, 1)
    found = [by_input.t() @ input.flatten(0, 1), by_state.t() @ before.flatten(0, 1)]
    if len(weights) == 4:
        found += [by_input.sum(0), by_state.sum(0)]
    return (by_input @ weights[0]).view_as(input), of_state, *found


def _gru_slopes(
    input: torch.Tensor, before: torch.Tensor, weights: Sequence[torch.Tensor]
) -> Tensors:
    """Return the derivatives of each new state of a GRU, recomputed from input and states.

    Returns:
        - the derivatives by the state's contribution to each of the three gates, stacked in the
          last dimension but one
        - the derivatives by the previous state through the update gate
        - the derivatives by the input's contribution to the last gate
    """
    biases = weights[2:] or (None, None)
    of_input = linear(input, weights[0], biases[0]).chunk(3, -1)
    of_state = linear(before, weights[1], biases[1]).chunk(3, -1)
    reset, update = (torch.sigmoid(a + b) for a, b in zip(of_input[:2], of_state[:2], strict=True))
    new = torch.tanh(of_input[2] + reset * of_state[2])
    to_new = (1 - update) * (1 - new * new)
    slopes = (
        to_new * of_state[2] * reset * (1 - reset),
        (before - new) * update * (1 - update),
        to_new * reset,
    )
    return torch.stack(slopes, 2), update, to_new


def _through_time(
    arriving: torch.Tensor, slopes: torch.Tensor, kept: torch.Tensor | None, weight: torch.Tensor
) -> Tensors:
    """Run backward through the steps.

    Args:
        slopes: the derivatives of each state by its gates.
        kept: the derivatives of each state by the previous state directly; None means zero.

    Returns:
        The gradients of the gates at each step, of the states at each step, and of the initial
        state.
    """
    of_gates, flowing = torch.empty_like(slopes), torch.empty_like(arriving)
    hidden = arriving[-1]
    for t in reversed(range(len(arriving))):
        flowing[t] = hidden
        torch.mul(hidden.unsqueeze(1), slopes[t], out=of_gates[t])
        outside = arriving[t - 1] if t else torch.zeros_like(hidden)
        if kept is not None:
            outside = torch.addcmul(outside, hidden, kept[t])
        hidden = torch.addmm(outside, of_gates[t].flatten(1), weight)
    return of_gates, flowing, hidden
