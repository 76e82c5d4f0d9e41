"""Forward's writes to attributes (tensors, objects, lists, counts) equal eager's at each call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from tests.thinned import but_slow
from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report


class Leaving(nn.Module):
    """Calls ``act``, which may write attributes of the module."""

    def __init__(self, act: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = act
        self.kept: Any = None
        self.steps = 0
        self.history: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, x)


def _tensors(m: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = m.linear(x)
    m.kept, m.detached, m.given = hidden.abs(), hidden.detach(), x
    return hidden * 2  # type: ignore[no-any-return]


def _distribution(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.kept = Normal(m.linear(x), m.linear.bias.exp())
    return m.kept.mean * 2  # type: ignore[no-any-return]


def _lists(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    m.kept = [y.sum(), {"mean": y.mean(), "rows": x.shape[0]}, (y.shape, "name")]
    m.history.append(y.detach().sum())
    return y  # type: ignore[no-any-return]


def _cleared(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.history.clear()
    m.history += [m.linear(x), x.shape[0]]
    return m.history[0] * len(m.history)  # type: ignore[no-any-return]


def _counts(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    m.steps = 2 + m.steps
    return m.linear(x)  # type: ignore[no-any-return]


def _state(m: Any, x: torch.Tensor) -> torch.Tensor:
    before = torch.zeros_like(x) if m.kept is None else m.kept
    m.kept = (m.linear(x) + before).tanh().detach()
    return m.linear(x) + m.kept  # type: ignore[no-any-return]


def _number(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    m.kept = y.sum().item()
    return y  # type: ignore[no-any-return]


def _table(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.kept is None or x.shape[0] > m.kept.shape[0]:
        m.kept = torch.arange(x.shape[0]).cos()[:, None]
    return m.linear(x) * m.kept[: x.shape[0]]  # type: ignore[no-any-return]


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of ``value`` by path; containers and distributions add their type."""
    if isinstance(value, Normal):
        value = {"kind": type(value).__name__, **vars(value)}
    if isinstance(value, list | tuple):
        value = {"kind": type(value).__name__, **dict(enumerate(value))}
    if isinstance(value, dict):
        each = (_leaves(held, f"{path}.{name}") for name, held in value.items())
        return {where: leaf for found in each for where, leaf in found.items()}
    return {path: value}


def _assert_same_left(ours: nn.Module, theirs: nn.Module) -> None:
    names = ("kept", "detached", "given", "steps", "history")
    one, other = (_leaves({n: vars(m).get(n) for n in names}) for m in (ours, theirs))
    assert one.keys() == other.keys()
    for path, value in one.items():
        if isinstance(value, torch.Tensor | float):
            torch.testing.assert_close(value, other[path])
            assert getattr(value, "requires_grad", 0) == getattr(other[path], "requires_grad", 0)
        else:
            assert (type(value), value) == (type(other[path]), other[path])


def _step(module: Any, x: torch.Tensor) -> torch.Tensor:
    result = module(x)
    loss = result.square().sum()
    if isinstance(module.kept, Normal):
        loss = loss - module.kept.log_prob(torch.ones(4)).sum()
    if isinstance(module.kept, list):
        loss = loss + module.kept[1]["mean"]
    if isinstance(module.kept, torch.Tensor) and module.kept.requires_grad:
        loss = loss + module.kept.sum()
    module.zero_grad()
    loss.backward()
    return result  # type: ignore[no-any-return]


def _branches(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return m.linear(x) * (2 if m.steps > 3 else 1)  # type: ignore[no-any-return]


def _scales(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return m.linear(x) * m.steps  # type: ignore[no-any-return]


def _fills(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return m.linear(x) + torch.full((4,), m.steps)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("act", "first"),
    but_slow(
        [
            (_tensors, 0),
            (_distribution, 0),
            (_lists, 0),
            (_cleared, 0),
            (_counts, 0),
            (_number, 0),
            (_state, 1),
            (_table, 1),
            (_branches, 0),
            (_scales, 0),
            (_fills, 0),
        ],
        *((_distribution, 0), (_lists, 0), (_counts, 0), (_state, 1), (_scales, 0)),
    ),
)
def test_what_forward_leaves_is_left(act: Callable[..., Any], first: int) -> None:
    module = Leaving(act)
    reference = copy.deepcopy(module)
    add_tvm_dispatch(module)
    for seed in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(_step(module, x), _step(reference, x))
        _assert_same_left(module, reference)
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    report = dispatch_report(module)
    assert (report.tvm_calls, sum(report.fallbacks.values())) == (4 - first, first)


def test_what_is_left_belongs_to_the_module_that_was_called() -> None:
    module = add_tvm_dispatch(Leaving(_counts).eval())
    x = torch.randn(2, 4)
    with torch.no_grad():
        module(x)
        other = copy.deepcopy(module)
        other(x)
        other(x)
    assert (module.steps, other.steps) == (3, 9)
    assert dispatch_report(other).tvm_calls == 2


def test_a_list_that_is_another_one_now_grows() -> None:
    module = add_tvm_dispatch(Leaving(_lists).eval())
    with torch.no_grad():
        module(torch.ones(2, 4))
        module.history, before = [], module.history
        module(torch.ones(2, 4))
        module.history = None
        with pytest.raises(AttributeError, match="append"):
            module(torch.ones(2, 4))
    assert len(before) == 1


# Refused by name ----------------------------------------------------------------------------------


def _stacks(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.history.append(x.sum())
    return m.linear(x) + torch.stack(m.history).sum()  # type: ignore[no-any-return]


def _keeps_few(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.history.append(x.sum())
    if len(m.history) > 2:
        m.history.pop(0)
    return m.linear(x)  # type: ignore[no-any-return]


def _averages(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.kept = 0.9 * (m.kept or 1.0) + 0.1 * x.sum().item()
    return m.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (_stacks, "history"),
        (_keeps_few, "history"),
        (_averages, "kept"),
    ],
)
def test_what_forward_leaves_and_reads_is_refused(act: Callable[..., Any], name: str) -> None:
    module = Leaving(act).eval()
    with pytest.raises(CaptureError, match=f"writes {name}"):
        add_tvm_dispatch(module, torch.randn(2, 4))
    assert (module.kept, module.steps, module.history) == (None, 0, [])


class Cached(nn.Module):
    """Fills a cache by an operation that cuts the graph: only once, if ``keeps`` is set."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.cache: tuple[torch.Tensor, int] | None = None

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self.cache is None or not self.keeps:
            kept = rows[rows >= 0]
            self.cache = kept, len(kept)
        return x[self.cache[0]] * self.cache[1]


@pytest.mark.parametrize("keeps", but_slow([True, False], True))
def test_what_a_call_makes_between_parts_is_found_by_others(keeps: bool) -> None:
    module, reference = Cached(keeps).eval(), Cached(keeps).eval()
    rows = torch.tensor([0, -1, 2])
    add_tvm_dispatch(module)
    for seed in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(module(x, rows), reference(x, rows))
        assert str(module.cache) == str(reference.cache)
    assert dispatch_report(module).tvm_calls == 4


def _carried(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state = m.linear(x) + m.state.detach()
    return m.state.tanh()  # type: ignore[no-any-return]


def _wrapped(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps = (m.steps + 1) % 5
    return m.linear(x).tanh() * m.steps  # type: ignore[no-any-return]


def _kept(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.kept = m.linear(x).detach()
    return m.linear(x).tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "act", but_slow([_counts, _lists, _carried, _wrapped, _kept], _lists, _wrapped)
)
def test_a_checkpoint_leaves_what_it_leaves_in_eager_pytorch(act: Callable[..., Any]) -> None:
    eager: Any = Leaving(act)
    eager.state = torch.zeros(2, 4)
    served: Any = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    for _ in range(3):
        x = torch.randn(2, 4)
        for module in (eager, served):
            module.zero_grad()
            # A result after the counter keeps the repetition from ending before it.
            checkpoint(lambda x, m=module: m(x).sin(), x, use_reentrant=False).sum().backward()
        torch.testing.assert_close(served.linear.weight.grad, eager.linear.weight.grad)
        assert (served.steps, len(served.history)) == (eager.steps, len(eager.history))
        torch.testing.assert_close(served.state, eager.state)
    assert (dispatch_report(served).tvm_calls >= 3) is (act is _kept)
