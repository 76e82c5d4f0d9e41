"""Outputs that backward does not use: gradients are eager's, where derivatives are infinite too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tvmbridge import BridgeError, CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.cotangents import PartialBackwards, all_finite
from tvmbridge.dispatch import _dispatcher_of

SAMPLE = torch.tensor([[0.0, 1.0, -2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 1.0]], dtype=torch.float64)


class Heads(nn.Module):
    """Outputs whose derivatives are infinite or NaN where an input is zero, behind one product."""

    def __init__(self, known_to_relax: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64))
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        self.apart = nn.Linear(3, 2, dtype=torch.float64)
        self.known_to_relax = known_to_relax

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.scale * x
        size = hidden.abs()
        first, second = size.split([1, 2], dim=1)
        outputs = (
            (hidden * hidden).sum(),
            self.head(torch.sqrt(size)),
            self.apart(x),
            torch.log(size),
            torch.cat([first.sqrt(), second], dim=1),
            1 / hidden,
        )
        if self.known_to_relax:
            return outputs
        return (*outputs, hidden.norm(dim=1), torch.std(hidden, dim=1))


def gradients(
    module: nn.Module, used: Sequence[int], x: torch.Tensor = SAMPLE
) -> dict[str, torch.Tensor | None]:
    """The gradients of the parameters and of the input where these outputs are used."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    outputs = module(x)
    chosen = [outputs[i] for i in used]
    torch.autograd.backward(chosen, [torch.full_like(o, 1.3) for o in chosen])
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def assert_same(
    ours: dict[str, torch.Tensor | None], eager: dict[str, torch.Tensor | None]
) -> None:
    """Equal to rounding in float64, None in the same places."""
    for name, expected in eager.items():
        found = ours[name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-12, atol=1e-12)


def dispatched(module: nn.Module, joint: str = "auto", x: torch.Tensor = SAMPLE) -> nn.Module:
    """A dispatched copy of ``module``."""
    ours = copy.deepcopy(module)
    sample = x.clone().requires_grad_()
    return add_tvm_dispatch(ours, (sample,), options=CompileOptions(joint=joint))


def partial_backwards(module: nn.Module) -> int:
    return sum(s.partial_backwards for s in dispatch_report(module).specializations)


@pytest.mark.parametrize("joint", ["relax", "aot"])
def test_each_pattern_gives_the_gradients_of_eager(joint: str) -> None:
    torch.manual_seed(0)
    module = Heads(known_to_relax=joint == "relax")
    ours = dispatched(module, joint)
    everything = range(len(module(SAMPLE)))
    patterns = [[0], [0, 2], [2], [4], [0], everything]
    for used in patterns if joint == "relax" else [[0, 3], [0, 6], [0, 7], everything]:
        assert_same(gradients(ours, used), gradients(module, used))
    finite = gradients(ours, [0])
    assert all(g is None or g.isfinite().all() for g in finite.values())
    assert finite["head.weight"] is None
    assert dispatch_report(ours).fallbacks == {}
    assert "outputs that nothing used" in str(dispatch_report(ours))


def test_one_backward_is_compiled_where_zeros_will_not_do() -> None:
    module = Heads(known_to_relax=True)
    ours = dispatched(module)
    harmless = SAMPLE.abs() + 1
    assert_same(gradients(ours, [0], harmless), gradients(module, [0], harmless))
    assert partial_backwards(ours) == 0
    for x in (SAMPLE, SAMPLE, harmless):
        assert_same(gradients(ours, [0], x), gradients(module, [0], x))
    assert partial_backwards(ours) == 1
    x = SAMPLE.clone().requires_grad_()
    loss, *others = ours(x)
    twice = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
    torch.testing.assert_close(twice, [2 * module.scale.detach() ** 2 * SAMPLE] * 2)
    weight = ours.get_parameter("head.weight")
    assert torch.autograd.grad(loss, [weight], retain_graph=True, allow_unused=True) == (None,)
    assert torch.autograd.grad(others[0].sum(), weight)[0].isfinite().all()
    assert partial_backwards(ours) == 2


def test_optimizers_step_as_with_eager_while_patterns_change() -> None:
    torch.manual_seed(0)
    module = Heads(known_to_relax=True)
    ours = dispatched(module)
    results = []
    for model in (ours, module):
        parameters = model.parameters()
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1)
        for used in ([0], [0, 2], [0], [2], [0, 2]):
            optimizer.zero_grad()
            outputs = model(SAMPLE)
            sum((outputs[i] ** 2).sum() for i in used).backward()  # type: ignore[union-attr]
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(p.isfinite().all() for p in results[0])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def custom(backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> type:
    """An autograd function that doubles, with this backward of the cotangent and the input."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
            return backward(g, ctx.saved_tensors[0])

    return Custom


class Trunk(nn.Module):
    """Two outputs behind a custom function, a third beside it."""

    def __init__(self, function: type) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.scale * x
        doubled = self.function.apply(hidden)  # type: ignore[attr-defined]
        return doubled.sum(), doubled.abs().sqrt(), hidden.sum()


def test_a_backward_that_hides_nan_gets_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Trunk(custom(lambda g, x: torch.nan_to_num(g, nan=7.0) * 2))
    ours = dispatched(module)
    with monkeypatch.context() as patch:
        patch.setattr(partial_of(ours), "_build", fails)
        with pytest.raises(BridgeError, match=r"no compiler. Use all outputs .*remove_tvm_dispat"):
            gradients(ours, [0])
    for used in ([0], [2], [1, 2]):
        assert_same(gradients(ours, used), gradients(module, used))
    assert partial_backwards(ours) == 3


def fails(*args: object, **kwargs: object) -> None:
    raise BridgeError("no compiler")


def partial_of(module: nn.Module) -> PartialBackwards:
    [specialization] = _dispatcher_of(module).specializations
    [variant] = specialization.variants.values()
    partial = variant.compiled.partial_backwards
    assert partial is not None
    return partial


def test_a_backward_that_adds_is_called_or_not_as_in_eager() -> None:
    module = Trunk(custom(lambda g, x: g + x.sign()))
    ours = dispatched(module)
    for used in ([0, 1, 2], [2], [0], [0, 2]):
        assert_same(gradients(ours, used), gradients(module, used))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_all_finite(dtype: torch.dtype) -> None:
    values = torch.ones(3, dtype=dtype)
    assert all_finite([values, torch.zeros(0, dtype=dtype)])
    for bad in (float("inf"), float("-inf"), float("nan")):
        assert not all_finite([values, torch.tensor([1.0, bad], dtype=dtype)])
    assert not all_finite([torch.tensor([float("inf"), float("-inf")], dtype=dtype)])


def several(
    backward: Callable[..., torch.Tensor], *, zeros: bool = True, told: str = "method"
) -> type:
    """A function of two outputs, with this backward of the input and the cotangents."""

    class Several(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
            if told == "method":
                ctx.set_materialize_grads(zeros)
            else:
                ctx.materialize_grads = zeros
            ctx.save_for_backward(x)
            return x * 2, x.sqrt()

        @staticmethod
        def backward(ctx, *gradients):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
            return backward(ctx.saved_tensors[0], *gradients)

    return Several


class Pair(nn.Module):
    """Both outputs of a function of two, which ``behind`` takes further, and one beside them."""

    def __init__(self, function: type, behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.behind = behind
        self.scale = nn.Parameter(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = self.function.apply(self.scale * x)  # type: ignore[attr-defined]
        return self.behind(first), self.behind(second), self.scale.sum()


def no_change(x: torch.Tensor) -> torch.Tensor:
    return x


ROWS = SAMPLE.abs()[:2]
SEVERAL: dict[str, Callable[..., torch.Tensor]] = {
    "infinite": lambda x, a, b: a * 2 + b / (2 * x.sqrt()),
    "nan is hidden": lambda x, a, b: torch.nan_to_num(a * 2 + b / (2 * x.sqrt()), nan=7.0),
    "zeros are asked for": lambda x, a, b: a * 2 + (b == 0).to(a.dtype),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_functions_get_zeros_for_outputs_that_are_not_used(kind: str) -> None:
    for behind in (no_change, torch.exp):
        module = Pair(several(SEVERAL[kind]), behind)
        ours = dispatched(module, x=ROWS)
        for used in ([0], [0, 2], [1], [2]):
            assert_same(gradients(ours, used, ROWS), gradients(module, used, ROWS))
        assert dispatch_report(ours).fallbacks == {}


class Chain(nn.Module):
    """Custom functions behind one another; one gives the one before it no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = several(lambda x, a, b: torch.nan_to_num(a + b / (x * 0), nan=3.0))
        self.second = custom(lambda g, x: torch.nan_to_num(g / (x * 0), nan=5.0) + x)
        self.scale = nn.Parameter(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = self.first.apply(self.scale * x)  # type: ignore[attr-defined]
        third, _ = self.first.apply(self.second.apply(first) + 1)  # type: ignore[attr-defined]
        return third.exp(), first.sum() + second.sin().sum(), second * x, self.scale.sum()


def test_functions_behind_functions_are_called_or_not_as_in_eager() -> None:
    module = Chain()
    ours = dispatched(module, x=ROWS)
    for used in ([0], [0, 3], [1], [2], [1, 2], [3], [0, 1, 2, 3]):
        assert_same(gradients(ours, used, ROWS), gradients(module, used, ROWS))
    assert dispatch_report(ours).fallbacks == {}


class Checkpointed(nn.Module):
    """A checkpoint with several results, of which each has a parameter of its own."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.scale = nn.Parameter(torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64))
        self.other = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = checkpoint(self.part, x, use_reentrant=self.reentrant)  # type: ignore[misc]
        return first * 2, second.exp(), third["also"] + first.detach()

    def part(self, x: torch.Tensor) -> tuple[Any, ...]:
        return x * self.scale, (x * self.other).sqrt(), {"also": (x * self.scale).sin()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_with_several_results(reentrant: bool) -> None:
    module = Checkpointed(reentrant=reentrant)
    ours = dispatched(module, x=ROWS)
    found = [[o.requires_grad for o in m(ROWS.clone().requires_grad_())] for m in (ours, module)]
    assert found[0] == found[1] == [True, True, not reentrant]
    for used in ([0], [1], [0, 1]) if reentrant else ([0], [1], [2], [0, 2]):
        assert_same(gradients(ours, used, ROWS), gradients(module, used, ROWS))
    assert dispatch_report(ours).fallbacks == {}


@pytest.mark.parametrize("told", ["method", "attribute"])
def test_what_functions_get_where_that_is_not_zeros_is_refused_by_name(told: str) -> None:
    def by_presence(x: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None) -> Any:
        return 2 * a if b is None else 5 * b if a is None else a * b

    module = Pair(several(by_presence, zeros=False, told=told), no_change)
    ours = dispatched(module, x=ROWS)
    for used in ([0, 1], [0, 1, 2], [2]):
        assert_same(gradients(ours, used, ROWS), gradients(module, used, ROWS))
    with pytest.raises(BridgeError, match="Several gets None for an output"):
        gradients(ours, [0], ROWS)
