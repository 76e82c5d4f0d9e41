"""Packing: parameters side by side in memory, and nobody can tell but by their addresses."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch
from tvmbridge.pack import Pack, unmovable, unpackable
from tvmbridge.packing import Packing

NAMES = ("query.weight", "key.weight", "value.weight")


class Attention(nn.Module):
    """Grouped queries: key and value are narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        mixed = torch.softmax(query.view(-1, 8) @ key.T, -1) @ value
        return torch.tanh(mixed)


def make(training: bool = False) -> Attention:
    torch.manual_seed(0)
    return Attention().double().train(training)


def sample() -> torch.Tensor:
    return torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def dispatched(training: bool = False) -> nn.Module:
    options = {"combine_matmuls": "always"}
    x = sample().requires_grad_(training)
    return add_tvm_dispatch(make(training), x, options=options)


def members(module: nn.Module) -> list[torch.Tensor]:
    return [module.get_parameter(name) for name in NAMES]


def assert_right(module: nn.Module) -> None:
    """One call equals eager's, and is served by compiled code."""
    own = copy.deepcopy(module)
    remove_tvm_dispatch(own)
    before = dispatch_report(module).tvm_calls
    with torch.no_grad():
        torch.testing.assert_close(module(sample()), own(sample()), rtol=1e-13, atol=1e-13)
    assert dispatch_report(module).tvm_calls == before + 1


def packed(module: nn.Module) -> tuple[int, dict[str, int]]:
    (report,) = dispatch_report(module).packs
    assert report.names == NAMES
    return report.packed, dict(report.concatenated)


@pytest.fixture(scope="module")
def served() -> nn.Module:
    module = dispatched()
    assert_right(module)
    return module


@pytest.fixture
def module(served: nn.Module) -> nn.Module:
    """A packed module: a copy, so that it is compiled once."""
    duplicate = copy.deepcopy(served)
    assert_right(duplicate)
    assert packed(duplicate) == (1, {})
    return duplicate


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


def test_saved_files_do_not_grow(module: nn.Module) -> None:
    def saved(value: object) -> int:
        file = io.BytesIO()
        torch.save(value, file)
        return len(file.getvalue())

    fresh = make()
    assert saved(module.state_dict()) == saved(fresh.state_dict())
    assert saved(module.get_parameter("key.weight")) == saved(fresh.get_parameter("key.weight"))
    assert len(pickle.dumps(module.get_parameter("key.weight"))) == len(
        pickle.dumps(fresh.get_parameter("key.weight"))
    )
    content = safetensors.torch.save(module.state_dict())
    again = make()
    again.load_state_dict(safetensors.torch.load(content))
    for ours, theirs in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_safetensors_writes_the_model(module: nn.Module, tmp_path: object) -> None:
    path = f"{tmp_path}/model.safetensors"
    safetensors.torch.save_model(module, path)
    assert set(safetensors.torch.load_file(path)) == set(module.state_dict())


def test_a_module_pickled_has_weights_of_its_own(module: nn.Module) -> None:
    again = pickle.loads(pickle.dumps(module))
    with torch.no_grad():
        again.get_parameter("key.weight").zero_()
    assert_right(module)
    assert module.get_parameter("key.weight").abs().sum() > 0


def test_removal_and_a_second_dispatch_keep_the_pack(module: nn.Module) -> None:
    before = [m.data_ptr() for m in members(module)]
    remove_tvm_dispatch(module)
    gc.collect()
    add_tvm_dispatch(module, sample())
    assert_right(module)
    assert packed(module) == (0, {})
    assert [m.data_ptr() for m in members(module)] == before


def test_memory_is_given_back(module: nn.Module) -> None:
    packing = module.forward.packing  # type: ignore[union-attr]
    (pack,) = packing._packs.values()
    reference = weakref.ref(pack)
    del pack
    module.half()
    gc.collect()
    assert reference() is None


def test_both_modes_read_one_pack() -> None:
    module = dispatched(training=True)
    reference = make(training=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (module, reference)]
    for _ in range(3):
        for each, optimizer in zip((module, reference), optimizers, strict=True):
            each.zero_grad()
            each(sample().requires_grad_()).square().sum().backward()
            optimizer.step()
    module.eval()
    assert_right(module)
    assert packed(module) == (1, {})
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13, msg=name)
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-13, msg=name)


def test_weights_packed_in_inference_mode_can_be_trained() -> None:
    module = dispatched()
    with torch.inference_mode():
        module(sample())
    assert packed(module) == (1, {})
    assert not any(m.is_inference() for m in members(module))
    module.train()
    module(sample().requires_grad_()).sum().backward()
    assert all(m.grad is not None for m in members(module))
    assert dispatch_report(module).fallbacks == {}
    assert packed(module) == (1, {})


def test_a_write_between_forward_and_backward_is_noticed() -> None:
    module = dispatched(training=True)
    output = module(sample().requires_grad_())
    with torch.no_grad():
        module.get_parameter("key.weight").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_gradients_are_tensors_of_their_own() -> None:
    module = dispatched(training=True)
    module(sample().requires_grad_()).sum().backward()
    grads = [m.grad for m in members(module)]
    assert len({g.untyped_storage()._cdata for g in grads if g is not None}) == 3


def test_parameters_of_a_functional_call_are_not_moved(module: nn.Module) -> None:
    others = {n: (p.detach() * 2) for n, p in module.named_parameters()}
    before = {n: t.data_ptr() for n, t in others.items()}
    own = make()
    own.load_state_dict(others)
    with torch.no_grad():
        ours = torch.func.functional_call(module, others, (sample(),))
        torch.testing.assert_close(ours, own(sample()), rtol=1e-13, atol=1e-13)
    assert {n: t.data_ptr() for n, t in others.items()} == before
    assert packed(module) == (1, {"it is not a plain parameter": 1})
    assert_right(module)


def test_two_modules_do_not_take_each_others_packs() -> None:
    module = make()
    one, other = Packing(module), Packing(module)
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
    packing = Packing(module)
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


def test_threads_agree(module: nn.Module) -> None:
    _new_data(module)
    expected = copy.deepcopy(module)
    remove_tvm_dispatch(expected)
    results: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            results.extend(module(sample()) for _ in range(5))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for result in results:
        torch.testing.assert_close(result, expected(sample()), rtol=1e-13, atol=1e-13)
    assert packed(module) == (2, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_can_be_packed(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.randn(rows, 32).to(dtype)) for rows in (4, 2, 6)]
    values = [w.detach().clone() for w in weights]
    pack = Pack(weights)
    pack.take_in(weights)
    assert pack.holds(weights)
    assert pack.in_use()
    assert torch.equal(pack.tensor, torch.cat(values))
    weights[1].data.zero_()
    assert not pack.tensor[4:6].any()


def test_unpackable_says_why() -> None:
    a, b, c = (nn.Parameter(torch.randn(3, n)) for n in (16, 16, 5))
    assert unpackable([a, a]) == "a parameter stands in it twice"
    assert unpackable([a, c]) == "different shapes or dtypes"
    assert unpackable([c, nn.Parameter(torch.randn(2, 5))]) == (
        "a parameter would begin at an address that is not aligned"
    )
    assert unpackable([a, b]) is None


def test_parameters_in_one_storage_may_move_where_they_do_not_overlap() -> None:
    module = nn.Module()
    flat = torch.randn(6, 16)
    module.a, module.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    held = unmovable(module.a, module)
    assert held == "something else holds its memory, a view or a tied parameter"
    del flat
    assert unmovable(module.a, module) is None
    module.b.data = module.a.data[2:]
    assert unmovable(module.a, module) == "another parameter or buffer shares its memory"
