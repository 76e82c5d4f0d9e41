"""One training step of a module, and how far two such steps are from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from tvmbridge import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch

KEY_BIAS, QUERY_BIAS = "key.bias", "query.bias"


@dataclass(frozen=True)
class Step:
    """What a training step leaves behind; ``gradients`` has None where there is none."""

    outputs: tuple[torch.Tensor, ...]
    gradients: Mapping[str, torch.Tensor | None]
    random_state: torch.Tensor


def base_layer(attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A BertLayer of BERT-base, dropout 0.1, in train mode."""
    torch.manual_seed(7)
    config = BertConfig(attn_implementation=attention)
    layer: nn.Module = BertLayer(config)
    return layer.to(dtype).train()


def tensors_of(outputs: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a tensor, a tuple, or a ModelOutput."""
    if isinstance(outputs, torch.Tensor):
        return (outputs,)
    return tuple(outputs.values() if isinstance(outputs, Mapping) else outputs)


def weighted_sum(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A scalar whose derivatives by the outputs are fixed random numbers, the same in any dtype.

    Layer norm takes the smooth part of its cotangent away: with smooth numbers, or the mean of the
    squares, little but rounding would remain of the gradients.
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
    """Forward and backward from ``seed``; ``input.N`` are the gradients of floating inputs."""
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
    """Within it the module runs through TVM; at the end no call may have fallen back."""
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
    """Norm of the difference over norm of the reference."""
    difference = (value.double() - reference.double()).norm()
    return (difference / reference.double().norm()).item()


def gradient_errors(step: Step, reference: Step) -> dict[str, float]:
    """The relative error of every gradient.

    The true gradient of a key's bias is zero, since softmax does not see a shift: what is computed
    for it is rounding. So its error is taken relative to the gradient of the query's bias.
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
