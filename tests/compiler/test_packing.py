"""Packing: parameters are moved side by side in memory; only their addresses change."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.packed_helpers import (
    NAMES,
    assert_right,
    make,
    members,
    packed,
    sample,
)
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler.packing import ModulePacks


def test_weights_are_moved_once_and_only_when_the_code_runs() -> None:
    module = make()
    before = [m.data_ptr() for m in members(module)]
    add_tvm_dispatch(module, sample())
    assert [m.data_ptr() for m in members(module)] == before
    versions = [m._version for m in members(module)]
    for _ in range(3):
        assert_right(module)
    first, second, third = members(module)
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert third.data_ptr() == second.data_ptr() + second.nbytes
    assert [m._version for m in members(module)] == versions
    assert packed(module) == (1, {})
    assert "packed 1 times: query.weight, key.weight, value.weight" in str(dispatch_report(module))


def _in_place(module: nn.Module) -> None:
    module.get_parameter("key.weight").mul_(2)


def _data(module: nn.Module) -> None:
    module.get_parameter("key.weight").data.mul_(2)


def _averaged(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.copy_(parameter.data * 0.5)


def _load(module: nn.Module) -> None:
    module.load_state_dict({n: t * 1.5 for n, t in module.state_dict().items()})


def _optimize(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(module.parameters(), lr=0.1).step()


def _assign(module: nn.Module) -> None:
    state = {n: t * 1.5 for n, t in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def _new_data(module: nn.Module) -> None:
    parameter = module.get_parameter("key.weight")
    parameter.data = parameter.data * 2


def _there_and_back(module: nn.Module) -> None:
    module.to(torch.float32).to(torch.float64)


@pytest.mark.parametrize("change", [_in_place, _data, _averaged, _load, _optimize])
def test_writes_are_seen(module: nn.Module, change: Callable[[nn.Module], None]) -> None:
    with torch.no_grad():
        change(module)
    assert_right(module)
    assert packed(module) == (1, {})


@pytest.mark.parametrize("change", [_assign, _new_data, _there_and_back])
def test_replaced_memory_is_packed_again(
    module: nn.Module, change: Callable[[nn.Module], None]
) -> None:
    with torch.no_grad():
        change(module)
    assert_right(module)
    assert packed(module) == (2, {})


def _view(module: nn.Module) -> object:
    weight = module.get_parameter("key.weight")
    weight.data = weight.detach().clone()
    return weight.detach().t()


def _shared(module: nn.Module) -> object:
    module.share_memory()
    return None


def _tied(module: nn.Module) -> object:
    module.key.weight = module.value.weight  # type: ignore[union-attr, assignment]
    return None


def _numpy(module: nn.Module) -> object:
    array = module.get_parameter("key.weight").detach().numpy().copy()
    module.get_parameter("key.weight").data = torch.from_numpy(array)
    return array


def _by_columns(module: nn.Module) -> object:
    weight = module.get_parameter("key.weight")
    weight.data = weight.data.t().contiguous().t()
    return None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_view, "something else holds its memory, a view or a tied parameter"),
        (_shared, "it is shared with other processes"),
        (_tied, "a parameter stands in it twice"),
        (_numpy, "its memory was not allocated by PyTorch"),
        (_by_columns, "its memory is not in its order"),
    ],
)
def test_what_others_hold_stays_and_is_concatenated(
    module: nn.Module, change: Callable[[nn.Module], object], reason: str
) -> None:
    held = change(module)
    before = [m.data_ptr() for m in members(module)]
    for _ in range(2):
        assert_right(module)
        with torch.no_grad():
            module.get_parameter("value.weight").data.mul_(1.5)
    assert packed(module) == (1, {reason: 2})
    assert [m.data_ptr() for m in members(module)] == before
    del held


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (_view, "something else holds its memory"),
        (_shared, "shared with other processes"),
        (_numpy, "not allocated by PyTorch"),
        (_by_columns, "not in its order"),
    ],
)
def test_groups_that_cannot_be_packed_stay_apart(
    prepare: Callable[[nn.Module], object], reason: str
) -> None:
    module = make()
    held = prepare(module)
    add_tvm_dispatch(module, sample())
    assert_right(module)
    report = dispatch_report(module)
    assert all(len(p.names) < 3 for p in report.packs)
    declined = [d for r in report.specializations[0].passes for d in r.declined]
    assert any(reason in d for d in declined), declined
    del held


def test_a_view_made_later_stays_true(module: nn.Module) -> None:
    query = module.get_parameter("query.weight").detach()
    _new_data(module)
    assert_right(module)
    with torch.no_grad():
        module.get_parameter("query.weight").fill_(0.25)
    assert query.eq(0.25).all()
    assert_right(module)


def test_two_modules_do_not_take_each_others_packs() -> None:
    module = make()
    one, other = ModulePacks(module), ModulePacks(module)
    weights = members(module)
    tensor = one.tensor(NAMES, weights)
    assert other.tensor(NAMES, weights) is tensor
    assert other.packed[NAMES] == 0
    reversed_ = other.tensor(NAMES[:0:-1], weights[:0:-1])
    assert torch.equal(reversed_, torch.cat(weights[:0:-1]))
    assert other.concatenated == {(NAMES[:0:-1], "a parameter is packed with others"): 1}
    assert one.tensor(NAMES, weights) is tensor


def test_old_memory_outlives_calls_of_other_threads() -> None:
    module = make()
    packing = ModulePacks(module)
    inside, leave = threading.Event(), threading.Event()

    def call() -> None:
        with packing:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait(10)
    old = weakref.ref(module.get_parameter("key.weight").untyped_storage())
    with packing:
        packing.tensor(NAMES, members(module))
        assert packing._old
    leave.set()
    thread.join()
    with packing:
        assert not packing._old
    gc.collect()
    assert old() is None
