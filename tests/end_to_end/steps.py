"""Run a training step of a module, and measure the difference between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.models import bert_layer
from tvmbridge import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch

KEY_BIAS, QUERY_BIAS = "key.bias", "query.bias"


@dataclass(frozen=True)
class Step:
    """The outputs, gradients and state after a training step; a missing gradient is None."""

    outputs: tuple[torch.Tensor, ...]
    gradients: Mapping[str, torch.Tensor | None]
    random_state: torch.Tensor


def base_layer(
    attention: str, dtype: torch.dtype = torch.float32, *, width: int = 768
) -> nn.Module:
    """Return a BertLayer of BERT-base, or of less width, with dropout 0.1, in train mode."""
    torch.manual_seed(7)
    return bert_layer(attention, width, width // 64, intermediate_size=4 * width).to(dtype)


def tensors_of(outputs: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a tensor, a tuple, or a ModelOutput."""
    if isinstance(outputs, torch.Tensor):
        return (outputs,)
    return tuple(outputs.values() if isinstance(outputs, Mapping) else outputs)


def weighted_sum(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return a scalar whose derivatives by the outputs are fixed random numbers, in any dtype.

    Layer norm's backward removes the smooth part of its cotangent. With smooth cotangents, or a
    mean of squares as loss, the gradients would be little more than rounding errors.
    """
    generator = torch.Generator().manual_seed(11)
    total = torch.zeros((), dtype=outputs[0].dtype)
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        total = total + (output * weights.to(output.dtype)).sum()
    return total


def training_step(
    module: nn.Module,
    *args: torch.Tensor,
    loss: Callable[[tuple[torch.Tensor, ...]], torch.Tensor] = weighted_sum,
    seed: int = 3,
    **kwargs: Any,
) -> Step:
    """Run forward and backward from ``seed``.

    Among the gradients, ``input.N`` is the gradient of the N-th floating-point input.
    """
    inputs = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    module.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    outputs = tensors_of(module(*inputs, **kwargs))
    random_state = torch.get_rng_state()
    loss(outputs).backward()
    gradients = {f"input.{i}": x.grad for i, x in enumerate(inputs)}
    gradients |= {name: p.grad for name, p in module.named_parameters()}
    return Step(tuple(o.detach() for o in outputs), gradients, random_state)


@contextmanager
def dispatched(module: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> Iterator[None]:
    """Dispatch the module inside the context; on exit assert that no call fell back."""
    sample = tuple(a.detach().clone().requires_grad_(a.is_floating_point()) for a in args)
    if not module.training:
        sample = args
    add_tvm_dispatch(module, sample, sample_kwargs=kwargs)
    try:
        yield
        report = dispatch_report(module)
        assert report.tvm_calls >= 1
        assert report.fallbacks == {}
    finally:
        remove_tvm_dispatch(module)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the reference."""
    difference = (value.double() - reference.double()).norm()
    return (difference / reference.double().norm()).item()


def gradient_errors(step: Step, reference: Step) -> dict[str, float]:
    """Return the relative error of each gradient.

    The true gradient of a key's bias is zero, because softmax ignores a shift, so its computed
    gradient is a rounding error. Its error is relative to the gradient of the query's bias.
    """
    assert step.gradients.keys() == reference.gradients.keys()
    errors = {}
    for name, expected in reference.gradients.items():
        value = step.gradients[name]
        assert (value is None) == (expected is None), f"{name}: {value} instead of {expected}"
        if value is None or expected is None:
            continue
        scale = reference.gradients[name.replace(KEY_BIAS, QUERY_BIAS)]
        assert scale is not None
        difference = (value.double() - expected.double()).norm()
        errors[name] = (difference / scale.double().norm()).item()
    return errors
