"""Forward hooks of submodules are compiled if they are plain functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.dispatch_helpers import assert_same_step, eager, make_block, sample
from tvmbridge import add_tvm_dispatch, dispatch_report

Register = Callable[[Any], Any]


def _requires_grad(module: nn.Module, given: Any, output: torch.Tensor) -> None:
    """A hook like the one that transformers' ``enable_input_require_grads`` registers."""
    output.requires_grad_(True)


HOOKS: dict[str, Register] = {
    "another output": lambda m: m.inner.register_forward_hook(lambda m, a, out: out * 2),
    "another input": lambda m: m.outer.register_forward_pre_hook(lambda m, a: (a[0] + 1,)),
    "keywords": lambda m: m.outer.register_forward_hook(
        lambda m, a, k, out: out + len(k), with_kwargs=True
    ),
    "nothing": lambda m: m.inner.register_forward_hook(lambda *given: None),
    "requires_grad_": lambda m: m.inner.register_forward_hook(_requires_grad),
}


# The quick cases; each other case differs from one of these only in the hook's result.
QUICK = ("another output", "keywords")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in QUICK else [pytest.mark.slow]) for k in HOOKS]
)
def test_they_are_traced_and_guarded(kind: str) -> None:
    module = make_block().train()
    handle = HOOKS[kind](module)
    reference = copy.deepcopy(module)
    add_tvm_dispatch(module, sample())
    twin = copy.deepcopy(module)
    for net in (module, twin):
        for _ in range(3):
            assert_same_step(net, reference, sample())
        report = dispatch_report(net)
        assert (report.tvm_calls, report.fallbacks) == (3, {})
    handle.remove()
    assert_same_step(module, eager(module), sample())
    assert dispatch_report(module).fallbacks == {"the hooks of a submodule changed": 1}
    HOOKS[kind](twin)
    assert_same_step(twin, eager(twin), sample())
    assert sum(dispatch_report(twin).fallbacks.values()) == 1


def test_what_a_hook_reads_is_watched() -> None:
    factor = [2.0]

    def scaled(m: nn.Module, a: Any, out: torch.Tensor, extra: list[float] = [1.0]) -> Any:  # noqa: B006
        return out * factor[0] + extra[0]

    module, x = make_block().eval(), sample()
    module.inner.register_forward_hook(scaled)
    add_tvm_dispatch(module, x)
    with torch.no_grad():
        torch.testing.assert_close(module(x), eager(module)(x))
        factor[0] = 3.0
        torch.testing.assert_close(module(x), eager(module)(x))
        factor[0] = 2.0
        scaled.__defaults__[0][0] = 5.0  # type: ignore[index]
        torch.testing.assert_close(module(x), eager(module)(x))
        scaled.__defaults__[0][0] = 1.0  # type: ignore[index]
        torch.testing.assert_close(module(x), eager(module)(x))
    report = dispatch_report(module)
    assert (report.tvm_calls, sum(report.fallbacks.values())) == (2, 2)


def test_a_frozen_embedding_whose_output_requires_a_gradient_trains() -> None:
    """A hook may make a frozen embedding's output require a gradient, as for adapter training."""
    module = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8)).double().train()
    module[0].requires_grad_(False)
    module[0].register_forward_hook(_requires_grad)
    reference, tokens = copy.deepcopy(module), torch.randint(0, 10, (3, 4))
    add_tvm_dispatch(module, tokens)
    for net in (module, reference):
        for _ in range(2):
            net(tokens).square().flatten()[::3].sum().backward()
    for a, b in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(tokens), reference.eval()(tokens))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (3, {})


@pytest.mark.slow
def test_layers_are_pruned_before_and_after_the_dispatch() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).train()
    reference = copy.deepcopy(module)
    for each in (module, reference):
        prune.l1_unstructured(each[0], "weight", amount=0.4)
    add_tvm_dispatch(module)
    x = torch.randn(4, 6)
    for amount in (0.0, 0.5):
        for each in (module, reference):
            if amount:
                prune.l1_unstructured(each[2], "weight", amount=amount)
        for _ in range(2):
            results = []
            for each in (module, reference):
                each.zero_grad()
                each(x).square().sum().backward()
                results.append([each(x), each[0].weight, *(p.grad for p in each.parameters())])
            torch.testing.assert_close(*results)
    assert not dispatch_report(module).fallbacks
