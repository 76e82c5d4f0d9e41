"""Random models like recommenders: a chain of operators on each slice of a tensor."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

OPERATORS = ("norm", "plain", "rms", "linear", "tanh", "gelu", "relu", "softmax")
OPERATORS += ("drop", "residual", "scale", "shift", "shared", "clamp", "silu")
SPLITS = ("split", "sizes", "chunk", "slice", "unflatten")
ENDS = ("cat", "stack", "parts", "sum", "some", "both")


@dataclass(frozen=True)
class Recipe:
    """The description of a random model.

    - ``count``: the number of slices of width ``width``.
    - ``wide``: the number of further slices, which are twice as wide.
    - ``split``: how the input is cut into slices.
    - ``operators``: the operators of each chain.
    - ``end``: how the results of the chains are joined.
    - ``seed``: the seed of the parameters.
    - ``loops``: whether forward computes operator by operator, and not chain by chain.
    """

    count: int
    width: int
    wide: int
    split: str
    operators: tuple[str, ...]
    end: str
    seed: int
    loops: bool

    @staticmethod
    def drawn() -> st.SearchStrategy[Recipe]:
        """Return the hypothesis strategy of all recipes."""
        return st.builds(
            Recipe,
            count=st.integers(2, 6),
            width=st.sampled_from((1, 3, 4)),
            wide=st.sampled_from((0, 0, 2)),
            split=st.sampled_from(SPLITS),
            operators=st.lists(st.sampled_from(OPERATORS), min_size=1, max_size=6).map(tuple),
            end=st.sampled_from(ENDS),
            seed=st.integers(0, 1 << 16),
            loops=st.booleans(),
        )


class Chain(nn.Module):
    """The operators of a recipe, applied to one slice."""

    def __init__(self, recipe: Recipe, width: int, shared: nn.Parameter) -> None:
        super().__init__()
        self.operators = recipe.operators
        self.width = width
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in recipe.operators])
        self.rms = nn.RMSNorm(width)
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width))
        self.shift = nn.Parameter(torch.randn(1, width))
        self.shared = shared
        self.drop = nn.Dropout(0.4)

    def step(self, index: int, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Apply the operator at ``index`` to ``x``; ``first`` is the slice itself."""
        name = self.operators[index]
        known: dict[str, Any] = {
            "norm": lambda: self.norms[index](x),
            "plain": lambda: F.layer_norm(x, (self.width,)),
            "rms": lambda: self.rms(x),
            "linear": lambda: self.linear(x),
            "tanh": lambda: torch.tanh(x),
            "gelu": lambda: F.gelu(x),
            "relu": lambda: torch.relu(x),
            "softmax": lambda: torch.softmax(x, -1),
            "drop": lambda: self.drop(x),
            "residual": lambda: x + first,
            "scale": lambda: x * self.scale,
            "shift": lambda: self.shift - x,
            "shared": lambda: x * self.shared,
            "clamp": lambda: x.clamp(-1.5, 1.5),
            "silu": lambda: F.silu(x),
        }
        result: torch.Tensor = known[name]()
        return result


class Chains(nn.Module):
    """The model of a recipe, in float64."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.widths = [recipe.width] * recipe.count + [2 * recipe.width] * recipe.wide
        self.shared = nn.Parameter(torch.randn(()))
        self.chains = nn.ModuleList([Chain(recipe, w, self.shared) for w in self.widths])
        self.before = nn.Linear(sum(self.widths), sum(self.widths))
        self.double()

    def sample(self, rows: int) -> torch.Tensor:
        """Return an input with ``rows`` rows."""
        return torch.randn(rows, sum(self.widths), dtype=torch.float64)

    def cut(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Cut ``x`` into slices, in the recipe's way."""
        recipe = self.recipe
        if recipe.wide or recipe.split == "sizes":
            return list(x.split(self.widths, 1))
        if recipe.split == "split":
            return list(x.split(recipe.width, 1))
        if recipe.split == "chunk":
            return list(x.chunk(recipe.count, 1))
        if recipe.split == "unflatten":
            return list(x.unflatten(1, (recipe.count, recipe.width)).unbind(1))
        return [x[:, i * recipe.width : (i + 1) * recipe.width] for i in range(recipe.count)]

    def forward(self, x: torch.Tensor) -> Any:
        """Run the chains one by one, or all chains operator by operator."""
        first = self.cut(self.before(x))
        made = list(first)
        steps = range(len(self.recipe.operators))
        if self.recipe.loops:
            for index in steps:
                pairs = zip(self.chains, made, first, strict=True)
                made = [chain.step(index, y, z) for chain, y, z in pairs]
        else:
            for number, chain in enumerate(self.chains):
                for index in steps:
                    made[number] = chain.step(index, made[number], first[number])
        return self.join(made)

    def join(self, made: list[torch.Tensor]) -> Any:
        """Join the results of the chains, in the recipe's way."""
        end = self.recipe.end
        if end == "stack" and not self.recipe.wide:
            return torch.stack(made, 1)
        if end == "parts":
            return tuple(made)
        if end == "sum":
            return sum(y.sum(1) for y in made)
        if end == "some":
            return torch.cat(made[:-1], 1), made[-1] * 2
        if end == "both":
            return torch.cat(made, 1), made[0], torch.cat(made, 1).sin()
        return torch.cat(made, 1)


def outcome(module: nn.Module, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Run forward and backward from a seed; return results, gradients and next random numbers."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(seed)
    results = module(x)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    loss = sum((r * torch.linspace(0.5, 2, r.numel()).reshape(r.shape)).sum() for r in results)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    gradients = [p.grad for p in module.parameters()]
    assert x.grad is not None
    found = [*(r.detach() for r in results), x.grad, torch.rand(3)]
    return found + [torch.zeros(()) if g is None else g for g in gradients]


def assert_agree(
    module: nn.Module, other: nn.Module, x: torch.Tensor, bound: float = 1e-12
) -> None:
    """Assert that two modules agree in results, gradients and generator state.

    ``bound`` is the tolerance relative to the largest element.
    """
    ours, theirs = outcome(module, x, 7), outcome(other, x, 7)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        largest = max(1.0, float(b.abs().max()))
        torch.testing.assert_close(a, b, rtol=0, atol=bound * largest)


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy of ``module``."""
    return copy.deepcopy(module)
