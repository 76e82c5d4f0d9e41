"""Stacks of recurrent layers without a gradient: PyTorch's own function for one as an operator.

PyTorch's functions are composite: a trace would take them apart into their steps. As operators they
run at a call as eager PyTorch runs them, by the same kernels and with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tvmbridge.graph_capture.trace.recurrent_layers import define, empty_like, refuse_gradient

_PARAMETERS = (
    "Tensor input, Tensor[] states, Tensor[] weights, bool has_biases, int num_layers, "
    "bool bidirectional, bool batch_first, bool learned, ScalarType? autocast"
)


def _define_stack(name: str, function: Callable[..., tuple[torch.Tensor, ...]]) -> Any:
    """The operator of PyTorch's ``function``, without dropout.

    Its ``learned`` says whether weights require a gradient, for by that PyTorch chooses among
    products even where none is computed; ``autocast`` is the dtype of autocast, None where that is
    off. The outputs have their steps first in any case, for so they lie in memory.
    """

    def run(
        input: torch.Tensor,
        states: list[torch.Tensor],
        weights: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        bidirectional: bool,
        batch_first: bool,
        learned: bool,
        autocast: torch.dtype | None,
    ) -> tuple[torch.Tensor, ...]:
        given: Any = states if function is torch.lstm else states[0]
        flags = (has_biases, num_layers, 0.0, False, bidirectional, batch_first)
        weights = [weight.detach().requires_grad_(learned) for weight in weights]
        with torch.autocast(input.device.type, autocast, enabled=autocast is not None):
            output, *finals = function(input, given, weights, *flags)
        return output.transpose(0, 1) if batch_first else output, *finals

    def foretell(
        input: torch.Tensor, states: list[torch.Tensor], weights: list[torch.Tensor], *flags: Any
    ) -> tuple[torch.Tensor, ...]:
        _, _, bidirectional, batch_first, _, autocast = flags
        steps = input.transpose(0, 1) if batch_first else input
        size = states[0].shape[-1] * (2 if bidirectional else 1)
        results = [steps.new_empty([*steps.shape[:2], size]), *empty_like(*states)]
        if autocast is not None:
            # Dtypes are asked of the function itself, for one step of one sequence.
            shapes = [[1, 1, input.shape[-1]], *([len(s), 1, s.shape[-1]] for s in states)]
            with _as_in_eager_pytorch():
                x, *zeros = map(_zeros, shapes, [input, *states])
                found = run(x, zeros, [_zeros(w.shape, w) for w in weights], *flags)
            results = [r.to(f.dtype) for r, f in zip(results, found, strict=True)]
        return tuple(results)

    operator = define(f"{name}_stack", _PARAMETERS, 3 if name == "lstm" else 2, run, foretell)
    refuse_gradient(f"{name}_stack")
    return operator


@contextmanager
def _as_in_eager_pytorch() -> Iterator[None]:
    """Within it tensors are real in a trace, and oneDNN is on, which torch.export turns off."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(True)
    try:
        with _disable_current_modes(), torch._C._DisablePythonDispatcher(), torch.no_grad():
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


STACKS: dict[Any, Any] = {
    function: _define_stack(function.__name__, function)
    for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
}
