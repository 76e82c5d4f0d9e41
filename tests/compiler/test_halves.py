"""The halves of backward: each call is in one of them, and together they compute the gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn
from tvm import relax

from tests.cotangent_helpers import assert_same, custom, dispatched
from tests.models import transformer_joint
from tvmbridge.coloring import color, color_backward
from tvmbridge.coloring.operators import is_view
from tvmbridge.compiler.halves import as_joint, in_halves
from tvmbridge.compiler.split import SplitModule, split
from tvmbridge.dispatch import _code_of
from tvmbridge.passes.base import bindings_of, flat_results
from tvmbridge.pipeline import run_passes, tidy_passes
from tvmbridge.runtime.halves import BackwardHalves

Triple = custom(lambda g, x: g * (2 + x - x))


class Layers(nn.Module):
    """A convolution, a norm, a function of the user's own, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.shift = nn.Parameter(torch.randn(1, 2, 1, 1))
        self.head = nn.Linear(3 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.norm(self.conv(x + self.shift)))
        return self.head(Triple.apply(hidden).flatten(1))


class Whole(nn.Module):
    """Gradients that are the cotangent itself, a gradient of the input, or pieces of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(3, 4))
        self.outer = nn.Parameter(torch.randn(3, 4))
        self.parts = nn.ParameterList([torch.randn(3, 2), torch.randn(3, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat(list(self.parts), dim=1)
        return (x + self.inner) * joined + self.outer


CASES = [(Layers, (2, 2, 4, 4)), (Whole, (3, 4))]


def calls(bound: Mapping[relax.Var, relax.Expr]) -> Counter[str]:
    """Return the calls among bindings that compute something, by operator and types."""
    found: Counter[str] = Counter()
    for var, value in bound.items():
        if isinstance(value, relax.Call) and not is_view(value):
            attributes = [str(a) for a in value.args if not isinstance(a, relax.Var)]
            found[f"{value.op} {value.attrs} {attributes} {var.ty}"] += 1
    return found


def wanted_by_inputs(parts: SplitModule, users: Collection[str]) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(parts.wanted) if name in users)


def test_each_call_is_in_one_of_three_functions() -> None:
    joint = transformer_joint().joint
    joint = replace(joint, mod=run_passes(joint.mod, tidy_passes(), []))
    coloring = color(joint)
    parts = split(joint, coloring)
    halved, _ = in_halves(parts, parts.mod["backward"], wanted_by_inputs(parts, {"x"}))
    functions = [parts.mod["forward"], halved.mod["forward"], halved.mod["backward"]]
    three = [calls(bindings_of(function)) for function in functions]
    assert min(map(len, three)) > 5
    # Backward computes factors of dropout from masks of one byte an element, as forward does.
    repeated = {b.var: b.value for b in coloring.forward if b.var in coloring.repeated}
    assert sum(three, Counter()) == calls(bindings_of(joint.mod["joint"])) + calls(repeated)
    relax.analysis.well_formed(halved.mod)


def test_the_first_half_has_what_gradients_of_inputs_depend_on_and_nothing_else() -> None:
    parts = split(transformer_joint().joint, color(transformer_joint().joint))
    joint = as_joint(parts, parts.mod["backward"], wanted_by_inputs(parts, {"x"}))
    function = joint.mod["joint"]
    bound = bindings_of(function)
    pending, needed = list(flat_results(function)[: joint.num_outputs]), set()
    while pending:
        var = pending.pop()
        if var in bound and var not in needed:
            needed.add(var)
            pending.extend(relax.analysis.free_vars(bound[var]))
    coloring = color_backward(joint)
    assert {b.var for b in coloring.forward} == needed
    both = {b.var for b in coloring.forward} & {b.var for b in coloring.backward}
    assert all(is_view(bound[var]) for var in both)
    assert set(coloring.residuals) <= needed


@pytest.mark.parametrize(("kind", "shape"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_halves_compute_the_gradients_of_eager(
    kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    """Check also that the caller may write into gradients of inputs before those of weights."""
    torch.manual_seed(0)
    module = kind().double()
    x = torch.randn(shape, dtype=torch.float64)
    ours = dispatched(module, x=x)
    assert halves_of(ours).compile()
    found = {}
    for model in (ours, module):
        source = x.clone().requires_grad_()
        out = model(source)
        cotangent = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
        weights = dict(model.named_parameters())
        (dx,) = torch.autograd.grad(out, [source], cotangent, retain_graph=True)
        kept = dx.clone()
        dx.zero_()
        of_weights = torch.autograd.grad(out, list(weights.values()), cotangent)
        found[model] = {"x": kept, **dict(zip(weights, of_weights, strict=True))}
        storages = {g.untyped_storage().data_ptr() for g in of_weights}
        assert cotangent.untyped_storage().data_ptr() not in storages or model is module
    assert_same(found[ours], found[module])
    assert halves_of(ours).runs == Counter(inputs=1, weights=1)


def halves_of(module: nn.Module) -> BackwardHalves:
    (specialization,) = _code_of(module).policy.specializations()
    ((_, entry),) = specialization.compiled()
    assert entry.training is not None
    assert entry.training.halves is not None
    return entry.training.halves
