"""Outputs that share memory with inputs, state or one another, as they do in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.aliasing_helpers import Applied, relations, rows
from tests.dispatch_helpers import eager
from tvmbridge import UnsupportedOperatorError, add_tvm_dispatch, dispatch_report


def _whole(m: Any, x: torch.Tensor) -> Any:
    y = x * m.weight
    return y.t(), y, y, y[1:], y.view(-1)


def _complex(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex((x * m.weight).view(3, 3, 2)) * (1 - 0.5j)


def _written(m: Any, x: torch.Tensor) -> Any:
    m.buffer.add_(1)
    return m.buffer, m.buffer.view(2, 3), x * m.weight * m.buffer


def _exchanging(m: Any, x: torch.Tensor) -> Any:
    state = torch.cat([x.sum(0) * m.weight, m.weight])
    m.buffer = state[3:9].detach()
    return state[1:], (state * 2)[:4], state[:8]


FUNCTIONS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "view of an input": lambda m, x: (x.view(-1), x * m.weight),
    "slice of an input": lambda m, x: (x[1:, ::2], x.t(), x * m.weight),
    "one view twice": lambda m, x: ((view := x.t()), view, x * m.weight),
    "detached input": lambda m, x: (x.detach(), x.detach()[0], x * m.weight),
    "input itself": lambda m, x: [x, x.contiguous(), x * m.weight],
    "parameter": lambda m, x: (m.weight, m.weight.view(2, 3), m.weight.detach()[2:], x * m.weight),
    "buffer": lambda m, x: (m.buffer, m.buffer[1:], x * m.weight),
    "written buffer": _written,
    "exchanged buffer": _exchanging,
    "outputs of one tensor": _whole,
    "parts of complex numbers": lambda m, x: ((z := _complex(m, x)).real, torch.view_as_real(z)),
    "parts of one tensor": lambda m, x: (x * m.weight).chunk(2, 1),
    "real and imaginary parts": lambda m, x: ((z := _complex(m, x)).real, z.imag),
}
# Outputs that do not overlap: compiled code may return dense tensors with memory of their own.
_APART = ("parts of one tensor", "real and imaginary parts")


# In inference, quick tests have one kind for each source of memory.
_IN_INFERENCE = ("view of an input", "input itself", "buffer", "exchanged buffer")


@pytest.mark.parametrize(
    ("kind", "grad"),
    [
        *((kind, True) for kind in FUNCTIONS),
        *((kind, False) for kind in _IN_INFERENCE),
        *(
            pytest.param(kind, False, marks=pytest.mark.slow)
            for kind in FUNCTIONS
            if kind not in _IN_INFERENCE
        ),
    ],
)
def test_outputs_alias_as_in_eager(kind: str, grad: bool) -> None:
    module = add_tvm_dispatch(Applied(FUNCTIONS[kind]).train(grad), rows().requires_grad_(grad))
    found = []
    with torch.set_grad_enabled(grad):
        for each in (eager(module), module):
            x = rows().requires_grad_(grad)
            outputs = each(x)
            leaves = pytree.tree_leaves(outputs)
            related = relations(outputs, each, x)
            gradient = None
            if grad:
                total = sum((i + 1) * o.square().sum() for i, o in enumerate(leaves))
                gradient = torch.autograd.grad(total, (x, each.weight))
            found.append((related, leaves, gradient))
    if kind not in _APART:
        assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1:], found[0][1:])
    assert dispatch_report(module).tvm_calls == 1


def test_writes_are_seen_through_views() -> None:
    module = add_tvm_dispatch(Applied(_whole).eval(), rows())
    with torch.no_grad():
        transposed, whole, same, row, flat = module(rows())
        row.zero_()
    assert same is whole
    assert torch.equal(transposed, whole.t())
    assert not flat[6:].any()
    assert dispatch_report(module).tvm_calls == 1


def test_autograd_follows_a_write_into_a_view() -> None:
    gradients = []
    module = add_tvm_dispatch(Applied(_whole).train(), rows().requires_grad_())
    for each in (module, eager(module)):
        x = rows().requires_grad_()
        _, whole, _, row, _ = each(x)
        row.mul_(3)
        gradients.append(torch.autograd.grad(whole.square().sum(), (x, each.weight)))  # type: ignore[arg-type]
    torch.testing.assert_close(*gradients)


def test_other_strides_of_a_viewed_input_fall_back() -> None:
    module = add_tvm_dispatch(Applied(FUNCTIONS["slice of an input"]).eval(), rows())
    x = rows().t().contiguous().t()
    with torch.no_grad():
        sliced, *_ = module(x)
    sliced.zero_()
    assert not x[1:, ::2].any()
    assert dispatch_report(module).fallbacks == {
        "a tensor of which a view is returned has other strides": 1
    }


def _exchanged(m: Any, x: torch.Tensor) -> Any:
    before = m.buffer
    m.buffer = before * 2
    return before[1:], x * m.weight


def _under_no_grad(m: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        view = x.view(-1)
    return view[2:], x * m.weight


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


OTHER_HISTORY: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "leaf": (lambda m, x: (x * m.weight).detach().requires_grad_(), "a gradient of its own"),
    "exchanged": (_exchanged, "before forward exchanged it"),
    "under no_grad": (_under_no_grad, "not that of a view"),
    "reversed": (lambda m, x: ((y := x * m.weight), _Reversed.apply(y)), "not that of a view"),
    "reversed input": (lambda m, x: (_Reversed.apply(x), x * m.weight), "not that of a view"),
    "reversed views": (lambda m, x: ((y := x * m.weight)[1:], _Reversed.apply(y)[:2]), "not that"),
    "other dtype": (lambda m, x: ((y := x * m.weight), y.view(torch.int32)), "another dtype"),
    "real part": (lambda m, x: ((z := _complex(m, x)), z.real), "another dtype"),
}


@pytest.mark.parametrize("kind", OTHER_HISTORY)
def test_outputs_that_are_more_than_views_are_refused(kind: str) -> None:
    function, reason = OTHER_HISTORY[kind]
    with pytest.raises(UnsupportedOperatorError, match=reason):
        add_tvm_dispatch(Applied(function).train(), rows().requires_grad_())


def test_a_written_input_that_is_also_another_input_falls_back() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x + y

    module = add_tvm_dispatch(Writes().eval(), (rows(), rows()))
    for make in (lambda: (rows(), rows()), lambda: (x := rows(), x), lambda: (x := rows(), x[:])):
        ours, theirs = make(), make()
        torch.testing.assert_close(module(*ours), Writes()(*theirs))
        torch.testing.assert_close(ours, theirs)
    assert dispatch_report(module).tvm_calls == 1
    assert list(dispatch_report(module).fallbacks) == [
        "a tensor that forward writes shares memory, with another or in itself"
    ]


def test_a_written_input_whose_elements_share_memory_falls_back() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[0].sub_(1)
            return x * 2

    module = add_tvm_dispatch(Writes().eval(), rows())
    ours, theirs = (rows()[:1].expand(4, -1) for _ in range(2))
    torch.testing.assert_close(module(ours), Writes()(theirs))
    torch.testing.assert_close(ours, theirs)
    assert dispatch_report(module).tvm_calls == 0


def _views_of_expanded(m: Any, x: torch.Tensor) -> Any:
    return x.t(), x[1:], x[-1], x.split(2)[1], x.diagonal(), x[:, 1:3], x * m.weight


def test_views_of_an_expanded_tensor_have_their_own_gradients() -> None:
    module = add_tvm_dispatch(Applied(_views_of_expanded).double().train(), _expanded())
    found = []
    for each in (module, eager(module)):
        x = _expanded()
        outputs = each(x)
        total = sum((i + 1) * (o * torch.arange(o.shape[-1])).sum() for i, o in enumerate(outputs))
        found.append(([o.detach() for o in outputs], torch.autograd.grad(total, x)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert dispatch_report(module).tvm_calls == 1


def _expanded() -> torch.Tensor:
    row = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(1, 6)
    return row.expand(4, 6).detach().requires_grad_()


def test_memory_read_through_an_expanded_tensor_is_refused() -> None:
    module = Applied(lambda m, x: (x.as_strided((2,), (1,)), x * m.weight)).double().train()
    with pytest.raises(UnsupportedOperatorError, match="elements share memory"):
        add_tvm_dispatch(module, _expanded())


def test_a_view_of_an_input_that_is_made_under_no_grad_is_refused() -> None:
    """In eager PyTorch such a view accumulates its own gradient, and the input gets none of it."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        with torch.no_grad():
            view = x.view(-1)
        return view, x * m.weight

    x = rows().requires_grad_()
    with pytest.raises(UnsupportedOperatorError, match="under no_grad"):
        add_tvm_dispatch(Applied(forward).train(), x)
    with torch.no_grad():
        module = add_tvm_dispatch(Applied(forward).eval(), x)
        assert module(x)[0].data_ptr() == x.data_ptr()


def test_empty_outputs_share_nothing() -> None:
    module = add_tvm_dispatch(nn.ChannelShuffle(2).train(), torch.ones(0, 4, 3, 3).requires_grad_())
    given = torch.ones(0, 4, 3, 3).requires_grad_()
    result = module(given)
    assert result.shape == given.shape
    assert result.requires_grad
    result.sum().backward()
    assert given.grad is not None
    assert not dispatch_report(module).fallbacks


@pytest.mark.parametrize(
    "expanded",
    [
        lambda x: x.expand(600, 4).view(20, 30, 4),
        lambda x: torch.meshgrid(x, x.new_zeros(30), x.new_zeros(20), indexing="ij")[0],
    ],
    ids=["expand", "meshgrid"],
)
def test_gradients_of_expanded_outputs_are_rounded_once(
    expanded: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.rand(4, generator=torch.Generator().manual_seed(0)).bfloat16()
    cotangent = torch.rand(expanded(x).shape, generator=torch.Generator().manual_seed(1))

    def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        result = function(x.requires_grad_())
        return torch.autograd.grad(result, x, cotangent.bfloat16().to(x.dtype))[0]

    module = Applied(lambda m, x: expanded(x))
    add_tvm_dispatch(module, x.clone().requires_grad_())
    torch.testing.assert_close(gradient(module, x.clone()), gradient(expanded, x.clone()))
    assert dispatch_report(module).fallbacks == {}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_detached_says_so_where_nothing_is_recorded(
    sampled: bool, mode: Callable[[], Any]
) -> None:
    module = Applied(lambda m, x: (x * m.weight, x.detach(), x.data, x[1:])).eval()
    x = torch.randn(3, 6)
    with mode():
        add_tvm_dispatch(module, x.clone().requires_grad_(sampled))
        for given in (x, x.clone().requires_grad_(), x.clone().requires_grad_() * 1):
            found = [[t.requires_grad for t in m(given)] for m in (module, eager(module))]
            assert found[0] == found[1]
    assert dispatch_report(module).tvm_calls == 3
