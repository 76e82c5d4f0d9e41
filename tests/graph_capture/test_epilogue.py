"""The eager epilogue: operators whose shapes depend on a call's values run in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from tests.frontend.helpers import Function
from tvmbridge import add_tvm_dispatch, dispatch_report, explain
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.types import Epilogue
from tvmbridge.graph_capture.epilogue import EpilogueRecorder


class Chosen(nn.Module):
    """Selects and uses the rows with a positive score; their number differs between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.score = nn.Linear(6, 1, bias=False)
        self.outer = nn.Linear(6, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        hidden = torch.tanh(self.inner(x))
        rows = hidden[self.score(hidden).squeeze(-1) > 0]
        return {"rows": self.outer(rows), "sum": rows.sum(0) * self.calls, "all": hidden * 2}


def _close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_shapes_differ_from_call_to_call_and_gradients_are_those_of_eager_pytorch() -> None:
    plain = Chosen().double()
    module = copy.deepcopy(plain)
    add_tvm_dispatch(module, torch.randn(8, 6, dtype=torch.float64, requires_grad=True))
    heights = set()
    for _ in range(4):
        x = torch.randn(8, 6, dtype=torch.float64)
        found = []
        for called in (module, plain):
            leaf = x.clone().requires_grad_()
            out = called(leaf)
            loss = sum(value.square().sum() for value in out.values())
            assert isinstance(loss, torch.Tensor)
            called.zero_grad()
            loss.backward()
            found.append([out, leaf.grad, [p.grad for p in called.parameters()], called.calls])
        _close(*found)
        heights.add(len(found[0][0]["rows"]))
    assert len(heights) > 1
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (4, {})
    assert report.specializations[0].eager_functions == {
        "__getitem__": 1,
        "linear": 1,
        "sum": 1,
        "mul": 1,
    }
    assert report.specializations[0].native_operators["aten.tanh.default"] == 1
    assert "runs eagerly after the compiled code: __getitem__, linear" in str(report)
    with torch.no_grad():
        text = str(explain(module, x))
    assert "runs eagerly after the compiled code: __getitem__" in text


def _pairs(x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.where(x > 0)
    return x[0, 0] + rows * 10 + columns


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "nonzero": lambda x, i: (x > 0).nonzero()[:, 0] + 1,
    "nonzero, as a tuple": lambda x, i: torch.nonzero(x > 0, as_tuple=True),
    "where": lambda x, i: _pairs(x),
    "argwhere": lambda x, i: torch.argwhere(x.relu()),
    "masked_select": lambda x, i: torch.masked_select(x * 2, x > 0).mean(),
    "a mask": lambda x, i: torch.stack([x[x > 0], x[x > 0] + 1]),
    "unique": lambda x, i: torch.unique(i, return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x, i: i.unique_consecutive(),
    "bincount": lambda x, i: torch.bincount(i) / i.numel(),
    "repeat_interleave": lambda x, i: x.sin().repeat_interleave(i, 0),
    "one_hot": lambda x, i: functional.one_hot(i).float(),
    "an index of one number": lambda x, i: x.cos()[i[0] % 3, i[1]] + x[:, -i[2]],
    "a slice": lambda x, i: x.tanh()[: i[0]],
    "narrow": lambda x, i: x.exp().narrow(1, i[0], 1),
    "tensor_split": lambda x, i: torch.tensor_split(x, torch.tensor([1, 2]), 1),
    "item": lambda x, i: i.sum().item() + 1,
    "tolist": lambda x, i: (i * 2).tolist(),
    "equal": lambda x, i: torch.equal(x, x * 1.5),
    "allclose": lambda x, i: torch.allclose(x, x + 1e-12),
    "a shape": lambda x, i: i.unique().shape[0] * 2,
}


def test_every_function_gives_what_eager_pytorch_gives() -> None:
    plain = Function(lambda x, i: {name: f(x, i) for name, f in FUNCTIONS.items()}).eval()
    module = copy.deepcopy(plain)
    with torch.no_grad():
        add_tvm_dispatch(module, (torch.randn(3, 4), torch.tensor([1, 3, 2])))
        for i in (torch.tensor([1, 3, 2]), torch.tensor([2, 2, 0]), torch.tensor([0, 0, 0])):
            x = torch.randn(3, 4)
            ours, theirs = module(x, i), plain(x, i)
            assert [type(v) for v in ours.values()] == [type(v) for v in theirs.values()]
            _close(ours, theirs)
        with pytest.raises(RuntimeError, match="non-negative"):
            module(x, -i - 1)
    report = dispatch_report(module)
    assert report.fallbacks == {}
    assert report.specializations[0].native_operators["aten.exp.default"] == 1


def _over_ranges(x: torch.Tensor, written: bool) -> torch.Tensor:
    """Sum over dimensions that ``torch.arange`` lists, as some image losses do."""
    axes = torch.arange(1, x.dim(), device=x.device)
    if written:
        axes[0] = 2
    return x.sum(torch.arange(x.dim()).tolist()[1:]) + x.sum(axes.tolist())


def test_a_list_of_the_numbers_of_a_range_is_known() -> None:
    plain = Function(lambda x: _over_ranges(x, False)).train()
    module = copy.deepcopy(plain)
    add_tvm_dispatch(module, torch.randn(2, 3, 4, requires_grad=True))
    x = torch.randn(2, 3, 4)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    _close(module(ours), plain(theirs))
    module(ours).square().sum().backward()
    plain(theirs).square().sum().backward()
    _close(ours.grad, theirs.grad)
    report = dispatch_report(module)
    assert report.fallbacks == {}
    assert not report.specializations[0].eager_functions


def test_a_range_that_was_written_into_is_not_known() -> None:
    module = Function(lambda x: _over_ranges(x, True)).eval()
    with pytest.raises(BridgeError):
        add_tvm_dispatch(module, torch.randn(2, 3, 4), on_break="forward")


def test_a_view_whose_place_depends_on_data_is_a_view_of_the_argument() -> None:
    def forward(x: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return x.narrow(0, start, 2), y, y[start]

    module = Function(forward).eval()
    start, x = torch.tensor(1), torch.zeros(5)
    with torch.no_grad():
        add_tvm_dispatch(module, (x, start))
        for place in (1, 3):
            mine, y, part = module(x, torch.tensor(place))
            mine.fill_(place)
            part.fill_(-1)
            assert y.tolist().index(-1) == place
    assert x.tolist() == [0, 1, 1, 3, 3]
    assert dispatch_report(module).tvm_calls == 2


def test_where_only_the_tail_is_differentiated_pytorch_does_it() -> None:
    module = Function(lambda x: x[x > 0] * 2)
    x = torch.randn(9).requires_grad_()
    add_tvm_dispatch(module, x)
    (gradient,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(gradient, (x > 0) * 2.0)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.specializations[0].joint) == (1, None)


def test_draws_that_no_name_tells_are_seen() -> None:
    module = Function(lambda x: functional.fractional_max_pool2d(x[x > 0].expand(1, 3, 3), 1, 1))
    with torch.no_grad(), pytest.raises(BridgeError, match="random numbers"):
        add_tvm_dispatch(module.eval(), torch.tensor([-1.0, 2.0]))


def test_constants_stay_python_numbers() -> None:
    watch = EpilogueRecorder(lambda x: x * torch.tensor(3).item(), differentiated=False)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        watch(torch.randn(2))
    assert watch.epilogue is None


class Cache:
    """A cache container for tensors only, as in older releases of transformers."""

    def __init__(self, keys: Any, values: Any) -> None:
        self.keys, self.values = keys, values


def _flatten_cache(cache: Cache) -> tuple[list[Any], Any]:
    held = {n: isinstance(v, torch.Tensor) or v for n, v in vars(cache).items()}
    return [v for v in vars(cache).values() if isinstance(v, torch.Tensor)], held


def _unflatten_cache(tensors: Any, held: Any) -> Cache:
    given = iter(tensors)
    return Cache(*(next(given) if value is True else value for value in held.values()))


pytree.register_pytree_node(Cache, _flatten_cache, _unflatten_cache)


class Caches(nn.Module):
    def __init__(self, part: bool) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> tuple[Any, Any]:
        rows = x[x[:, 0] > 0]
        return rows * 2, Cache(x + 1, rows if self.part else x * 3)


def test_containers_of_tensors_beside_what_the_tail_makes() -> None:
    ours, x = add_tvm_dispatch(Caches(part=False), torch.randn(5, 3)), torch.randn(5, 3)
    rows, cache = ours(x)
    _close([rows, cache.keys, cache.values], [x[x[:, 0] > 0] * 2, x + 1, x * 3])
    assert dispatch_report(ours).tvm_calls == 1


def test_containers_of_tensors_with_a_part_that_the_tail_makes_are_refused() -> None:
    with pytest.raises(BridgeError, match="a value whose size or number depends on data"):
        add_tvm_dispatch(Caches(part=True), torch.randn(5, 3), on_break="forward")


def test_a_tail_marks_its_results_among_the_others() -> None:
    watch = EpilogueRecorder(lambda x: [x, x.item(), x + 1, (x * 2).item()], differentiated=False)
    flat, read = watch(torch.tensor(4))
    assert isinstance(watch.epilogue, Epilogue)
    assert watch.epilogue.resolve([*flat, *read]) == [4, 4, 5, 8]
