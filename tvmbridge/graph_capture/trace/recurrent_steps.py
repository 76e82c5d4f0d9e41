"""The steps of one recurrent layer, forward and backward: what cannot be done for all at once.

That is one product and a few element-wise operators a step; slopes of activations are computed for
all steps together. Gates stand in PyTorch's order, steps come first. Forward rounds where eager
PyTorch rounds; gradients in half precision are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def in_float32(gradients: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., Any]:
    """``gradients``, of half precision in float32; results in the dtype of the arguments."""

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        dtype = next(a.dtype for a in args if a is not None)
        if dtype not in (torch.float16, torch.bfloat16):
            return gradients(*args)
        wide = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
        return tuple(result.to(dtype) for result in gradients(*wide))

    return run


def _arriving(
    output: torch.Tensor | None, final: torch.Tensor | None, like: torch.Tensor, steps: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What arrives at each step from outside, and at the last one for the final state as well."""
    zero = torch.zeros_like(like)
    each = [zero] * steps if output is None else list(output.unbind(0))
    last = each[-1] if final is None else each[-1] + final
    return [zero, *each[:-1]], last


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """``x @ weight + bias``, written to ``out``."""
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


def lstm_steps(
    gates: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    recurrent: torch.Tensor,
    bias: torch.Tensor | None,
    projection: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """An LSTM's outputs, with what its gradient needs.

    Args:
        gates: what the input adds to the gates, ``[steps, batch, 4 * size]``.
        hidden: the first hidden state, ``[batch, projected]``.
        cell: the first cell state, ``[batch, size]``.
        recurrent: the weight of the hidden state, ``[4 * size, projected]``.
        bias: its bias, ``[4 * size]``.
        projection: ``[projected, size]``; None: the outputs are not projected.

    Returns:
        The outputs, the final hidden and cell state, the gates after their activations, the cell
        states from the first to the final one.
    """
    steps, size = len(gates), cell.shape[-1]
    output = gates.new_empty([*gates.shape[:2], hidden.shape[-1]])
    found, cells = torch.empty_like(gates), gates.new_empty([steps + 1, *cell.shape])
    cells[0] = cell
    weight = recurrent.t()
    of_input, flat, outputs, times = (v.unbind(0) for v in (gates, found, output, cells))
    pairs = found[:, :, : 2 * size].unbind(0)
    entering, forget, new, leaving = (g.unbind(0) for g in found.chunk(4, 2))
    for t in range(steps):
        _linear(hidden, weight, bias, flat[t]).add_(of_input[t])
        pairs[t].sigmoid_()
        torch.mul(forget[t], times[t], out=times[t + 1])
        seen = times[t + 1].add_(entering[t] * new[t].tanh_()).tanh()
        if projection is None:
            hidden = torch.mul(leaving[t].sigmoid_(), seen, out=outputs[t])
        else:
            hidden = torch.mm(seen.mul_(leaving[t].sigmoid_()), projection.t(), out=outputs[t])
    return output, hidden.clone(), times[-1].clone(), found, cells


def lstm_gradients(
    output_gradient: torch.Tensor | None,
    hidden_gradient: torch.Tensor | None,
    cell_gradient: torch.Tensor | None,
    gates: torch.Tensor,
    cells: torch.Tensor,
    recurrent: torch.Tensor,
    projection: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of an LSTM's gates and first states.

    Args:
        output_gradient: of the outputs; None: zeros.
        hidden_gradient: of the final hidden state.
        cell_gradient: of the final cell state.
        gates: as :func:`lstm_steps` returns them.
        cells: the same.
        recurrent: as there.
        projection: as there.

    Returns:
        The gradients of the gates, the first hidden and the first cell state; those of the
        outputs, what flows back through time among them; the outputs before their projection.
    """
    steps, batch, size = len(gates), gates.shape[1], cells.shape[-1]
    entering, forget, new, leaving = gates.chunk(4, 2)
    seen = cells[1:].tanh()
    to_cell = (leaving * (1 - seen * seen)).unbind(0)
    to_leaving = (seen * leaving * (1 - leaving)).unbind(0)
    slopes = (
        new * entering * (1 - entering),
        cells[:-1] * forget * (1 - forget),
        entering * (1 - new * new),
    )
    to_others, forgets = torch.stack(slopes, 2).unbind(0), forget.unbind(0)
    found = gates.new_empty(steps, batch, 4, size)
    flat, others, own = (p.unbind(0) for p in (found.flatten(2), found[:, :, :3], found[:, :, 3]))
    like = gates.new_empty(batch, recurrent.shape[1])
    arriving, hidden = _arriving(output_gradient, hidden_gradient, like, steps)
    flowing = torch.zeros_like(cells[0]) if cell_gradient is None else cell_gradient.clone()
    projected = []
    for t in reversed(range(steps)):
        projected.append(hidden)
        unprojected = hidden if projection is None else hidden @ projection
        flowing.addcmul_(unprojected, to_cell[t])
        torch.mul(unprojected, to_leaving[t], out=own[t])
        torch.mul(flowing.unsqueeze(1), to_others[t], out=others[t])
        flowing.mul_(forgets[t])
        hidden = torch.addmm(arriving[t], flat[t], recurrent)
    if projection is None:
        return found.flatten(2), hidden, flowing, gates.new_empty(0), gates.new_empty(0)
    return found.flatten(2), hidden, flowing, torch.stack(projected[::-1]), leaving * seen


def gru_steps(
    gates: torch.Tensor,
    hidden: torch.Tensor,
    recurrent: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """A GRU's outputs, with what its gradient needs.

    Args:
        gates: what the input adds to the gates, ``[steps, batch, 3 * size]``.
        hidden: the first state, ``[batch, size]``.
        recurrent: the weight of the state, ``[3 * size, size]``.
        bias: the bias of the state, ``[3 * size]``.

    Returns:
        The outputs; the final state; the gates, in the place of the last one what the state adds
        to it before it is reset; the last gate after its activation.
    """
    size = hidden.shape[-1]
    output, new = (gates.new_empty([*gates.shape[:2], size]) for _ in range(2))
    found, weight = torch.empty_like(gates), recurrent.t()
    flat, outputs, news = (v.unbind(0) for v in (found, output, new))
    pairs, of_input = found[:, :, : 2 * size].unbind(0), gates[:, :, : 2 * size].unbind(0)
    reset, update, of_hidden = (g.unbind(0) for g in found.chunk(3, 2))
    to_new = gates[:, :, 2 * size :].unbind(0)
    for t in range(len(gates)):
        _linear(hidden, weight, bias, flat[t])
        pairs[t].add_(of_input[t]).sigmoid_()
        torch.mul(of_hidden[t], reset[t], out=news[t]).add_(to_new[t]).tanh_()
        hidden = torch.sub(hidden, news[t], out=outputs[t]).mul_(update[t]).add_(news[t])
    return output, hidden.clone(), found, new


def gru_gradients(
    output_gradient: torch.Tensor | None,
    hidden_gradient: torch.Tensor | None,
    gates: torch.Tensor,
    new: torch.Tensor,
    before: torch.Tensor,
    recurrent: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients of a GRU's gates and first state.

    Args:
        output_gradient: of the outputs; None: zeros.
        hidden_gradient: of the final state.
        gates: as :func:`gru_steps` returns them.
        new: the same.
        before: the state before each step, ``[steps, batch, size]``.
        recurrent: as there.

    Returns:
        The gradients of what the input and of what the state adds to the gates, and of the first
        state.
    """
    reset, update, of_hidden = gates.chunk(3, 2)
    to_new = (1 - update) * (1 - new * new)
    slopes = (
        to_new * of_hidden * reset * (1 - reset),
        (before - new) * update * (1 - update),
        to_new * reset,
    )
    found = gates.new_empty([*new.shape[:2], 3, new.shape[2]])
    by = torch.stack(slopes, 2).unbind(0)
    flat, each, kept = (v.unbind(0) for v in (found.flatten(2), found, update))
    arriving, hidden = _arriving(output_gradient, hidden_gradient, before[0], len(gates))
    flowing = []
    for t in reversed(range(len(gates))):
        flowing.append(hidden)
        torch.mul(hidden.unsqueeze(1), by[t], out=each[t])
        hidden = torch.addcmul(arriving[t], hidden, kept[t]).addmm_(flat[t], recurrent)
    of_new = torch.stack(flowing[::-1]) * to_new
    of_pair = found[:, :, :2].flatten(2)
    return torch.cat([of_pair, of_new], 2), found.flatten(2), hidden


def plain_steps(
    gates: torch.Tensor,
    hidden: torch.Tensor,
    recurrent: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The outputs and the final state of a layer whose only gate is ``activation``, in place."""
    output, weight = torch.empty_like(gates), recurrent.t()
    for of_input, written in zip(gates.unbind(0), output.unbind(0), strict=True):
        hidden = activation(_linear(hidden, weight, bias, written).add_(of_input))
    return output, hidden.clone()


def plain_gradients(
    output_gradient: torch.Tensor | None,
    hidden_gradient: torch.Tensor | None,
    output: torch.Tensor,
    recurrent: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The gradients of the gates and of the first state of such a layer."""
    arriving, hidden = _arriving(output_gradient, hidden_gradient, output[0], len(output))
    found = torch.empty_like(output)
    each, outputs = found.unbind(0), output.unbind(0)
    for t in reversed(range(len(output))):
        if activation is torch.relu_:
            aten.threshold_backward(hidden, outputs[t], 0, grad_input=each[t])
        else:
            aten.tanh_backward(hidden, outputs[t], grad_input=each[t])
        hidden = torch.addmm(arriving[t], each[t], recurrent)
    return found, hidden
