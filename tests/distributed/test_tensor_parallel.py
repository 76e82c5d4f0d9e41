"""Tensor parallel over gloo: compiled local parts train as eager PyTorch does, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed import tensor_parallel_scripts as scripts
from tests.distributed.models import Block
from tests.distributed.processes import run_ranks, values
from tvmbridge import add_tvm_dispatch, dispatch_report, explain
from tvmbridge.core.errors import CaptureError

QUICK = ("columns and rows",)
PLANTS = ("no trace", "own forward")
# The calls of the dispatched modules in each step of training, and in the evaluation after it.
_CALLS = {"the whole model": (1, 1), "checkpointed": (4, 2)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("code"))


def trained(name: str, cache: str, plant: str = "") -> list[scripts.Found]:
    setting = scripts.SETTINGS[name]
    found: list[scripts.Found] = values(
        run_ranks(scripts.compared, setting.ranks, name, cache, plant)
    )
    for each in found:
        assert each.furthest <= (1e-12 if setting.dtype is torch.float64 else 1e-5), each
        assert each.same_gradients
    return found


def check(name: str, cache: str) -> None:
    for each in trained(name, cache):
        assert not each.fallbacks
        step, last = _CALLS.get(name, (2, 2))
        assert each.calls == step * scripts.STEPS + last


@pytest.mark.parametrize("name", QUICK)
def test_steps_are_those_of_eager(name: str, cache: str) -> None:
    check(name, cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(scripts.SETTINGS) - set(QUICK)))
def test_steps_are_those_of_eager_in_all_settings(name: str, cache: str) -> None:
    check(name, cache)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_rank_that_decides_differently_makes_the_same_exchanges(plant: str, cache: str) -> None:
    *others, last = trained("by sequence", cache, plant)
    calls = 2 * scripts.STEPS + 2
    assert all(each.calls == calls for each in others)
    assert last.calls < calls
    why = "a planted fault" if plant == "no trace" else "a function mode is active"
    assert last.fallbacks
    assert all(why in reason for reason in last.fallbacks)


@pytest.fixture
def split() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Return a function that splits the linear layers of a block over one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))

    def split_over_ranks(block: nn.Module) -> nn.Module:
        return parallelize_module(
            block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )

    yield split_over_ranks
    dist.destroy_process_group()


Split = Callable[[nn.Module], nn.Module]


def test_a_module_that_is_never_cut_is_refused_by_name(split: Split) -> None:
    block = split(Block())
    with pytest.raises(CaptureError, match=r"first\.weight is a DTensor"):
        add_tvm_dispatch(block, on_break="forward")
    assert "forward" not in vars(block)


def test_one_function_is_refused_by_name(split: Split) -> None:
    report = explain(split(Block()), torch.randn(2, 5, 16))
    assert "is a DTensor" in str(report)


def test_a_module_that_is_split_after_its_compilation_runs_in_parts(split: Split) -> None:
    x = torch.randn(2, 5, 16)
    block = add_tvm_dispatch(Block(), x)
    expected = block(x)
    torch.testing.assert_close(split(block)(x), expected)
    report = dispatch_report(block)
    assert (report.tvm_calls, report.fallbacks) == (2, {})
    assert "first.weight is a DTensor" in str(report)


def test_a_module_that_was_split_and_is_never_cut_says_so(split: Split) -> None:
    x = torch.randn(2, 5, 16)
    block = add_tvm_dispatch(Block(), x, on_break="forward", on_fallback="silent")
    expected = block(x)
    torch.testing.assert_close(split(block)(x), expected)
    (reason,) = dispatch_report(block).fallbacks
    assert reason.startswith("first.weight is a DTensor")


def test_a_layer_alone_is_served(split: Split) -> None:
    block, x = split(Block()), torch.randn(2, 5, 16)
    expected = block.first(x)
    add_tvm_dispatch(block.first, x)
    torch.testing.assert_close(block.first(x), expected)
    assert dispatch_report(block.first).tvm_calls == 1
