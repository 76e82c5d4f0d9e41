"""Frozen weights: results equal eager's, and a module that changed later runs its own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import Block, make_block, sample
from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.compiler import freezing
from tvmbridge.kernels.convolution_loops import Maker
from tvmbridge.kernels.packed_convolution import PackedForm
from tvmbridge.runtime.entry import CompiledEntry


class Pictures(nn.Module):
    """An image model: convolutions, with and without bias, then batch norm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Linear(8, 5)
        for norm in self.norms:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return self.head(torch.relu(self.norms[1](self.second(y)) + y).mean((2, 3)))


class Embedded(nn.Module):
    """An embedding table read at constant indices, and a matrix computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 24)
        self.left, self.right = nn.Parameter(torch.randn(24, 3)), nn.Parameter(torch.randn(3, 16))
        self.register_buffer("places", torch.arange(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.table(self.places)) @ (self.left @ self.right).softmax(0)


def _entry(module: nn.Module) -> CompiledEntry:
    (specialization,) = module.forward.code.kept.known  # type: ignore[union-attr]
    ((_, entry),) = specialization.compiled()
    return entry


def _frozen_block(dtype: torch.dtype = torch.float64) -> Block:
    return add_tvm_dispatch(make_block(dtype).eval(), sample(dtype=dtype), freeze=True)  # type: ignore[return-value]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "block": (Block, sample),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True),
        lambda: sample(2, 5, 8),
    ),
    "pictures": (Pictures, lambda: sample(2, 3, 6, 6)),
    "embedded": (Embedded, sample),
}


_EXACT = [(name, torch.float64) for name in CASES]
_ROUNDED = [(name, torch.float32) for name in CASES]


# Weights are packed in float32 alone.
@pytest.mark.parametrize(("name", "dtype"), but_slow([*_EXACT, *_ROUNDED], *_EXACT[:-1]))
def test_results_are_eagers(name: str, dtype: torch.dtype) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    module = make().eval()
    exact, x = copy.deepcopy(module).double(), inputs()
    module = add_tvm_dispatch(module.to(dtype), x.to(dtype), freeze=True)
    with torch.no_grad():
        expected = exact(x)
        for _ in range(3):  # the first call checks the full guards, later calls the fast one
            bound = 1e-12 if dtype is torch.float64 else 2e-6
            torch.testing.assert_close(
                module(x.to(dtype)).double(), expected, rtol=bound, atol=bound
            )
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (3, {})


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    module = add_tvm_dispatch(Embedded().double().eval(), sample(), freeze=True)
    plan = _entry(module).compiled.freezing
    assert plan is not None
    assert plan.kept == (0,)
    shapes = {tuple(v.shape) for v in _entry(module).frozen.values}  # type: ignore[union-attr]
    assert shapes == {(6, 24), (24, 16)}


def test_batch_norm_goes_into_convolutions() -> None:
    module = add_tvm_dispatch(Pictures().double().eval(), sample(2, 3, 6, 6), freeze=True)
    (record,) = [p for p in _entry(module).compiled.records if p.name == "FoldBatchNorm"]
    assert (record.rewrites, record.declined) == (2, ())


def _write(block: Block) -> None:
    with torch.no_grad():
        block.inner.weight.mul_(2)


def _replace(block: Block) -> None:
    block.inner.weight = nn.Parameter(block.inner.weight.detach() * 2)


def _exchange(block: Block) -> None:
    block.inner.weight.data = block.inner.weight.data * 2


def _load(block: Block) -> None:
    block.load_state_dict({n: 2 * v for n, v in block.state_dict().items()})


@pytest.mark.parametrize(
    ("change", "reason", "calls"),
    [
        (_write, "inner.weight was written since it was frozen", 0),
        (_write, "inner.weight was written since it was frozen", 3),
        (_replace, "inner.weight was replaced since it was frozen", 3),
        (_exchange, "the memory of inner.weight was exchanged since it was frozen", 3),
        pytest.param(
            _load, "inner.weight was written since it was frozen", 3, marks=pytest.mark.slow
        ),
    ],
)
@torch.no_grad()
def test_a_change_is_seen(change: Callable[[Block], None], reason: str, calls: int) -> None:
    module, x = _frozen_block(), sample()
    for _ in range(calls):  # from the second call on, the fast guard decides
        module(x)
    change(module)
    own = copy.deepcopy(module)
    own.__dict__.pop("forward")
    torch.testing.assert_close(module(x), own(x), rtol=0, atol=0)
    assert list(dispatch_report(module).fallbacks) == [reason]
    add_tvm_dispatch(module, x, freeze=True)
    before = dispatch_report(module).tvm_calls
    torch.testing.assert_close(module(x), own(x), rtol=1e-12, atol=1e-12)
    assert dispatch_report(module).tvm_calls == before + 1
    assert len(module.forward.code.kept.known) == 1  # the code for the old values was dropped


def test_a_written_buffer_is_no_constant() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x * self.count

    module = add_tvm_dispatch(Counting().eval(), sample(), freeze=True)
    with torch.no_grad():
        for number in (1, 2, 3):
            torch.testing.assert_close(module(sample()), sample() * number)
    assert dispatch_report(module).tvm_calls == 3


def test_calls_that_learn_are_refused_by_name() -> None:
    module, x = _frozen_block(), sample()
    assert module(x).requires_grad
    module.train()
    with torch.no_grad():
        module(x)
    assert list(dispatch_report(module).fallbacks) == [
        "the weights are frozen, and autograd records the call (use torch.no_grad())",
        "the weights are frozen, and the module is in train mode",
    ]


def test_train_mode_is_refused() -> None:
    module = make_block().train()
    with pytest.raises(ValueError, match=r"call module\.eval\(\) first"):
        add_tvm_dispatch(module, sample(), freeze=True)
    assert "forward" not in module.__dict__


def test_any_size_is_refused() -> None:
    with pytest.raises(ValueError, match="sizes of samples"):
        add_tvm_dispatch(make_block().eval(), sample(), freeze=True, dynamic_shapes="auto")


def test_one_module_is_frozen_or_not() -> None:
    module = _frozen_block()
    with pytest.raises(ValueError, match="remove_tvm_dispatch first"):
        add_tvm_dispatch(module, sample(), freeze=False)
    add_tvm_dispatch(module, sample(3, 24))  # freezes again, as the first dispatch did
    with torch.no_grad():
        module(sample(3, 24))
    assert dispatch_report(module).tvm_calls == 1


def test_parameters_of_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        module = make_block().eval()
    with pytest.raises(Exception, match="cannot be seen"):
        add_tvm_dispatch(module, sample(), freeze=True)


def test_a_copy_runs_its_own_forward() -> None:
    module, x = _frozen_block(), sample()
    duplicate = copy.deepcopy(module)
    with torch.no_grad():
        duplicate.inner.weight.mul_(2)
        own = copy.deepcopy(duplicate)
        own.__dict__.pop("forward")
        torch.testing.assert_close(duplicate(x), own(x), rtol=0, atol=0)
    assert list(dispatch_report(duplicate).fallbacks) == [
        "this is a copy of a frozen module, which has no code"
    ]


@torch.no_grad()
def test_without_a_sample() -> None:
    module = add_tvm_dispatch(make_block().eval(), freeze=True)
    expected = make_block().eval()(sample())
    torch.testing.assert_close(module(sample()), expected, rtol=1e-12, atol=1e-12)
    assert dispatch_report(module).tvm_calls == 1


class Activated(nn.Module):
    """Linear layers, each with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 40) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = (layer(x) for layer in self.layers)
        gelu = nn.functional.gelu
        return torch.relu(first), gelu(second), gelu(third, approximate="tanh")


@pytest.mark.parametrize("library", ["onednn", "mkl"])
@torch.no_grad()
def test_activations_of_packed_products(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezing, "packing_of", lambda *_: library)
    torch.manual_seed(0)
    module, x = Activated().eval(), sample(dtype=torch.float32)
    exact = copy.deepcopy(module).double()
    # The products are not combined, so that each has its own activation.
    add_tvm_dispatch(module, x, freeze=True, options={"combine_matmuls": "never"})
    for found, expected in zip(module(x), exact(x.double()), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)
    x[1] = torch.nan
    assert all(out[1].isnan().all() and not out[0].isnan().any() for out in module(x))
    x[1], x[2] = torch.inf, -torch.inf
    for found, expected in zip(module(x), exact(x.double()), strict=True):
        torch.testing.assert_close(found.isnan(), expected.isnan())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
@pytest.mark.parametrize("alone", [False, True])
@torch.no_grad()
def test_packed_convolutions(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of(forms: list[PackedForm], measure: bool, make: Maker) -> tuple[PackedForm, ...]:
        return tuple(replace(form, alone=alone) for form in forms)

    monkeypatch.setattr(freezing, "faster_packed", all_of)
    torch.manual_seed(0)
    module, x = Pictures().eval(), sample(2, 3, 6, 6, dtype=torch.float32)
    exact = copy.deepcopy(module).double()
    add_tvm_dispatch(module, x, freeze=True)
    for _ in range(2):
        found = module(x)
        torch.testing.assert_close(found.double(), exact(x.double()), rtol=1e-5, atol=1e-5)
    (record,) = [p for p in _entry(module).compiled.records if p.name == "PackConvolutions"]
    assert (record.rewrites, record.declined) == (2, ())


@torch.no_grad()
def test_code_from_the_cache_has_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CACHE", "1")
    monkeypatch.setenv("TVMBRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = Pictures().double().eval()
        own = copy.deepcopy(module)
        add_tvm_dispatch(module, sample(2, 3, 6, 6), freeze=True)
        expected = own(sample(2, 3, 6, 6))
        torch.testing.assert_close(module(sample(2, 3, 6, 6)), expected, rtol=1e-12, atol=1e-12)
    assert _entry(module).compiled.cache == "hit"
