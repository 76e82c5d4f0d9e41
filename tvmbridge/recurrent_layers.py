"""One layer of an RNN, a GRU or an LSTM in one direction, as an operator of our own.

Forward is PyTorch's own function. Backward finds the gates of all steps again by one product,
calls an operator for what goes from step to step (``recurrent_gradients.py``), and leaves the
products that give the gradients of input and weights to the graph.

Shapes: input ``[steps, batch, features]``, states ``[batch, size]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from tvmbridge.custom_operator import NAMESPACE
from tvmbridge.recurrent_gradients import gated_unit, in_float32, long_short_term_memory, plain

Function = Callable[..., Any]
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
WEIGHTS = "Tensor input_weight, Tensor hidden_weight, Tensor? input_bias, Tensor? hidden_bias"
ARRIVING = "Tensor? output_gradient, Tensor? hidden_gradient"


def define(name: str, parameters: str, results: int, run: Function, foretold: Function) -> Any:
    """Define an operator by what it does and by the results it has for fake tensors."""
    _LIBRARY.define(f"{name}({parameters}) -> ({', '.join(['Tensor'] * results)})")
    _LIBRARY.impl(name, torch.no_grad()(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", foretold, lib=_LIBRARY)
    return getattr(torch.ops.tvmbridge, name).default


def differentiate(
    name: str, formula: Function, results: int, without_gradient: int | None = None
) -> None:
    """Have autograd differentiate the operator ``name``.

    Args:
        name: the operator.
        formula: called with the gradients that arrive (None: none does), the operator's arguments
            and the first of its results; it returns a gradient for each argument.
        results: how many of the results the formula reads.
        without_gradient: the number of the result that has none.
    """

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        if without_gradient is not None:
            ctx.mark_non_differentiable(output[without_gradient])
        tensors = [None if isinstance(i, int) else i for i in inputs]
        ctx.save_for_backward(*tensors, *output[:results])

    def backward(ctx: Any, *arriving: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(gradient is None for gradient in arriving):
            return (None,) * len(ctx.needs_input_grad)
        found = formula(*arriving, *ctx.saved_tensors)
        wanted = zip(found, ctx.needs_input_grad, strict=True)
        return tuple(gradient if needed else None for gradient, needed in wanted)

    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=set_up, lib=_LIBRARY
    )


def empty_like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in tensors)


def _one_layer(function: Any, input: torch.Tensor, states: Any, weights: Sequence[Any]) -> Any:
    """What PyTorch's ``function`` for a stack makes of one layer."""
    given = [w for w in weights if w is not None]
    has_biases = weights[2] is not None
    # Within no_grad PyTorch would take other kernels for half precision than in training.
    with torch.enable_grad():
        results = function(input, states, given, has_biases, 1, 0.0, True, False, False)
    return results[0], *(state.squeeze(0) for state in results[1:])


def _before(output: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The hidden state before each step."""
    return torch.cat([hidden.unsqueeze(0), output[:-1]])


def _by_products(
    input: torch.Tensor,
    before: torch.Tensor,
    input_weight: torch.Tensor,
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the input, the two weights and the two biases, by those of the gates."""
    of_input, of_hidden = input_gates.flatten(0, 1), hidden_gates.flatten(0, 1)
    return (
        input_gates @ input_weight,
        of_input.t() @ input.flatten(0, 1),
        of_hidden.t() @ before.flatten(0, 1),
        of_input.sum(0),
        of_hidden.sum(0),
    )


def _lstm(input: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *weights: Any) -> Any:
    return _one_layer(torch.lstm, input, (hidden.unsqueeze(0), cell.unsqueeze(0)), weights)


def _lstm_foretold(input: torch.Tensor, *states: Any) -> Any:
    size = states[0].shape[-1]
    return input.new_empty([*input.shape[:2], size]), *empty_like(*states[:2])


lstm_layer = define(
    "lstm_layer",
    f"Tensor input, Tensor hidden, Tensor cell, {WEIGHTS}, Tensor? projection",
    3,
    _lstm,
    _lstm_foretold,
)


def _lstm_gradients_foretold(
    _: Any, __: Any, ___: Any, gates: torch.Tensor, cell: torch.Tensor, weight: Any, projection: Any
) -> Any:
    hidden = cell.new_empty([cell.shape[0], weight.shape[1]])
    if projection is None:
        return *empty_like(gates, hidden, cell), gates.new_empty(0), gates.new_empty(0)
    each = [gates.new_empty([*gates.shape[:2], size]) for size in projection.shape]
    return *empty_like(gates, hidden, cell), *each


_lstm_backward = define(
    "lstm_layer_backward",
    f"{ARRIVING}, Tensor? cell_gradient, Tensor gates, Tensor cell, Tensor hidden_weight, "
    "Tensor? projection",
    5,
    in_float32(long_short_term_memory),
    _lstm_gradients_foretold,
)


def _lstm_gradients(
    output_gradient: torch.Tensor | None,
    hidden_gradient: torch.Tensor | None,
    cell_gradient: torch.Tensor | None,
    input: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    input_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    input_bias: torch.Tensor | None,
    hidden_bias: torch.Tensor | None,
    projection: torch.Tensor | None,
    output: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    before = _before(output, hidden)
    gates = linear(input, input_weight, input_bias) + linear(before, hidden_weight, hidden_bias)
    arriving = (output_gradient, hidden_gradient, cell_gradient)
    found, to_hidden, to_cell, projected, unprojected = _lstm_backward(
        *arriving, gates, cell, hidden_weight, projection
    )
    to_input, *to_weights = _by_products(input, before, input_weight, found, found)
    to_projection = None
    # The cell state after one step does not depend on the projection.
    only_cell = output_gradient is None and hidden_gradient is None and len(input) == 1
    if projection is not None and not only_cell:
        to_projection = projected.flatten(0, 1).t() @ unprojected.flatten(0, 1)
    return to_input, to_hidden, to_cell, *to_weights, to_projection


differentiate("lstm_layer", _lstm_gradients, 1)


def _one_state(function: Any) -> Function:
    """A layer with one state by PyTorch's ``function`` for a stack."""

    def run(input: torch.Tensor, hidden: torch.Tensor, *weights: Any) -> Any:
        return _one_layer(function, input, hidden.unsqueeze(0), weights)

    return run


def _one_state_foretold(input: torch.Tensor, hidden: torch.Tensor, *_: Any) -> Any:
    return input.new_empty([*input.shape[:2], hidden.shape[-1]]), *empty_like(hidden)


gru_layer, rnn_tanh_layer, rnn_relu_layer = (
    define(
        f"{function.__name__}_layer",
        f"Tensor input, Tensor hidden, {WEIGHTS}",
        2,
        _one_state(function),
        _one_state_foretold,
    )
    for function in (torch.gru, torch.rnn_tanh, torch.rnn_relu)
)
_gru_backward = define(
    "gru_layer_backward",
    f"{ARRIVING}, Tensor input_gates, Tensor hidden_gates, Tensor before, Tensor hidden_weight",
    3,
    in_float32(gated_unit),
    lambda _, __, gates, ___, before, ____: empty_like(gates, gates, before[0]),
)


def _gru_gradients(
    output_gradient: torch.Tensor | None,
    hidden_gradient: torch.Tensor | None,
    input: torch.Tensor,
    hidden: torch.Tensor,
    input_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    input_bias: torch.Tensor | None,
    hidden_bias: torch.Tensor | None,
    output: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    before = _before(output, hidden)
    input_gates = linear(input, input_weight, input_bias)
    hidden_gates = linear(before, hidden_weight, hidden_bias)
    of_input, of_hidden, to_hidden = _gru_backward(
        output_gradient, hidden_gradient, input_gates, hidden_gates, before, hidden_weight
    )
    to_input, *to_weights = _by_products(input, before, input_weight, of_input, of_hidden)
    return to_input, to_hidden, *to_weights


differentiate("gru_layer", _gru_gradients, 1)


def _define_plain(name: str, *, relu: bool) -> None:
    """The gradient of a layer whose only gate is its activation."""
    scan = define(
        f"{name}_layer_backward",
        f"{ARRIVING}, Tensor output, Tensor hidden_weight",
        2,
        in_float32(plain(relu)),
        lambda _, __, output, ___: empty_like(output, output[0]),
    )

    def gradients(
        output_gradient: torch.Tensor | None,
        hidden_gradient: torch.Tensor | None,
        input: torch.Tensor,
        hidden: torch.Tensor,
        input_weight: torch.Tensor,
        hidden_weight: torch.Tensor,
        _: torch.Tensor | None,
        __: torch.Tensor | None,
        output: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        found, to_hidden = scan(output_gradient, hidden_gradient, output, hidden_weight)
        before = _before(output, hidden)
        to_input, *to_weights = _by_products(input, before, input_weight, found, found)
        return to_input, to_hidden, *to_weights

    differentiate(f"{name}_layer", gradients, 1)


_define_plain("rnn_tanh", relu=False)
_define_plain("rnn_relu", relu=True)
