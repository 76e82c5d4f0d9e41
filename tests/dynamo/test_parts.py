"""Modules with data-dependent graphs, compiled in parts: results, state and draws equal eager's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, compile_report, dispatch_report, remove_tvm_dispatch
from tvmbridge.core.errors import CaptureError, FallbackError


class Branching(nn.Module):
    """A module with a data-dependent branch, written buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x)).relu() * 2 + 1
        if x.abs().mean().item() > 2:
            y = self.second(y).tanh() * 3 - 1
        return functional.dropout(y, 0.3, self.training).sin() + y


class Masked(nn.Module):
    """A module that writes masked values in place into a tensor that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh() + 2
        chosen = y > 2
        z = y * 2
        z[chosen] = 1 + torch.log(z[chosen])
        return (z * y).sum(-1) + z[:, 0].sin()


class Neighbours(nn.Module):
    """A module that makes a sparse adjacency and multiplies by it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nodes = torch.arange(x.shape[0])
        edges = torch.stack([nodes, nodes.flip(0)])
        y = self.first(x).tanh() * 2 + 1
        adjacency = torch.sparse_coo_tensor(edges, x[:, 0].exp(), (x.shape[0], x.shape[0]))
        y = torch.sparse.mm(adjacency, y)
        return self.second(y).sin() * 3 - y


class Averaged(nn.Module):
    """Forward averages weights by assignments to ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8)
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        earlier = self.target.weight.data.clone()
        with torch.no_grad():
            for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
                p.data = p.data * 0.9 + q.data * 0.1
            self.online.bias.data = self.online.bias.data.clamp(-0.2, 0.2)
        step = (self.target.weight - earlier).abs().sum()
        return self.online(x).tanh() * 2 - self.target(x).sin() + step


class Counted(nn.Module):
    """A module that counts the classes of a batch: a size depends on data, and must be four."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("seen", torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x).log_softmax(-1)
        self.seen += torch.bincount(scores.argmax(-1), minlength=4)
        return (scores * (self.seen.sum() / self.seen)).square().sin()


class Named(nn.Module):
    """A module that gets a batch with names, and reads those of its kind alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        y = self.linear(batch["x"]).tanh() * 2 + 1
        return y.sin() if batch["kind"] == "sine" else y.cos() * 3


class Spelled(nn.Module):
    def forward(self, x: torch.Tensor, text: str) -> torch.Tensor:
        return (x * len(text)).sin() * 2 + x.cos()


class Tiny(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum().item() > 0 else x


def assert_like_eager(module: nn.Module, reference: nn.Module, calls: Sequence[Any]) -> None:
    """Compare each call of both modules, with a backward if autograd records."""
    for args in calls:
        results = []
        for each in (module, reference):
            torch.manual_seed(3)
            each.zero_grad()
            result = each(*copy.deepcopy(args))
            if result.requires_grad:
                result.square().sum().backward()
            gradients = [p.grad for p in each.parameters()]
            results.append([result, *gradients, *each.buffers(), torch.get_rng_state()])
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def pair(kind: type[nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = kind().double()
    reference = copy.deepcopy(module)
    return add_tvm_dispatch(module, on_fallback="silent", **options), reference


def rows(scale: float = 1.0, count: int = 6) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return (scale * torch.randn(count, 8, dtype=torch.float64, generator=generator),)


def _doubled(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def test_a_branch_and_hooks_of_all_modules() -> None:
    module, reference = pair(Branching)
    module.eval(), reference.eval()
    with torch.no_grad():
        assert_like_eager(module, reference, [rows(), rows(9.0), rows()])
        assert dispatch_report(module).share == 1
        with torch.nn.modules.module.register_module_forward_hook(_doubled):
            assert_like_eager(module, reference, [rows(9.0)])
    assert "hooks of all modules" in next(iter(dispatch_report(module).fallbacks))


@pytest.mark.slow
def test_state_draws_and_hooks() -> None:
    module, reference = pair(Branching)
    assert_like_eager(module, reference, [rows(), rows(9.0), rows()])
    for each in (module, reference):
        each.get_submodule("second").register_forward_hook(_doubled)
    assert_like_eager(module, reference, [rows(9.0)])
    report = dispatch_report(module)
    assert report.share == 1
    assert "branches by a value that depends on data" in str(report.cut)
    assert any(part.calls and "test_parts.py" in part.ends for part in report.parts)
    assert report.breaks
    assert "in eager PyTorch between parts" in str(report)
    unpickled = pickle.loads(pickle.dumps(module))
    assert_like_eager(unpickled, copy.deepcopy(reference), [rows()])
    remove_tvm_dispatch(module)
    assert_like_eager(module, reference, [rows()])


@pytest.mark.slow
def test_a_sparse_tensor_that_forward_makes_cuts_the_graph() -> None:
    module, reference = pair(Neighbours)
    assert_like_eager(module, reference, [rows(), rows(2.0), rows()])
    report = dispatch_report(module)
    assert report.share == 1
    assert "the layout torch.sparse_coo" in str(report.cut)
    assert report.parts


@pytest.mark.slow
def test_values_that_a_mask_chooses_are_written() -> None:
    module, reference = pair(Masked)
    assert_like_eager(module, reference, [rows(), rows()])
    twin = copy.deepcopy(module)
    assert_like_eager(twin, copy.deepcopy(reference), [rows()])
    assert dispatch_report(module).share == dispatch_report(twin).share == 1
    assert dispatch_report(twin).tvm_calls == 1


def test_assignments_to_data() -> None:
    module, reference = pair(Averaged)
    kept = [each.state_dict() for each in (module, reference)]
    assert_like_eager(module, reference, [rows(), rows(count=5), rows()])
    torch.testing.assert_close(*[list(each.parameters()) for each in (module, reference)])
    # An alias that was taken before keeps the old memory, as in eager PyTorch.
    torch.testing.assert_close(*kept)
    report = dispatch_report(module)
    assert "assigns to .data" in str(report.cut)
    assert report.share == 1


def test_a_graph_for_one_size_that_data_decides_is_cut_instead() -> None:
    module, reference = pair(Counted)
    assert_like_eager(module, reference, [rows(), rows(2.0), rows(count=5)])
    report = dispatch_report(module)
    assert report.parts
    assert report.share == 1


def test_texts_that_forward_does_not_read() -> None:
    module, reference = pair(Named)
    kinds = "sine", "sine", "cosine"
    for number in range(9):
        batch = {"x": rows()[0], "names": [f"{number}", "b"], "kind": kinds[number % 3]}
        assert_like_eager(module, reference, [(batch,)])
    report = dispatch_report(module)
    assert report.share == 1
    assert "a string" in str(report.cut)
    assert len(report.parts) == 2
    assert sum(part.calls for part in report.parts) == 5


def test_texts_that_forward_reads_are_not_compiled_for_ever() -> None:
    module, reference = pair(Spelled)
    for number in range(16):
        assert_like_eager(module, reference, [(*rows(), "a" * number)])
    report = dispatch_report(module)
    assert "would compile parts of it anew at each call" in str(report)
    assert report.tvm_calls == 12


def test_parts_that_are_too_small() -> None:
    module = add_tvm_dispatch(Tiny(), on_fallback="silent")
    for number in range(10):
        x = torch.full((3,), float(number % 2))
        assert torch.equal(module(x), Tiny()(x))
    report = dispatch_report(module)
    assert report.share == 0
    ((reason, _),) = report.fallbacks.items()
    assert "branches by" in reason
    assert "large enough" in reason
    assert not compile_report().breaks


def test_the_own_forward_where_a_graph_is_not_to_be_cut() -> None:
    with pytest.raises(CaptureError, match="branches by"):
        add_tvm_dispatch(Tiny(), torch.ones(3), on_break="forward")
    module = add_tvm_dispatch(Tiny(), on_break="forward", on_fallback="raise")
    with pytest.raises(FallbackError, match="branches by"):
        module(torch.ones(3))
    assert dispatch_report(module).cut is None
    with pytest.raises(ValueError, match="on_break"):
        add_tvm_dispatch(Tiny(), on_break="break")  # type: ignore[arg-type]


class Mixing(nn.Module):
    """Draws a Python number by an operator that runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().mean().sqrt() + x.std() * 2
            kept = float(scale)
        return self.linear(x).tanh() * kept


def test_a_part_that_restores_gradients_is_served_without_them() -> None:
    module = Mixing().double()
    served = copy.deepcopy(module)
    add_tvm_dispatch(served)
    for _ in range(3):
        x, found = torch.randn(4, 8, dtype=torch.float64), []
        for each in (module, served):
            each.zero_grad()
            result = each(x)
            result.square().sum().backward()
            found.append([result, *(p.grad.clone() for p in each.parameters())])
            assert torch.is_grad_enabled()
        torch.testing.assert_close(found[1], found[0])
    assert dispatch_report(served).tvm_calls == 3


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        print("rows", len(y))
        mean, rows = y.mean().item(), len(y)
        print(f"{mean:.3f}", f"{mean:>9.2e}|{rows:03d}", f"{mean!r:.5}", f"{rows}")
        return y


@pytest.mark.slow
@pytest.mark.parametrize("sampled", thinned([False, True], 2))
def test_a_forward_that_prints_prints_at_each_call(
    sampled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Printing()
    reference = copy.deepcopy(module)
    x = torch.randn(5, 4)
    add_tvm_dispatch(module, (x,)) if sampled else add_tvm_dispatch(module)
    assert not capsys.readouterr().out
    for rows in (5, 5, 5, 6):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(module(x), reference(x))
        rows_of, formatted, *expected = capsys.readouterr().out.splitlines()
        assert [rows_of, formatted] == expected
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (4, {})
    assert "prints" in report.cut
    with pytest.raises(CaptureError, match="forward prints"):
        add_tvm_dispatch(Printing(), (x,), on_break="forward")
