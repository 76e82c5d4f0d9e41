"""One layer of an LSTM by oneDNN, which is what PyTorch trains it by in float32.

Its backward reads a workspace that its forward fills, but under autograd only, and of a size that
no fake kernel foretells. The kernel itself is asked for the size, once for each shape, and it is
an argument of the operator. The workspace is handed on in the dtype of the layer, for where dtypes
are mixed the frontend would ask the kernel what it makes of zeros.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tvmbridge.graph_capture.trace.recurrent_layers import (
    ARRIVING,
    define,
    differentiate,
    empty_like,
)

aten = torch.ops.aten

_STATES = "Tensor input, Tensor hidden, Tensor cell"
_WEIGHTS = "Tensor input_weight, Tensor hidden_weight, Tensor? input_bias, Tensor? hidden_bias"
# The kind of layer that oneDNN's wrapper knows by this number.
_LSTM = 2


def trains_by_onednn(input: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> bool:
    """Whether PyTorch trains an LSTM over ``input`` by oneDNN."""
    return (
        torch.backends.mkldnn.is_available()
        and torch._C._get_mkldnn_enabled()
        and input.device.type == "cpu"
        and (input.dtype is torch.float32 or (input.dtype is torch.bfloat16 and _has_bfloat16()))
        and bool(input.numel())
        and hidden.shape[-1] == cell.shape[-1]
    )


@lru_cache(maxsize=1)
def _has_bfloat16() -> bool:
    # An operator: outside of the modes that watch forward.
    with _disable_current_modes():
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@lru_cache(maxsize=256)
def _workspace_size(
    steps: int, batch: int, features: int, size: int, biases: bool, dtype: torch.dtype
) -> int:
    with _disable_current_modes(), torch.no_grad():
        input = torch.zeros(steps, batch, features, dtype=dtype)
        state = torch.zeros(batch, size, dtype=dtype)
        weights = [torch.zeros(4 * size, n, dtype=dtype) for n in (features, size)]
        bias = torch.zeros(4 * size, dtype=dtype) if biases else None
        return _forward(input, state, state, *weights, bias, bias)[3].numel()


def workspace_size(
    input: torch.Tensor, hidden: torch.Tensor, input_bias: torch.Tensor | None
) -> int:
    """How many elements one layer's forward keeps for its backward."""
    steps, batch, features = input.shape
    has_biases = input_bias is not None
    return _workspace_size(steps, batch, features, hidden.shape[-1], has_biases, input.dtype)


def _arguments(*given: Any) -> list[torch.Tensor]:
    """PyTorch's order and shapes for the arguments of :data:`onednn_lstm_layer`."""
    input, hidden, cell, input_weight, hidden_weight, *of_layer = given
    none = input.new_zeros(len(input_weight))
    biases = [none if bias is None else bias for bias in of_layer]
    states = [hidden.unsqueeze(0), cell.unsqueeze(0)]
    arguments = [input, input_weight, hidden_weight, *biases, *states]
    return [argument.contiguous() for argument in arguments]


def _forward(*given: Any) -> tuple[torch.Tensor, ...]:
    has_biases = given[5] is not None
    size = given[1].shape[-1]
    # Without gradients there is no workspace.
    with torch.enable_grad():
        output, hidden, cell, workspace = aten.mkldnn_rnn_layer(
            *_arguments(*given), False, [], _LSTM, size, 1, has_biases, False, False, True
        )
    return output, hidden.squeeze(0), cell.squeeze(0), workspace.view(output.dtype)


def _run(*given: Any) -> tuple[torch.Tensor, ...]:
    *tensors, foretold = given
    results = _forward(*tensors)
    if results[3].numel() != foretold:
        raise RuntimeError(
            f"oneDNN's workspace of an LSTM has {results[3].numel()} elements where {foretold} "
            "were compiled for: oneDNN is set up otherwise than then; dispatch the module again"
        )
    return results


def _foretold(input: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *rest: Any) -> Any:
    output = input.new_empty([*input.shape[:2], hidden.shape[-1]])
    workspace = input.new_empty(rest[-1])
    return output, *empty_like(hidden, cell), workspace


onednn_lstm_layer = define(
    "onednn_lstm_layer", f"{_STATES}, {_WEIGHTS}, int workspace_size", 4, _run, _foretold
)


def _run_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    arriving, given, (output, hidden, cell, workspace) = args[:3], args[3:10], args[10:]
    has_biases = given[5] is not None
    results = [output, hidden.unsqueeze(0), cell.unsqueeze(0)]
    of_output, *of_states = arriving
    gradients = [of_output, *(None if g is None else g.unsqueeze(0) for g in of_states)]
    flags: list[Any] = [False, _LSTM, hidden.shape[-1], 1, has_biases, True, False, [], False]
    # oneDNN writes into the workspace: a clone, for the graph may be kept for another backward.
    workspace = workspace.view(torch.uint8).clone()
    to_input, *to_weights, to_bias, _, to_hidden, to_cell = aten.mkldnn_rnn_layer_backward(
        *_arguments(*given), *results, *gradients, *flags, workspace
    )
    found = (to_input, to_hidden.squeeze(0), to_cell.squeeze(0), *to_weights, to_bias)
    # In bfloat16 some are in float32.
    return tuple(gradient.to(output.dtype) for gradient in found)


def _foretold_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    given = args[3:8]
    return *empty_like(*given), given[3].new_empty(given[3].shape[:1])


_backward = define(
    "onednn_lstm_layer_backward",
    f"{ARRIVING}, Tensor? cell_gradient, {_STATES}, {_WEIGHTS}, "
    "Tensor output, Tensor final_hidden, Tensor final_cell, Tensor workspace",
    6,
    _run_backward,
    _foretold_backward,
)


def _gradients(*args: Any) -> tuple[torch.Tensor | None, ...]:
    arriving, given, results = args[:3], args[4:11], args[12:]  # No gradient, no tensor between.
    *found, bias = _backward(*arriving, *given, *results)
    return *found, bias, bias.clone(), None


differentiate("onednn_lstm_layer", _gradients, without_gradient=1)
