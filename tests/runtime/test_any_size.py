"""Calls of other sizes are served by symbolic code or run in eager PyTorch; none is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler.partial_backwards import PartialBackwards
from tvmbridge.runtime import family
from tvmbridge.runtime.entry_compiler import Compiler

Sizes = Sequence[tuple[int, ...]]


class Convolutions(nn.Module):
    """A convolution and batch norm, whose statistics in train mode depend on the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class Longer(nn.Module):
    """Pads each row by one element, so that sizes are one more than the argument's."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return functional.pad(x, (1, 0)).softmax(-1), x.mean(1), x.var(1)


class Fewer(nn.Module):
    """Drops the first column: sizes of one more than a multiple of 16 then fill whole vectors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x[:, 1:].flatten()
        return y.exp(), y.abs().sqrt().sum()


class Parity(nn.Module):
    """Branches on the parity of a size, which no range of sizes can express."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 else x + 1


class First(nn.Module):
    """Reads at most thirty rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: min(x.shape[0], 30)] * 2


def _images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Sizes, bool]] = {
    "batch norm": (Convolutions, _images, [(8,), (3,), (16,), (5,)], True),
    "rows of one more": (
        Longer,
        lambda n: torch.randn(3, n),
        [(20,), (31,), (15,), (32,), (64,), (47,), (63,)],
        False,
    ),
    "columns of one less": (
        Fewer,
        lambda b, n: torch.randn(b, n),
        [(10, 119), (34, 49), (7, 20), (9, 65), (33, 17), (5, 31)],
        False,
    ),
    "parity": (Parity, lambda n: torch.randn(n, 3), [(5,), (7,), (8,), (12,), (9,)], False),
    "first rows": (First, lambda n: torch.randn(n, 3), [(40,), (35,), (29,), (64,), (8,)], False),
}
# How many calls of two rounds run the module's own forward: no symbolic code fits their sizes, and
# the limit of three codes for single sizes is reached.
NOT_SERVED = {"parity": 2}


def _outputs(results: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = pytree.tree_leaves(results)
    return found


def _assert_same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_results_at_other_sizes_are_those_of_eager_in_float64(name: str) -> None:
    make, arguments, sizes, trains = CASES[name]
    torch.manual_seed(0)
    module = make().train(trains)
    reference = copy.deepcopy(module).double()
    add_tvm_dispatch(module, arguments(*sizes[0]), dynamic_shapes="auto", on_fallback="silent")
    for size in [*sizes, *sizes]:
        given = arguments(*size)
        exact = given.double() if given.is_floating_point() else given
        ours, theirs = _outputs(module(given)), _outputs(reference(exact))
        _assert_same(ours, theirs)
        if trains:
            sums = [sum((o * o).sum() for o in outputs) for outputs in (ours, theirs)]
            gradients = [
                torch.autograd.grad(total, list(m.parameters()))  # type: ignore[arg-type]
                for total, m in zip(sums, (module, reference), strict=True)
            ]
            _assert_same(*gradients)
            _assert_same(list(module.buffers()), [b.double() for b in reference.buffers()])
    report = dispatch_report(module)
    assert report.tvm_calls == 2 * len(sizes) - NOT_SERVED.get(name, 0), report.fallbacks


def test_draws_are_those_of_eager() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4)).train()
    reference = copy.deepcopy(module)
    add_tvm_dispatch(module, torch.randn(4, 8), dynamic_shapes="auto")
    for rows in (7, 12, 5):
        x = torch.randn(rows, 8)
        torch.manual_seed(rows)
        ours = module(x)
        torch.manual_seed(rows)
        torch.testing.assert_close(ours, reference(x))
    assert dispatch_report(module).tvm_calls == 3


class Attends(nn.Module):
    """Attention of a sequence to itself, without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


def test_the_smallest_sizes_are_served_and_empty_ones_run_in_eager() -> None:
    module = Attends().eval()
    add_tvm_dispatch(module, torch.randn(6, 9, 4), dynamic_shapes="auto", on_fallback="silent")
    # First both sizes change; later shapes have sizes that are small or 1.
    shapes = [(7, 20), (2, 2), (3, 3), (1, 1), (1, 7), (1, 12), (2, 40), (40, 2)]
    for shape in [*shapes, (0, 9)]:
        x = torch.randn(*shape, 4)
        torch.testing.assert_close(module(x), Attends()(x))
    report = dispatch_report(module)
    assert (report.tvm_calls, sum(report.fallbacks.values())) == (len(shapes), 1)


class Halves(nn.Module):
    """Pools and repeats a sequence, and adds it to itself, so that its length must be even."""

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        pooled = functional.avg_pool1d(x, 2)
        return torch.cat([x + pooled.repeat_interleave(2, -1), more], -2) * more.mean()


def test_sizes_that_forward_relates_are_served_where_they_are_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, genuine = [], family.Family._compile
    monkeypatch.setattr(
        family.Family, "_compile", lambda *given: compiled.append(1) or genuine(*given)
    )
    module = Halves().eval()
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent")
    sizes = [(30, 3), (34, 4), (80, 5), (62, 9), (6, 7)]
    for length, rows in sizes:
        x, more = torch.randn(3, length), torch.randn(rows, length)
        torch.testing.assert_close(module(x, more), Halves()(x, more))
    assert (len(compiled), dispatch_report(module).tvm_calls) == (2, len(sizes))


class Eight(nn.Module):
    """Works only for sizes that eight rows divide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(8, -1).softmax(-1)


@pytest.mark.parametrize(
    ("module", "last", "compilations", "served"),
    [(nn.Softmax(-1), (5, 12), 1, 4), (Eight(), (8, 14), 2, 3)],
)
def test_rows_are_symbolic_with_the_first_size_that_changes_where_they_may_be(
    module: nn.Module,
    last: tuple[int, int],
    compilations: int,
    served: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, genuine = [], family.Family._compile
    monkeypatch.setattr(
        family.Family, "_compile", lambda *given: compiled.append(1) or genuine(*given)
    )
    plain = copy.deepcopy(module).eval()
    add_tvm_dispatch(module.eval(), torch.randn(8, 10), dynamic_shapes="auto", on_fallback="silent")
    for shape in ((8, 10), (8, 12), (8, 11), last):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), plain(x))
    assert (len(compiled), dispatch_report(module).tvm_calls) == (compilations, served)


def test_calls_of_code_that_gave_way_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_MOST_INSTANCES", 2)
    module = nn.Linear(4, 2).eval()
    add_tvm_dispatch(module, torch.randn(3, 5, 4), dynamic_shapes="auto")
    # When a second dimension changes, code for both replaces the code for the first alone.
    shapes = [(3, 5), (6, 5), (6, 5), (8, 5), (9, 5), (9, 7), (6, 5), (6, 5)]
    for shape in shapes:
        module(torch.randn(*shape, 4))
    report = dispatch_report(module)
    assert report.tvm_calls == len(shapes), report.fallbacks
    assert sum(s.calls for s in report.specializations) < len(shapes)


class TwoResults(nn.Module):
    """Returns log probabilities and a loss of them; backward starts from only one of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.linear(x).log_softmax(-1)
        return logits, logits.square().mean()


def test_an_epoch_and_an_evaluation_ask_for_three_compilations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []
    for owner, method in (
        (family.Family, "_compile"),
        (Compiler, "entry"),
        (PartialBackwards, "_compile"),
    ):
        genuine = getattr(owner, method)

        def counted(*given: Any, _genuine: Any = genuine, _name: str = owner.__name__) -> Any:
            compiled.append(_name)
            return _genuine(*given)

        monkeypatch.setattr(owner, method, counted)
    module = TwoResults().train()
    reference = copy.deepcopy(module).double()
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="raise")
    for rows in (8, 5, 8, 8, 8, 8, 7):
        x = torch.randn(rows, 4)
        module(x)[1].backward()
        reference(x.double())[1].backward()
    _assert_same(
        [p.grad for p in module.parameters()],  # type: ignore[misc]
        [p.grad for p in reference.parameters()],  # type: ignore[misc]
    )
    module.eval()
    with torch.no_grad():
        for rows in (8, 6, 8):  # 8 is the sample's size
            x = torch.randn(rows, 4)
            _assert_same(module(x), reference(x.double()))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.linear.weight.mul_(2)
        x = torch.randn(8, 4)
        expected = functional.linear(x, twin.linear.weight, twin.linear.bias).log_softmax(-1)
        torch.testing.assert_close(twin(x)[0], expected)
    assert compiled == ["Compiler", "Family", "Family"]


class Diagonal(nn.Module):
    """A diagonal, as long as the smaller of two sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.diagonal().tanh()


def test_no_code_takes_the_smaller_of_two_sizes_to_be_always_the_same_one() -> None:
    module = Diagonal().eval()
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent")
    for size in [(31, 9), (24, 24), (40, 16), (50, 17), (17, 129), (9, 31)]:
        x = torch.randn(*size)
        torch.testing.assert_close(module(x), Diagonal()(x))


class Masked(nn.Module):
    """Attention whose mask is an argument, and no constant."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = self.inner(x)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q, mask[:, None, None])


def test_a_mask_that_is_no_constant_decides_nothing_by_sizes() -> None:
    module = Masked().eval()
    reference = copy.deepcopy(module)
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="raise")
    with torch.no_grad():
        for batch, tokens in ((2, 16), (3, 23), (4, 31), (5, 37), (2, 40), (6, 18)):
            given = torch.randn(batch, tokens, 8), torch.ones(batch, tokens, dtype=torch.bool)
            torch.testing.assert_close(module(*given), reference(*given), rtol=1e-4, atol=1e-5)
