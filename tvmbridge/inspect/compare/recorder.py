"""Record PyTorch's values and random draws operator by operator, or round its results randomly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tvmbridge.core.torch_private import TorchDispatchMode
from tvmbridge.graph_capture.hoist import is_random
from tvmbridge.graph_capture.noise import RRELU_NAME, base_name
from tvmbridge.inspect.compare.trace import Trace, tensors_in

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Records the operators that PyTorch runs while the mode is active, in forward and backward.

    - ``trace``: the recorded values.
    - ``draws``: the random draws that were made or replayed.

    Args:
        draws: random draws to replay, in program order; None: draw new numbers.
        rounding: a generator for Monte Carlo arithmetic (Parker, 1997). Every floating-point
            result is changed randomly by up to one unit of rounding of its dtype, and nothing is
            recorded. None: results are unchanged, and recorded.
    """

    def __init__(
        self,
        draws: Sequence[torch.Tensor] | None = None,
        rounding: torch.Generator | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(written=True)
        self.draws: list[torch.Tensor] = []
        # The name and source line to record for the operators that run now; empty: their own.
        self.operator = self.source = ""
        # Whether backward is between two autograd nodes, where autograd sums adjoints.
        self.between = False
        self._replayed = None if draws is None else list(draws)
        self._rounding = rounding

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_random(func, args, kwargs):
            result = self._draw(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        operands = tensors_in((args, kwargs))
        if self._rounding is not None:
            if operands and not func._schema.is_mutable:
                self._move(result, operands)
        elif func.namespace != "prim":
            operator = self.operator or str(func)
            if self.between and func.overloadpacket in (aten.add, aten.add_):
                operator = "sum of adjoints"
            for value in tensors_in(result):
                self.trace.add(value, operator, operands, self.source)
        return result

    def gradients(
        self,
        outputs: Mapping[str, torch.Tensor],
        leaves: Mapping[str, torch.Tensor],
        cotangents: Mapping[str, torch.Tensor],
    ) -> None:
        """Differentiate ``outputs`` and record the gradients of ``leaves``, all by name."""
        if not outputs or not leaves:
            return
        arriving = [cotangents[name] for name in outputs]
        if self._rounding is not None:
            # A sum of cotangents may cancel. Rounding the cotangents shows how much.
            arriving = [c.clone() for c in arriving]
            for cotangent in arriving:
                round_again(cotangent, self._rounding)
        for cotangent in arriving:
            self.trace.add(cotangent)
        with self:
            found = torch.autograd.grad(
                list(outputs.values()), list(leaves.values()), arriving, allow_unused=True
            )
        for name, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                self.trace.note_result(f"gradient of {name}", gradient)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._replayed is not None:
            return self._replay(func, args, kwargs, self._replayed[len(self.draws)])
        result = func(*args, **kwargs)
        drawn = result[1] if func is aten.native_dropout.default else result
        if base_name(func) == RRELU_NAME:
            drawn = args[1]
        self.draws.append(drawn.detach().clone())
        return result

    def _replay(self, func: Any, args: Any, kwargs: Any, draw: torch.Tensor) -> Any:
        self.draws.append(draw)
        if func is aten.native_dropout.default:
            x, p = args[:2]
            factor = 0.0 if p == 1 else 1.0 / (1.0 - p)
            return x * draw.to(x.dtype) * factor, draw.to(torch.bool)
        if base_name(func) == RRELU_NAME:
            product = args[0] * args[1].copy_(draw)
            return args[0].copy_(product) if func._schema.name.endswith("_") else product
        if func._schema.is_mutable:
            return args[0].copy_(draw)
        # Calling the operator gives a result with its dtype and strides.
        return func(*args, **kwargs).copy_(draw)

    def _move(self, result: Any, operands: list[torch.Tensor]) -> None:
        """Round new floating-point results randomly; views share memory that was rounded before."""
        taken = {t.untyped_storage().data_ptr() for t in operands}
        for value in tensors_in(result):
            if value.untyped_storage().data_ptr() not in taken:
                round_again(value, self._rounding)


def round_again(value: torch.Tensor, generator: torch.Generator | None) -> None:
    """Change elements at random by up to a rounding unit, in place, except if they overflow."""
    if not value.is_floating_point() or value.numel() == 0:
        return
    eps = torch.finfo(value.dtype).eps
    unit = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device)
    moved = (value * (1 + eps * (2 * unit - 1))).to(value.dtype)
    value.copy_(torch.where(moved.isfinite(), moved, value))
