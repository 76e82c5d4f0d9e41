"""Draw a sequence of calls from a number, run it in eager PyTorch and through TVM, and compare."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from tests.random_sizes.models import MODELS, Model
from tvmbridge import add_tvm_dispatch, dispatch_report

# Error allowed: a multiple of eager float32's error, or a fraction of the largest absolute value.
_TIMES, _PART = 8.0, 2e-5


@dataclass(frozen=True)
class Call:
    """One call of a sequence: its sizes, and whether it is in train mode."""

    sizes: tuple[int, ...]
    training: bool


@dataclass(frozen=True)
class Drawn:
    """A sequence of calls of one model.

    - ``number``: the number that it is drawn from.
    - ``name``: the model's name.
    - ``declares``: whether the dispatch gets a spec of dynamic sizes; otherwise ``"auto"``.
    - ``sampled``: whether the dispatch gets a sample.
    - ``calls``: sizes and mode of each call.
    """

    number: int
    name: str
    declares: bool
    sampled: bool
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        told = "; ".join(f"{'train' if c.training else 'eval'} {c.sizes}" for c in self.calls)
        spec = "a spec" if self.declares else "auto"
        return f"{self.number} {self.name}, {spec}{', a sample' if self.sampled else ''}: {told}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a sequence.

    - ``result``: ``right``, ``wrong`` or ``error``.
    - ``reason``: the difference or the error; for ``right``, the reasons of fallbacks.
    - ``served``: how many calls compiled code served.
    - ``calls``: how many calls there were.
    """

    result: str
    reason: str
    served: int
    calls: int


def drawn(number: int, seed: int = 0) -> Drawn:
    """Draw the sequence of a number and a seed."""
    draw = random.Random(f"{seed}/{number}")
    name = list(MODELS)[number % len(MODELS)]
    model = MODELS[name]
    sizes: list[tuple[int, ...]] = []
    calls = []
    training = model.trains and draw.random() < 0.6
    for _ in range(draw.randint(4, 9)):
        sizes.append(_sizes(draw, model, sizes))
        if model.trains and draw.random() < 0.1:
            training = not training
        calls.append(Call(sizes[-1], training))
    declares = bool(model.places) and draw.random() < 0.35
    return Drawn(number, name, declares, declares and draw.random() < 0.5, tuple(calls))


def _sizes(draw: random.Random, model: Model, before: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Draw the sizes of a call: earlier sizes, small ones, multiples of eight, or any."""
    if before and draw.random() < 0.25:
        return draw.choice(before)
    found = []
    for i, (least, most) in enumerate(model.ranges):
        kind = draw.random()
        if before and kind < 0.3:
            found.append(before[-1][i])
        elif kind < 0.4:
            found.append(draw.randint(least, min(most, least + 3)))
        elif kind < 0.5:
            found.append(min(most, max(least, 8 * draw.randint(1, 16))))
        else:
            found.append(draw.randint(least, most))
    return tuple(found)


def run(sequence: Drawn) -> Outcome:
    """Run ``sequence`` in float32 through TVM, and in eager PyTorch in float32 and float64."""
    model = MODELS[sequence.name]
    torch.manual_seed(sequence.number)
    plain = model.build()
    ours, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    served = 0
    try:
        _dispatch(ours, model, sequence)
        for number, call in enumerate(sequence.calls):
            torch.manual_seed(1000 * sequence.number + number)
            arguments = model.arguments(*call.sizes)
            found = [step(m, model, arguments, call.training) for m in (ours, plain, exact)]
            different = difference(*found)
            served = dispatch_report(ours).tvm_calls
            if different:
                reason = f"call {number} {call}: {different}"
                return Outcome("wrong", reason, served, len(sequence.calls))
    except Exception as error:
        return Outcome("error", f"{type(error).__name__}: {error}", served, len(sequence.calls))
    report = dispatch_report(ours)
    calls = report.tvm_calls + sum(report.fallbacks.values())
    return Outcome("right", "; ".join(report.fallbacks), report.tvm_calls, calls)


def _dispatch(module: nn.Module, model: Model, sequence: Drawn) -> None:
    shapes: Any = "auto"
    sample: tuple[Any, ...] = ()
    if sequence.declares:
        shapes = _spec(model, sequence)
    if sequence.sampled and model.run is None:
        module.train(sequence.calls[0].training)
        sample = (model.arguments(*(max(n, 3 + i) for i, n in enumerate(sequence.calls[0].sizes))),)
    add_tvm_dispatch(module, *sample, dynamic_shapes=shapes, on_fallback="silent")


def _spec(model: Model, sequence: Drawn) -> Any:
    """Return a model's dynamic shapes: named Dims if the number is odd, else ``Dim.AUTO``."""
    arguments = model.arguments(*sequence.calls[0].sizes)
    spec: list[dict[int, Any]] = [{} for _ in arguments]
    for symbol, places in enumerate(model.places):
        named = Dim(f"size{symbol}", max=model.ranges[symbol][1])
        for argument, dimension in places:
            spec[argument][dimension] = named if sequence.number % 2 else Dim.AUTO
    if model.run is None:
        return tuple(spec)
    names = ("input_ids", "attention_mask", "labels")
    if len(spec) == 1:  # the labels are the tokens
        return {"input_ids": spec[0], "labels": spec[0], "use_cache": None}
    return dict(zip(names, spec, strict=True))


def step(
    module: nn.Module, model: Model, arguments: tuple[torch.Tensor, ...], training: bool
) -> list[torch.Tensor]:
    """Call the module; return its results, and in train mode also gradients and buffers."""
    dtype = next(module.parameters()).dtype
    given = tuple(a.to(dtype) if a.is_floating_point() else a.clone() for a in arguments)
    module.train(training)
    torch.manual_seed(3)
    with torch.set_grad_enabled(training):
        results = pytree.tree_leaves(model.call(module, given))
    if not training:
        return [r.detach() for r in results]
    module.zero_grad()
    generator = torch.Generator().manual_seed(5)
    total = torch.zeros((), dtype=dtype)
    for result in (r for r in results if r.requires_grad):
        weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        total = total + (result * weights.to(dtype)).sum()
    total.backward()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [*(r.detach() for r in results), *gradients, *(b.clone() for b in module.buffers())]


def difference(
    ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> str | None:
    if not len(ours) == len(plain) == len(exact):
        return f"{len(ours)} tensors, and {len(plain)} of eager PyTorch"
    for number, (mine, other, true) in enumerate(zip(ours, plain, exact, strict=True)):
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return f"tensor {number} is {tuple(mine.shape)}, and not {tuple(other.shape)}"
        if not mine.numel():
            continue
        finite = true.double().isfinite()
        if not torch.equal(finite, mine.isfinite()):
            return f"tensor {number} is finite elsewhere"
        truth = true.double()[finite]
        errors = [(x.double()[finite] - truth).abs() for x in (mine, other)]
        if not truth.numel():
            continue
        most, theirs, scale = (float(x.max()) for x in (*errors, truth.abs()))
        if most > max(_TIMES * theirs, _PART * scale, 1e-7):
            return (
                f"tensor {number} {tuple(mine.shape)} is off by {most:.3g}, eager by {theirs:.3g}"
            )
    return None
