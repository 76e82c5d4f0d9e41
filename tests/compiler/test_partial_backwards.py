"""Outputs that backward does not use: gradients equal eager's, even with infinite derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.cotangent_helpers import (
    SAMPLE,
    Trunk,
    assert_same,
    custom,
    dispatched,
    gradients,
    partial_backwards,
)
from tests.thinned import but_slow
from tvmbridge import BridgeError, dispatch_report
from tvmbridge.compiler.partial_backwards import PartialBackwards, all_finite
from tvmbridge.dispatch import _code_of


class Heads(nn.Module):
    """A module whose outputs have infinite or NaN derivatives at zero inputs."""

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


@pytest.mark.parametrize("joint", but_slow(["relax", "aot"], "aot"))
def test_each_pattern_gives_the_gradients_of_eager(joint: str) -> None:
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


def test_a_backward_that_hides_nan_gets_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Trunk(custom(lambda g, x: torch.nan_to_num(g, nan=7.0) * 2))
    ours = dispatched(module)
    with monkeypatch.context() as patch:
        patch.setattr(partial_of(ours)._loader, "_build", fails)
        with pytest.raises(BridgeError, match=r"no compiler. Use all outputs .*remove_tvm_dispat"):
            gradients(ours, [0])
    for used in ([0], [2], [1, 2]):
        assert_same(gradients(ours, used), gradients(module, used))
    assert partial_backwards(ours) == 3


def fails(*args: object, **kwargs: object) -> None:
    raise BridgeError("no compiler")


def partial_of(module: nn.Module) -> PartialBackwards:
    [specialization] = _code_of(module).kept.known
    [(_, entry)] = specialization.compiled()
    partial = entry.compiled.partial_backwards
    assert partial is not None
    return partial


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_all_finite(dtype: torch.dtype) -> None:
    values = torch.ones(3, dtype=dtype)
    assert all_finite([values, torch.zeros(0, dtype=dtype)])
    for bad in (float("inf"), float("-inf"), float("nan")):
        assert not all_finite([values, torch.tensor([1.0, bad], dtype=dtype)])
    assert not all_finite([torch.tensor([float("inf"), float("-inf")], dtype=dtype)])


class WithUnread(nn.Module):
    """A module with two outputs, a parameter for each, and a parameter that forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unread = (
            nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.first, x * self.second


def test_hooks_of_what_no_gradient_reaches_are_not_called() -> None:
    module = WithUnread().train()
    rows = SAMPLE.abs()[:2]
    ours, x = dispatched(module, x=rows), rows.clone().requires_grad_()
    called: list[str] = []
    for name, parameter in ours.named_parameters():
        parameter.register_hook(lambda gradient, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda parameter: called.append("stored"))
    first, second = ours(x)
    (first.sum() + second.sum()).backward()
    assert sorted(called) == ["first", "second", "stored", "stored"]
    with pytest.raises(BridgeError, match=r"hook on second would be called without a gradient"):
        ours(x)[0].sum().backward()
    assert dispatch_report(ours).fallbacks == {}
