"""Functions that cut a TorchDynamo graph: the pieces do the same in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from tvmbridge import add_tvm_dispatch
from tvmbridge.dynamo.pieces import in_pieces


def _by_a_mask(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    chosen = z > 0
    z[chosen] = torch.exp(y)[:8]
    return z.sin() + x


def _by_a_number(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z[z > 0] = 1.0
    return z.sin() + y.sum()


def _with_a_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    v = x + 3
    x.mul_(2)
    return x.sin() + v + y.sum()


def _of_experts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for expert in range(2):
        (token,) = ((x > 0) == bool(expert)).nonzero(as_tuple=True)
        out.index_add_(0, token, torch.tanh(x[token] * (y.sum() + expert)))
    return out.sin()


def _of_different_values(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    values, places = torch.unique(x.detach(), return_inverse=True)
    return (values * y.sum()).cos()[places] * x


def pieces_of(
    function: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, int, bool]:
    """Run a function through TorchDynamo; return its result, piece count, and whether it is cut."""
    served: list[fx.GraphModule] = []
    cut = False

    def serve(piece: fx.GraphModule) -> Callable[..., Any]:
        served.append(piece)
        return piece.forward

    def backend(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        nonlocal cut
        run = in_pieces(graph, serve)
        cut = run is not None
        return run or graph.forward

    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return torch.compile(function, backend=backend)(x, y), len(served), cut


def _without_gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.sin()
        scale[x > 0] = y
        scale = scale * 2 + x
    return scale * x.cos()


@pytest.mark.parametrize(
    ("function", "pieces"),
    [
        (_by_a_mask, 2),
        (_by_a_number, 0),
        (_with_a_gradient, 2),
        (_of_experts, 5),
        (_of_different_values, 2),
        (_without_gradients, 2),
    ],
)
def test_pieces(function: Callable[..., torch.Tensor], pieces: int) -> None:
    if function is _of_different_values and torch.__version__.startswith("2.11."):
        pytest.skip("TorchDynamo of PyTorch 2.11 gives the inverse of torch.unique a float dtype")
    x = torch.cat([torch.ones(8), -torch.ones(8)]).requires_grad_()
    y = torch.arange(8.0)
    expected = function(x * 1, y)
    found, served, cut = pieces_of(function, x * 1, y)
    assert torch.equal(found, expected)
    assert (served, cut) == (pieces, pieces > 0)
    gradients = [torch.autograd.grad(result.sum(), x)[0] for result in (found, expected)]
    assert torch.equal(*gradients)


def _squeezed(x: torch.Tensor) -> torch.Tensor:
    chosen = (x * 2)[x[:, 0] > 0].squeeze(0)
    return chosen[None] + 100 if chosen.dim() == 1 else chosen.sin()


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    return ((x * 2)[x[:, 0] > 0] + torch.arange(6.0).reshape(3, 2)).sin()


def _of_two_sizes(x: torch.Tensor) -> torch.Tensor:
    return ((x * 2)[x[:, 0] > 0] + x[x[:, 1] > 0]).sin()


@pytest.mark.parametrize("function", [_squeezed, _broadcast, _of_two_sizes])
def test_a_single_row_broadcasts_as_in_eager_pytorch(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(
            function, backend=lambda g, _: in_pieces(g, lambda p: p.forward) or g.forward
        )
        for rows in (3, 1):
            x = torch.ones(4, 2)
            x[rows:, 0] = x[3:, 1] = -1
            assert torch.equal(compiled(x), function(x))


@torch.library.custom_op("tvmbridge_tests::positive", mutates_args=())
def _positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


@_positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    # Libraries as torchvision declare sizes so, of which PyTorch says that they are 2 or more.
    return x.new_empty(torch.library.get_ctx().create_unbacked_symint())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*create_unbacked_symint")
def test_an_operator_of_a_library_may_return_any_number_of_elements() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = _positive(x.exp() - 1)
            return y.sin() * 2 + y.cos() * 3

    module, reference = Chosen(), Chosen()
    add_tvm_dispatch(module, on_fallback="silent")
    for positive in (3, 2, 1, 0, 5):
        x = torch.cat([torch.rand(positive) + 0.1, -torch.rand(6)])[:6].double()
        torch.testing.assert_close(module(x), reference(x))
