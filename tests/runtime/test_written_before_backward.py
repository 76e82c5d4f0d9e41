"""Writes between forward and backward give right gradients, or eager PyTorch's error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tvmbridge import add_tvm_dispatch, dispatch_report

Forward = Callable[["Written", torch.Tensor], tuple[torch.Tensor, ...]]


class Written(nn.Module):
    """A module whose forward is ``function(self, x)`` of two parameters and a 4 x 4 input."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Parameter(torch.rand(4, 4))
        self.b = nn.Parameter(torch.rand(4))
        self.function = forward
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.function(self, x)


# Functions that return an equal tensor in new memory in eager PyTorch, or one that backward reads.
COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda h: h.clone(),
    "copy": lambda h: h.to(h.dtype, copy=True),
    "product with one": lambda h: h * 1,
    "sum with zero": lambda h: h + 0,
    "concatenation of one": lambda h: torch.cat([h]),
    "transposed copy": lambda h: h.t().contiguous(),
    "computed back": lambda h: torch.sigmoid(h.logit()),
    "itself": lambda h: h,
    "view": lambda h: h.view(-1),
    "a row": lambda h: h[1],
    "relu": functional.relu,
}


def _of_sigmoid(copied: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    def forward(_: Written, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x.sigmoid()
        return copied(h), h * 2

    return forward


def _of_input(copied: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    def forward(_: Written, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = copied(x)
        return c, c.sin()

    return forward


def _cross_entropy(module: Written, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = functional.linear(x, module.a, module.b)
    return functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long)), logits


def _residual_stream(module: Written, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = x + module.a
    return h, functional.layer_norm(h, (4,), module.b, module.b)


MODULES: dict[str, Forward] = {
    **{f"sigmoid, {name}": _of_sigmoid(copied) for name, copied in COPIES.items()},
    **{f"input, {name}": _of_input(copied) for name, copied in COPIES.items()},
    "two heads": lambda m, x: (functional.linear(x, m.a, m.b).relu(), (x * m.b).tanh()),
    "bias repeated": lambda m, x: ((x + m.b) ** 2,),
    "stopped": lambda m, x: (x.sigmoid().detach() * m.a, x.sin()),
    "cross entropy": _cross_entropy,
    "residual stream": _residual_stream,
    "indices": lambda m, x: tuple((x * m.b).max(-1)),
    "softmax": lambda m, x: ((x * m.a).softmax(-1),),
}
QUICK = ["sigmoid, clone", "input, concatenation of one", "two heads", "stopped", "softmax"]


def _outcome(module: Written, x: torch.Tensor, written: Any, used: list[int]) -> Any:
    """Write a tensor, run backward from the outputs ``used``; return the gradients or the error."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    outputs = module(x)
    with torch.no_grad():
        if isinstance(written, int):
            outputs[written].fill_(1)
        elif written is not None:
            (x if written == "x" else getattr(module, written)).fill_(0.3)
    try:
        sum(outputs[i].sum() for i in used).backward()
    except RuntimeError as error:
        return str(error)[:60]
    return [t.grad for t in (x, *module.parameters())]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODULES]
)
def test_writes_before_backward_are_as_in_eager_pytorch(name: str) -> None:
    eager, x = Written(MODULES[name]), torch.rand(4, 4, dtype=torch.float64)
    state = copy.deepcopy(eager.state_dict())
    ours = add_tvm_dispatch(copy.deepcopy(eager), x.clone().requires_grad_())
    differentiable = [i for i, o in enumerate(eager(x.clone().requires_grad_())) if o.requires_grad]
    for written in (None, *range(len(eager(x))), "x", "a", "b"):
        for used in {tuple(differentiable), *((i,) for i in differentiable)}:
            for module in (eager, ours):
                module.load_state_dict(state)
            expected = _outcome(eager, x, written, list(used))
            for _ in range(2):  # The second call takes the fast path.
                ours.load_state_dict(state)
                found = _outcome(ours, x, written, list(used))
                if isinstance(expected, str) or isinstance(found, str):
                    assert found == expected, (written, used)
                else:
                    torch.testing.assert_close(found, expected)
    assert not dispatch_report(ours).fallbacks


def test_a_write_that_autograd_does_not_see_is_as_in_eager_pytorch() -> None:
    """NumPy writes a copy without a new version, so backward must not read the copy's memory."""

    def gradient(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        copied, result = module(x)
        copied.detach().numpy()[:] = 7
        x.detach().numpy()[:] = 7
        result.sum().backward()
        assert x.grad is not None
        return x.grad

    def forward(module: Written, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = (x + module.b).sigmoid()
        return h.clone(), h * 2

    eager, x = Written(forward), torch.rand(4, 4, dtype=torch.float64)
    ours = add_tvm_dispatch(copy.deepcopy(eager), x.clone().requires_grad_())
    for _ in range(2):
        torch.testing.assert_close(gradient(ours, x), gradient(eager, x))


@pytest.mark.parametrize("door", ["add", "compile"])
def test_a_detached_output_may_get_other_memory(door: str) -> None:
    def forward(m: Written, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = (x * m.a).exp()
        return h.detach(), h * m.b

    module, x = Written(forward), torch.rand(4, 4, dtype=torch.float64)
    expected = copy.deepcopy(module)
    torch._dynamo.reset()
    ours: Any = torch.compile(module, backend="tvmbridge")
    if door == "add":
        ours = add_tvm_dispatch(module, x)
    for called, owner in ((ours, module), (expected, expected)):
        detached, result = called(x)
        detached.data = torch.zeros_like(detached)
        result.sum().backward()
        assert owner.a.grad is not None
    torch.testing.assert_close(module.a.grad, expected.a.grad)
    torch.testing.assert_close(module.b.grad, expected.b.grad)


def test_an_output_that_eager_pytorch_saves_is_not_copied() -> None:
    ours = add_tvm_dispatch(
        Written(lambda m, x: ((x * m.a).sigmoid(),)), torch.rand(4, 4, dtype=torch.float64)
    )
    (output,) = ours(torch.rand(4, 4, dtype=torch.float64))
    call = output.grad_fn.step.call
    assert [number for number, _ in call.parts.kept_outputs] == [0]
    assert not call.parts.residuals
    assert not call.compiled.copied_outputs
