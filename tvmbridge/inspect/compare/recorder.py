"""Eager PyTorch, operator by operator: its values, its draws, and how far rounding moves them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvmbridge.graph_capture.hoist import is_random
from tvmbridge.graph_capture.noise import RRELU_NAME, base_name
from tvmbridge.inspect.compare.trace import FOREIGN, TraceBuilder, source_line, tensors_in

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Records what eager PyTorch computes while it is active, backward too.

    Args:
        draws: random numbers to use instead of drawing, in program order; None: draw, and keep
            what was drawn in ``self.draws``.
        rounding: where given, every floating-point result is moved by up to one unit of rounding
            of its dtype, up or down at random: Monte Carlo arithmetic (Parker, 1997). Nothing is
            recorded then.
    """

    def __init__(
        self, draws: Sequence[torch.Tensor] | None, rounding: torch.Generator | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = TraceBuilder()
        self.draws: list[torch.Tensor] = []
        self._replayed = None if draws is None else list(draws)
        self._rounding = rounding
        self._numbers: dict[Any, int] = {}
        # Memory of a recorded tensor must not be given to another one.
        self._alive: list[torch.Tensor] = []

    def given(self, name: str, value: torch.Tensor) -> None:
        """Note an input of the run."""
        self._alive.append(value)
        self._numbers[_place(value)] = self.trace.given(name, value.detach().clone())

    def result(self, name: str, value: torch.Tensor) -> None:
        """Note a result of the run."""
        number = self._numbers.get(_place(value))
        steps = self.trace.steps
        if number is None or not _alike(steps[number].value, value):
            operands = () if number is None else (number,)
            number = self.trace.computed(name, "result", "", operands, value.detach().clone())
        self.trace.results[name] = number

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
            self._record(func, operands, result)
        return result

    def _record(self, func: Any, operands: list[torch.Tensor], result: Any) -> None:
        numbers = [self._numbers[p] for p in map(_place, operands) if p in self._numbers]
        source = _line_of_forward()
        for value in tensors_in(result):
            self._alive.append(value)
            self._numbers[_place(value)] = self.trace.computed(
                func.__name__, str(func), source, numbers, value.detach().clone()
            )

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
        # The operator itself says the dtype and the strides of its result.
        return func(*args, **kwargs).copy_(draw)

    def _move(self, result: Any, operands: list[torch.Tensor]) -> None:
        """Round fresh floating-point results once more; views share memory and were rounded."""
        taken = {t.untyped_storage().data_ptr() for t in operands}
        for value in tensors_in(result):
            if value.untyped_storage().data_ptr() not in taken:
                round_again(value, self._rounding)


def round_again(value: torch.Tensor, generator: torch.Generator | None) -> None:
    """Move the elements by up to one unit of rounding, in place; what would overflow stays."""
    if not value.is_floating_point() or value.numel() == 0:
        return
    eps = torch.finfo(value.dtype).eps
    unit = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device)
    moved = (value * (1 + eps * (2 * unit - 1))).to(value.dtype)
    value.copy_(torch.where(moved.isfinite(), moved, value))


def _place(tensor: torch.Tensor) -> Any:
    """What identifies a tensor: saved for backward, it comes back as another object."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _line_of_forward() -> str:
    """The line of the user's forward that runs now; empty in backward."""
    frame = sys._getframe(2)
    found = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_code.co_name == "run_forward" and name.endswith("eager.py"):
            return found
        if not found and not any(part in name for part in FOREIGN):
            found = source_line(name, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return ""
