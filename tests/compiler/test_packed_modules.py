"""Modules with packed weights in use: saved, trained, called by threads, unpacked again."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.packed_helpers import (
    NAMES,
    assert_right,
    dispatched,
    make,
    members,
    packed,
    sample,
)
from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch
from tvmbridge.compiler.packing import ModulePacks


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
    packing = module.forward.code.packing  # type: ignore[union-attr]
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


def test_threads_agree(module: nn.Module) -> None:
    weight = module.get_parameter("key.weight")
    weight.data = weight.data * 2
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


def _penalty(module: nn.Module) -> list[torch.Tensor]:
    sources = [sample().requires_grad_(), *module.parameters()]
    result = module(sources[0])
    # Code of another module may move the weights between forward and backward.
    ModulePacks(module).tensor(NAMES, members(module))
    slopes = torch.autograd.grad(result.square().sum(), sources, create_graph=True)
    return list(torch.autograd.grad(sum(s.square().sum() for s in slopes), sources))


@pytest.mark.parametrize("combine", but_slow(["always", "never"], "never"))
def test_the_first_call_can_be_differentiated_twice(combine: str) -> None:
    ours = make(training=True)
    add_tvm_dispatch(ours, sample().requires_grad_(), options={"combine_matmuls": combine})
    torch.testing.assert_close(_penalty(ours), _penalty(make(training=True)))
    assert dispatch_report(ours).specializations[0].second_order_backwards == 1


def test_frozen_weights_that_another_module_packs_stay_frozen() -> None:
    module = make()
    add_tvm_dispatch(module, sample(), freeze=True)
    assert_right(module)
    ModulePacks(module).tensor(NAMES, members(module))
    assert_right(module)
