"""The gradient of one recurrent layer through its steps: all that cannot be done for all at once.

PyTorch keeps each step's gates for backward. They follow from the layer's inputs and outputs by one
product for all steps, so that forward keeps nothing here; what is left of a step is one product
and a few element-wise operators. Gates stand in PyTorch's order, times (steps) come first.

Half precision is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def in_float32(scan: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., Any]:
    """``scan``, called with half precision in float32; results in the dtype of the arguments."""

    def run(*args: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        dtype = next(a.dtype for a in args if a is not None)
        if dtype not in (torch.float16, torch.bfloat16):
            return scan(*args)
        return tuple(r.to(dtype) for r in scan(*(None if a is None else a.float() for a in args)))

    return run


def _arriving(
    output: torch.Tensor | None, final: torch.Tensor | None, like: torch.Tensor, steps: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What arrives at each step from outside, and at the last one for the final state as well."""
    zero = torch.zeros_like(like)
    each = [zero] * steps if output is None else list(output.unbind(0))
    last = each[-1] if final is None else each[-1] + final
    return [zero, *each[:-1]], last


def long_short_term_memory(
    output_gradient: torch.Tensor | None,
    hidden_gradient: torch.Tensor | None,
    cell_gradient: torch.Tensor | None,
    gates: torch.Tensor,
    cell: torch.Tensor,
    recurrent: torch.Tensor,
    projection: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of an LSTM's gates and first states.

    Args:
        output_gradient: of the outputs, ``[steps, batch, projected]``; None: zeros.
        hidden_gradient: of the final hidden state, ``[batch, projected]``.
        cell_gradient: of the final cell state, ``[batch, size]``.
        gates: before their activations, ``[steps, batch, 4 * size]``.
        cell: the first cell state.
        recurrent: the weight of the hidden state, ``[4 * size, projected]``.
        projection: ``[projected, size]``; None: the outputs are not projected.

    Returns:
        The gradients of the gates, the first hidden and the first cell state; those of the
        outputs, what flows back through time among them; the outputs before their projection.
    """
    steps, batch, size = gates.shape[0], gates.shape[1], cell.shape[-1]
    entering, forget, new, leaving = gates.unflatten(-1, (4, size)).unbind(2)
    entering, forget, new = entering.sigmoid(), forget.sigmoid(), new.tanh()
    leaving = leaving.sigmoid()
    cells = gates.new_empty(steps + 1, batch, size)
    cells[0] = cell
    times, forgets = cells.unbind(0), forget.unbind(0)
    for t, written in enumerate((entering * new).unbind(0)):
        torch.addcmul(written, forgets[t], times[t], out=times[t + 1])
    seen = cells[1:].tanh()
    to_cell = (leaving * (1 - seen * seen)).unbind(0)
    to_leaving = (seen * leaving * (1 - leaving)).unbind(0)
    to_others = torch.stack(
        [
            new * entering * (1 - entering),
            cells[:-1] * forget * (1 - forget),
            entering * (1 - new * new),
        ],
        2,
    ).unbind(0)
    found = gates.new_empty(steps, batch, 4, size)
    flat, others, own = (p.unbind(0) for p in (found.flatten(2), found[:, :, :3], found[:, :, 3]))
    arriving, hidden = _arriving(
        output_gradient, hidden_gradient, gates.new_empty(batch, recurrent.shape[1]), steps
    )
    flowing = torch.zeros_like(cell) if cell_gradient is None else cell_gradient.clone()
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


def gated_unit(
    output_gradient: torch.Tensor | None,
    hidden_gradient: torch.Tensor | None,
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    before: torch.Tensor,
    recurrent: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients of a GRU's gates and first state.

    Args:
        output_gradient: of the outputs, ``[steps, batch, size]``; None: zeros.
        hidden_gradient: of the final state, ``[batch, size]``.
        input_gates: what the input adds to the gates, ``[steps, batch, 3 * size]``.
        hidden_gates: what the state adds to them.
        before: the state before each step, ``[steps, batch, size]``.
        recurrent: the weight of the state, ``[3 * size, size]``.

    Returns:
        The gradients of ``input_gates``, ``hidden_gates`` and the first state.
    """
    steps, _, size = before.shape
    of_input, of_hidden = (g.unflatten(-1, (3, size)) for g in (input_gates, hidden_gates))
    reset, update = (of_input[:, :, :2] + of_hidden[:, :, :2]).sigmoid().unbind(2)
    new = (of_input[:, :, 2] + reset * of_hidden[:, :, 2]).tanh()
    to_new = (1 - update) * (1 - new * new)
    slopes = torch.stack(
        [
            to_new * of_hidden[:, :, 2] * reset * (1 - reset),
            (before - new) * update * (1 - update),
            to_new * reset,
        ],
        2,
    )
    found = torch.empty_like(of_hidden)
    flat, each, by, kept = (v.unbind(0) for v in (found.flatten(2), found, slopes, update))
    arriving, hidden = _arriving(output_gradient, hidden_gradient, before[0], steps)
    flowing = []
    for t in reversed(range(steps)):
        flowing.append(hidden)
        torch.mul(hidden.unsqueeze(1), by[t], out=each[t])
        hidden = torch.addcmul(arriving[t], hidden, kept[t]).addmm_(flat[t], recurrent)
    of_new = (torch.stack(flowing[::-1]) * to_new).unsqueeze(2)
    return torch.cat([found[:, :, :2], of_new], 2).flatten(2), found.flatten(2), hidden


def plain(relu: bool) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The same for a layer of hyperbolic tangents, or of rectifiers.

    Its arguments: the gradients of outputs and final state, the outputs, the recurrent weight.
    It returns the gradients of what the activation is of, and of the first state.
    """

    def scan(
        output_gradient: torch.Tensor | None,
        hidden_gradient: torch.Tensor | None,
        output: torch.Tensor,
        recurrent: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        arriving, hidden = _arriving(output_gradient, hidden_gradient, output[0], len(output))
        found = torch.empty_like(output)
        each, outputs = found.unbind(0), output.unbind(0)
        for t in reversed(range(len(output))):
            if relu:
                aten.threshold_backward(hidden, outputs[t], 0, grad_input=each[t])
            else:
                aten.tanh_backward(hidden, outputs[t], grad_input=each[t])
            hidden = torch.addmm(arriving[t], each[t], recurrent)
        return found, hidden

    return scan
