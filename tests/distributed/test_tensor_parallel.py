"""Tensor parallel over gloo: compiled local parts train as eager PyTorch does, on every rank."""

from __future__ import annotations

from collections.abc import Iterator

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
# Dispatched modules of a model, and their calls for each step.
_CALLS = {"the whole model": 1, "checkpointed": 4}


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
        assert each.calls == _CALLS.get(name, 2) * scripts.STEPS


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
    assert all(each.calls == 2 * scripts.STEPS for each in others)
    assert last.calls < 2 * scripts.STEPS
    why = "a planted fault" if plant == "no trace" else "a function mode is active"
    assert last.fallbacks
    assert all(why in reason for reason in last.fallbacks)


@pytest.fixture
def split() -> Iterator[nn.Module]:
    """Return a block whose linear layers are split over one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    block = Block(dropout=0.0)
    yield parallelize_module(block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    dist.destroy_process_group()


def test_a_module_that_is_never_cut_is_refused_by_name(split: nn.Module) -> None:
    with pytest.raises(CaptureError, match=r"first\.weight is a DTensor"):
        add_tvm_dispatch(split, on_break="forward")
    assert "forward" not in vars(split)


def test_one_function_is_refused_by_name(split: nn.Module) -> None:
    report = explain(split, torch.randn(2, 5, 16))
    assert "is a DTensor" in str(report)


def test_a_layer_alone_is_served(split: nn.Module) -> None:
    x = torch.randn(2, 5, 16)
    expected = split.first(x)
    add_tvm_dispatch(split.first, x)
    torch.testing.assert_close(split.first(x), expected)
    assert dispatch_report(split.first).tvm_calls == 1
