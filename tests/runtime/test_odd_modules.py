"""Unusual modules and arguments are served, or refused by name if they cannot be traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import sample
from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report


class Sub(torch.Tensor):
    pass


TRANSFORM = "a function transform is active"
MODE = "a dispatch mode is active"


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(24, 24).double().eval()


class Around(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * 2  # type: ignore[no-any-return]


class Locked(Around):
    """A module whose deep copy raises an error."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("not to be copied")


class Property(nn.Module):
    @property
    def forward(self) -> Any:
        return torch.tanh


def _sparse(m: Any) -> Any:
    m.weight = nn.Parameter(m.weight.detach().to_sparse_csr())
    return m


def _scripted() -> nn.Module:
    return nn.Sequential(_linear(), torch.jit.script(nn.ReLU()))


def _traced() -> nn.Module:
    return nn.Sequential(_linear(), torch.jit.trace(nn.ReLU(), sample()))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "nested": (_linear, lambda: torch.nested.nested_tensor([sample()]), "argument 0 is a nested"),
    "sparse": (_linear, lambda: sample().to_sparse_csr(), "argument 0 has the layout"),
    "mkldnn": (_linear, lambda: sample().float().to_mkldnn(), "argument 0 has the layout"),
    "meta": (_linear, lambda: sample().to("meta"), "argument 0 is on the meta device"),
    "meta weight": (lambda: _linear().to("meta"), sample, "weight is on the meta device, without"),
    "subclass": (_linear, lambda: sample().as_subclass(Sub), "argument 0 is a Sub"),
    "sparse weight": (lambda: _sparse(_linear()), sample, "weight has the layout"),
    "lazy": (lambda: nn.LazyLinear(3), sample, "weight has no shape before the first"),
    "script": (lambda: torch.jit.script(_linear()), sample, "it is a ScriptModule"),
    "script within": (_scripted, sample, "its submodule 1 is a ScriptModule"),
    "traced within": (_traced, sample, "its submodule 1 is a ScriptModule"),
    "own call": (lambda: Locked(24, 24).double(), sample, "a __call__ of its own"),
    "property": (Property, sample, "its forward is a property"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_traced_is_refused_by_name(kind: str) -> None:
    make, argument, reason = REFUSED[kind]
    module = make()
    before = dict(module.__dict__)
    with pytest.raises(CaptureError, match=reason):
        add_tvm_dispatch(module, argument())
    assert module.__dict__ == before


class Neighbours(nn.Module):
    """A layer of a graph network whose matrix of neighbours is a sparse attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8, dtype=torch.float64)
        self.near = torch.eye(5, dtype=torch.float64).roll(1, 0).to_sparse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).tanh() * 2
        return torch.sparse.mm(self.near, x)


def test_a_module_with_a_sparse_tensor_runs_in_parts() -> None:
    plain = Neighbours()
    module = add_tvm_dispatch(copy.deepcopy(plain))
    for seed in range(3):
        x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        y, expected = module(x), plain(x)
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    report = dispatch_report(module)
    assert report.share == 1
    assert "near has the layout torch.sparse_coo" in str(report.cut)


def test_without_a_sample_calls_of_hooked_layers_run_the_own_forward() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    seen: list[Any] = []
    hook = module[0].register_full_backward_hook(lambda *given: seen.append(given[2][0]))
    with pytest.raises(CaptureError, match="its submodule 0 has hooks"):
        add_tvm_dispatch(module, torch.randn(2, 4))
    add_tvm_dispatch(module)
    for _ in range(2):
        module(torch.randn(2, 4)).sum().backward()
    assert len(seen) == 2
    assert dispatch_report(module).fallbacks == {"a submodule has hooks": 2}
    hook.remove()
    module(torch.randn(2, 4)).sum().backward()
    assert (len(seen), dispatch_report(module).tvm_calls) == (2, 1)


def test_a_lazy_layer_is_served_after_its_first_call(caplog: pytest.LogCaptureFixture) -> None:
    module = add_tvm_dispatch(nn.Sequential(nn.LazyLinear(3), nn.Tanh()))
    for _ in range(3):
        module(torch.randn(2, 4)).sum().backward()
    report = dispatch_report(module)
    assert report.fallbacks == {"0.weight has no shape before the first call": 1}
    assert report.advice is None
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize("training", [False, True])
def test_a_call_of_its_own_runs_once_around_the_compiled_code(training: bool) -> None:
    """A class may override ``__call__``, as the layers of transformers 4 do for checkpoints."""
    plain, x = Around(24, 24).double().train(training), sample()
    module = copy.deepcopy(plain)
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), plain(x))
    (module(x).sum() + plain(x).sum()).backward()
    torch.testing.assert_close(module.weight.grad, plain.weight.grad)
    assert dispatch_report(module).tvm_calls == 2
    assert type(module) is Around


def test_modes_in_which_nothing_can_be_traced() -> None:
    module, x = _linear(), sample()

    def transformed(x: torch.Tensor) -> torch.Tensor:
        add_tvm_dispatch(module, x)
        return x.sum()

    with pytest.raises(CaptureError, match=TRANSFORM):
        torch.func.grad(transformed)(sample())
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[attr-defined]
    with fake, pytest.raises(CaptureError, match=MODE):
        add_tvm_dispatch(module, x)


def test_a_module_that_was_loaded_in_inference_mode() -> None:
    with torch.inference_mode():
        module, reference = _linear(), _linear()
        add_tvm_dispatch(module, sample())
    with torch.no_grad():
        torch.testing.assert_close(module(sample()), reference(sample()))
    assert dispatch_report(module).tvm_calls == 1


def test_a_static_forward_falls_back_to_itself() -> None:
    class Static(nn.Module):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * 2

    module = add_tvm_dispatch(Static().eval(), sample())
    for rows in (6, 5):
        torch.testing.assert_close(module(sample(rows, 24)), sample(rows, 24) * 2)
    assert dispatch_report(module).tvm_calls == 1


class DrawsInItsCopies(nn.Module):
    """A module whose deep copy draws random numbers, since it initializes a new module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> DrawsInItsCopies:
        copied = DrawsInItsCopies()
        copied.load_state_dict(self.state_dict())
        return copied


def test_a_compilation_draws_nothing() -> None:
    module, x = DrawsInItsCopies(), torch.ones(2, 4)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    add_tvm_dispatch(module, x)
    assert torch.equal(torch.rand(3), expected)
