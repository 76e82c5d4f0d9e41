"""Compare steps of eager PyTorch with steps through the backend."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.architectures.compare import TOLERANCES, difference
from tvmbridge.dynamo import tvmbridge

# Compile even the smallest graphs.
OPTIONS = {"smallest_graph": 1}


def step(call: Callable[..., Any], owner: nn.Module, args: Sequence[Any], seed: int) -> Any:
    """Run a call and its backward; return results, gradients, arguments, buffers, generator."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        return value.detach().clone().requires_grad_(value.requires_grad)

    given = pytree.tree_map(leaf, tuple(args))
    owner.zero_grad()
    torch.manual_seed(seed)
    result = call(*given)
    found = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    recorded = [t for t in found if t.grad_fn is not None]
    if recorded:
        torch.stack([t.double().square().sum() for t in recorded]).sum().backward()
    leaves = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]
    return {
        "result": result,
        "gradients": [p.grad for p in owner.parameters()] + [t.grad for t in leaves],
        "arguments": [t.detach() for t in leaves],
        "buffers": [b.clone() for b in owner.buffers()],
        "generator": torch.get_rng_state(),
    }


def assert_same(
    module: nn.Module,
    calls: Sequence[Sequence[Any]],
    *,
    backend: Callable[..., Any] = tvmbridge,
    dynamic: bool | None = None,
) -> nn.Module:
    """Assert that each call through the backend equals eager PyTorch's; return the module."""
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=backend, dynamic=dynamic, options=OPTIONS)
    for seed, args in enumerate(calls):
        found, expected = step(compiled, module, args, seed), step(reference, reference, args, seed)
        departure = difference(found, expected, TOLERANCES[torch.float32])
        assert departure is None, f"call {seed}: {departure}"
    return module
