"""Any tensor is safe to pass, and autograd's rules for saved tensors hold."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import assert_same_step, eager, make_block, sample
from tvmbridge import add_tvm_dispatch, dispatch_report


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(x.numel() + 1, dtype=x.dtype)
    view = storage[1:].view(x.shape)
    return view.copy_(x)


AWKWARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "misaligned": _misaligned,
    "expanded": lambda x: x[:1].expand(x.shape),
    "numpy's memory": lambda x: torch.from_numpy(x.numpy().copy()),
    "slice of rows": lambda x: torch.cat([x, x])[1 : 1 + x.shape[0]],
    "negative view": lambda x: torch.complex(x, -x).conj().imag,
}


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return add_tvm_dispatch(make_block().train(), sample().requires_grad_())


@pytest.fixture(scope="module")
def served() -> nn.Module:
    return add_tvm_dispatch(make_block().eval().requires_grad_(False), sample())


@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_inputs_are_served(served: nn.Module, kind: str) -> None:
    x = AWKWARD[kind](sample())
    before = dispatch_report(served).tvm_calls
    with torch.no_grad():
        torch.testing.assert_close(served(x), eager(served)(x))
    assert dispatch_report(served).tvm_calls == before + 1


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)


def test_misaligned_rows_that_are_read_by_vectors() -> None:
    x = sample(64, 256, dtype=torch.float32)
    module = add_tvm_dispatch(Rows().eval(), x)
    for given in (x, _misaligned(x)):
        torch.testing.assert_close(module(given), Rows()(x))
    assert dispatch_report(module).tvm_calls == 2


@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_cotangents_are_right(trained: nn.Module, kind: str) -> None:
    cotangent = AWKWARD[kind](sample())
    gradients = []
    for module in (trained, eager(trained)):
        torch.manual_seed(2)
        x = sample().requires_grad_()
        gradients.append(torch.autograd.grad(module(x), x, cotangent)[0])
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def test_an_awkward_parameter_is_read_at_each_call(served: nn.Module) -> None:
    module = add_tvm_dispatch(make_block().eval().requires_grad_(False), sample())
    weight = module.inner.weight  # type: ignore[union-attr]
    weight.data = _misaligned(weight.data)  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(module(sample()), eager(module)(sample()))
            weight.data.add_(1)  # type: ignore[operator, union-attr]
    assert dispatch_report(module).tvm_calls == 2


def test_zero_sized_input_goes_to_the_own_forward(served: nn.Module) -> None:
    with torch.no_grad():
        assert served(sample()[:0]).shape == (0, 24)
    assert dispatch_report(served).fallbacks


def test_a_zero_sized_sample_compiles_or_says_why() -> None:
    module = add_tvm_dispatch(make_block().train(), sample()[:0].clone().requires_grad_())
    assert_same_step(module, eager(module), sample()[:0])


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 2 * y


def test_one_storage_as_two_arguments() -> None:
    module = add_tvm_dispatch(Sum().eval(), (sample(), sample()))
    x = sample()
    torch.testing.assert_close(module(x, x), 3 * x)
    storage = torch.cat([x, x])
    torch.testing.assert_close(module(storage[:6], storage[2:8]), storage[:6] + 2 * storage[2:8])
    assert dispatch_report(module).tvm_calls == 2


def test_equal_gradients_do_not_share_memory() -> None:
    class Plus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(4, dtype=torch.float64))
            self.b = nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a + self.b

    module = add_tvm_dispatch(Plus().train(), sample(4))
    cotangent = torch.ones(4, dtype=torch.float64)
    module(sample(4)).backward(cotangent)
    assert dispatch_report(module).tvm_calls == 1
    a, b = (p.grad for p in module.parameters())
    assert a is not None
    assert b is not None
    a.mul_(5)
    assert torch.equal(b, torch.ones_like(b))
    assert torch.equal(cotangent, torch.ones_like(b))


def test_outputs_are_independent_of_inputs_and_each_other() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x * 2
            return x, x.clone(), y, y.clone(), y.reshape(-1).clone()

    x = sample(3, 4)
    module = add_tvm_dispatch(Views().eval(), x)
    outputs = module(x)
    assert outputs[0] is x
    pointers = [o.data_ptr() for o in outputs]
    assert len(set(pointers)) == len(pointers)


class Neutral(nn.Module):
    """Returns ``x * 1``, which equals ``x`` but is new memory in eager PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 4).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x * 1


@pytest.mark.parametrize("training", [True, False])
def test_a_result_that_equals_its_input_is_new_memory(training: bool) -> None:
    x = sample()
    module = add_tvm_dispatch(Neutral().train(training), x)
    with torch.set_grad_enabled(training):
        _, same = module(x)
    assert dispatch_report(module).tvm_calls == 1
    same.detach().fill_(7)
    assert torch.equal(x, sample())


def test_a_changed_parameter_is_noticed_where_hooks_keep_it(trained: nn.Module) -> None:
    """A saved parameter was written: an error, unless hooks packed it.

    Autograd does not compare the versions of tensors that hooks packed.
    """

    def gradient(module: nn.Module, pack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(1)
        x = sample().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            output = module(x)
        with torch.no_grad():
            module.inner.weight.mul_(2)  # type: ignore[union-attr, operator]
        (found,) = torch.autograd.grad(output.square().sum(), x)
        return found

    module = copy.deepcopy(trained)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(module, lambda tensor: tensor)
    ours, theirs = copy.deepcopy(module), eager(module)
    torch.testing.assert_close(
        gradient(ours, lambda tensor: tensor.clone()),
        gradient(theirs, lambda tensor: tensor.clone()),
        rtol=1e-11,
        atol=1e-12,
    )


def test_hooks_may_put_values_back_where_they_were(trained: nn.Module) -> None:
    """Hooks may write the saved values back into the same memory, as offloading hooks do."""

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor.detach().clone(), tensor.detach()

    def unpack(kept: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, place = kept
        empty = torch.empty(0, dtype=place.dtype).set_(place.untyped_storage())
        return empty.as_strided(place.shape, place.stride(), place.storage_offset()).copy_(values)

    def gradients(module: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = sample().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = module(x * 2)
        wanted = (x, *module.parameters())
        return list(torch.autograd.grad(output.square().sum(), wanted))

    ours = copy.deepcopy(trained)
    torch.testing.assert_close(gradients(ours), gradients(eager(ours)), rtol=1e-11, atol=1e-12)
    assert dispatch_report(ours).tvm_calls == 1


def test_a_bad_index_raises_and_the_module_goes_on() -> None:
    module = add_tvm_dispatch(nn.Embedding(5, 3).eval(), torch.tensor([0, 4]))
    for bad in (5, -1):
        with torch.no_grad(), pytest.raises(IndexError):
            module(torch.tensor([0, bad]))
    with torch.no_grad():
        assert torch.equal(module(torch.tensor([4, 1])), module.weight[[4, 1]])  # type: ignore[index]
    assert dispatch_report(module).tvm_calls == 1
