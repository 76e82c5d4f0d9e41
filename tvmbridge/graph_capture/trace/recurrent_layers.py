"""The steps of one recurrent layer in one direction as an operator of our own, with its gradient.

What the input adds to the gates is a product for all steps at once, which stays in the graph; so
do the gradients of the weights. The rest are calls of PyTorch's kernels, step by step
(``recurrent_steps.py``). Forward returns what backward reads as further results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tvmbridge.core.custom_operator import NAMESPACE
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.graph_capture.trace.recurrent_steps import (
    gru_gradients,
    gru_steps,
    in_float32,
    lstm_gradients,
    lstm_steps,
    plain_gradients,
    plain_steps,
)

Function = Callable[..., Any]
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
ARRIVING = "Tensor? output_gradient, Tensor? hidden_gradient"


def define(name: str, parameters: str, results: int, run: Function, foretold: Function) -> Any:
    """Define an operator by what it does and by the results it has for fake tensors."""
    _LIBRARY.define(f"{name}({parameters}) -> ({', '.join(['Tensor'] * results)})")
    _LIBRARY.impl(name, torch.no_grad()(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", foretold, lib=_LIBRARY)
    return getattr(torch.ops.tvmbridge, name).default


def differentiate(name: str, formula: Function, without_gradient: int = 0) -> None:
    """Have autograd differentiate the operator ``name``.

    Args:
        name: the operator.
        formula: called with the gradients that arrive (None: none does), the operator's arguments
            (None in place of numbers) and its results; it returns a gradient for each argument.
        without_gradient: how many of the last results have none, being there for backward only.
    """

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[len(output) - without_gradient :])
        ctx.save_for_backward(*(None if isinstance(i, int) else i for i in inputs), *output)

    def backward(ctx: Any, *arriving: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(gradient is None for gradient in arriving):
            return (None,) * len(ctx.needs_input_grad)
        found = formula(*arriving, *ctx.saved_tensors)
        wanted = zip(found, ctx.needs_input_grad, strict=True)
        return tuple(gradient if needed else None for gradient, needed in wanted)

    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=set_up, lib=_LIBRARY
    )


def refuse_gradient(name: str) -> None:
    """Have autograd raise where a gradient of the operator ``name`` is asked for."""

    def backward(ctx: Any, *arriving: torch.Tensor | None) -> Any:
        raise UnsupportedOperatorError(f"{NAMESPACE}::{name} is for calls without a gradient")

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, lib=_LIBRARY)


def empty_like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in tensors)


def _before(output: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The hidden state before each step."""
    return torch.cat([hidden.unsqueeze(0), output[:-1]])


def _of_weight(gradients: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """The gradient of the weight that made ``[steps, batch, ...]`` of ``operand``."""
    return gradients.flatten(0, 1).t() @ operand.flatten(0, 1)


def _of_bias(gradients: torch.Tensor) -> torch.Tensor:
    return gradients.flatten(0, 1).sum(0)


def _foretold_lstm(
    gates: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    output = gates.new_empty([*gates.shape[:2], hidden.shape[-1]])
    cells = gates.new_empty([len(gates) + 1, *cell.shape])
    return output, *empty_like(hidden, cell, gates), cells


def _foretold_lstm_gradients(*args: Any) -> tuple[torch.Tensor, ...]:
    gates, cells, recurrent, projection = args[3:]
    states = (cells.new_empty([cells.shape[1], recurrent.shape[1]]), cells[0])
    sizes = [] if projection is None else projection.shape
    each = [gates.new_empty([*gates.shape[:2], size]) for size in sizes]
    return *empty_like(gates, *states), *(each or [gates.new_empty(0), gates.new_empty(0)])


lstm = define(
    "lstm_steps",
    "Tensor gates, Tensor hidden, Tensor cell, Tensor recurrent, Tensor? bias, Tensor? projection",
    5,
    lstm_steps,
    _foretold_lstm,
)
_lstm_backward = define(
    "lstm_steps_backward",
    f"{ARRIVING}, Tensor? cell_gradient, Tensor gates, Tensor cells, Tensor recurrent, "
    "Tensor? projection",
    5,
    in_float32(lstm_gradients),
    _foretold_lstm_gradients,
)


def _differentiated_lstm(*args: Any) -> tuple[torch.Tensor | None, ...]:
    arriving, (_, hidden, _, recurrent, _, projection) = args[:3], args[5:11]
    output, _, _, gates, cells = args[11:]
    found, to_hidden, to_cell, projected, unprojected = _lstm_backward(
        *arriving, gates, cells, recurrent, projection
    )
    # The cell state after one step does not depend on the projection.
    only_cell = arriving[:2] == (None, None) and len(output) == 1
    given = projection is not None and not only_cell
    to_projection = _of_weight(projected, unprojected) if given else None
    to_recurrent = _of_weight(found, _before(output, hidden))
    return found, to_hidden, to_cell, to_recurrent, _of_bias(found), to_projection


differentiate("lstm_steps", _differentiated_lstm, without_gradient=2)

gru = define(
    "gru_steps",
    "Tensor gates, Tensor hidden, Tensor recurrent, Tensor? bias",
    4,
    gru_steps,
    lambda gates, hidden, *_: (
        *_foretold_plain(gates[:, :, : hidden.shape[-1]], hidden),
        *empty_like(gates, gates[:, :, : hidden.shape[-1]]),
    ),
)
_gru_backward = define(
    "gru_steps_backward",
    f"{ARRIVING}, Tensor gates, Tensor new, Tensor before, Tensor recurrent",
    3,
    in_float32(gru_gradients),
    lambda _, __, gates, ___, before, ____: empty_like(gates, gates, before[0]),
)


def _differentiated_gru(*args: Any) -> tuple[torch.Tensor | None, ...]:
    arriving, (_, hidden, recurrent, _) = args[:2], args[4:8]
    output, _, gates, new = args[8:]
    before = _before(output, hidden)
    found, of_state, to_hidden = _gru_backward(*arriving, gates, new, before, recurrent)
    return found, to_hidden, _of_weight(of_state, before), _of_bias(of_state)


differentiate("gru_steps", _differentiated_gru, without_gradient=2)


def _foretold_plain(gates: torch.Tensor, hidden: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    return empty_like(gates, hidden)


def _define_plain(name: str, activation: Any) -> Any:
    """A layer whose only gate is ``activation``."""
    steps = define(
        f"{name}_steps",
        "Tensor gates, Tensor hidden, Tensor recurrent, Tensor? bias",
        2,
        partial(plain_steps, activation=activation),
        _foretold_plain,
    )
    backward = define(
        f"{name}_steps_backward",
        f"{ARRIVING}, Tensor output, Tensor recurrent",
        2,
        in_float32(partial(plain_gradients, activation=activation)),
        lambda _, __, output, ___: empty_like(output, output[0]),
    )

    def gradients(*args: Any) -> tuple[torch.Tensor | None, ...]:
        arriving, (_, hidden, recurrent, _), (output, _) = args[:2], args[2:6], args[6:]
        found, to_hidden = backward(*arriving, output, recurrent)
        to_recurrent = _of_weight(found, _before(output, hidden))
        return found, to_hidden, to_recurrent, _of_bias(found)

    differentiate(f"{name}_steps", gradients)
    return steps


rnn_tanh = _define_plain("rnn_tanh", torch.tanh_)
rnn_relu = _define_plain("rnn_relu", torch.relu_)
