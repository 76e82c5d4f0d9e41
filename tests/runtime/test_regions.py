"""Regions: repeated blocks of a module are compiled once, and each has its own results."""

from __future__ import annotations

import copy
import logging
import os
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.dispatch_helpers import assert_same_step, sample, train_step
from tests.thinned import but_slow
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report, remove_tvm_dispatch
from tvmbridge.runtime.regions import blocks_of, region_of

_OPTIONS = CompileOptions(regions="repeated", only_if_faster=False)


class Layer(nn.Module):
    """A layer that reads some attributes, and whose index is not read."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.scale = 1.0
        self.inner = nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.2))
        self.settings: dict[str, Any] = {"shift": 0.5}
        self.held: list[torch.Tensor] = []
        self.function: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x)) * self.scale + self.settings["shift"]
        for tensor in self.held:
            y = y + tensor
        return x + (y if self.function is None else self.function(y))


class Model(nn.Module):
    """Layers between two linear ones."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.layers = nn.ModuleList(Layer(i) for i in range(count))
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x.square()


def _model(count: int = 3) -> Any:
    torch.manual_seed(0)
    return Model(count).double()


def _compiled(model: nn.Module) -> int:
    """Return the number of codes that were compiled, not counting equal blocks."""
    codes = [code for block in blocks_of(model).values() if (code := region_of(block))]
    entries = [e for c in codes for s in c.policy.specializations() for _, e in s.compiled()]
    return len({id(entry.compiled.loaded) for entry in entries})


def test_equal_layers_with_dropout_are_compiled_once() -> None:
    model, reference = _model(4).train(), _model(4).train()
    add_tvm_dispatch(model, sample(), options=_OPTIONS)
    for seed in range(2):
        ours, theirs = train_step(model, sample(), seed), train_step(reference, sample(), seed)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-12, msg=name)
    assert _compiled(model) == 1
    report = dispatch_report(model)
    assert (report.tvm_calls, report.fallbacks) == (2, {})
    assert report.parts[0].calls == 8
    assert "Layer (4 blocks, 1 compiled)" in str(report)
    duplicate = copy.deepcopy(model)
    assert_same_step(duplicate, reference, sample())
    assert _compiled(duplicate) == 1
    remove_tvm_dispatch(model)
    assert not any("forward" in vars(each) for each in model.modules())
    assert_same_step(duplicate, reference, sample())


def _add_later(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: y + by


def _hooked(layer: Any) -> None:
    layer.register_forward_hook(lambda _, __, y: y * 2)


def _hooked_within(layer: Any) -> None:
    layer.inner[0].register_forward_hook(lambda _, __, y: y * 3)


def _own_forward(layer: Any) -> None:
    layer.forward = lambda x: x * 5


def _narrow(layer: Any) -> None:
    torch.manual_seed(4)
    layer.inner[0] = nn.Linear(24, 1).double()


_OTHERWISE: dict[str, tuple[Callable[[Any], Any], int]] = {
    "a number": (lambda layer: setattr(layer, "scale", 0.25), 2),
    "an entry of a dictionary": (lambda layer: layer.settings.update(shift=0.75), 2),
    "an index that forward does not read": (lambda layer: setattr(layer, "index", 9), 1),
    "a tensor in a list": (lambda layer: layer.held.append(torch.ones(24).double()), 2),
    "a function with a free variable": (lambda layer: setattr(layer, "function", _add_later(3)), 2),
    "a class": (lambda layer: layer.inner.__setitem__(1, nn.Identity()), 2),
    "its mode": (lambda layer: layer.train(), 2),
    "the mode of a submodule": (lambda layer: layer.inner[1].train(), 2),
    "a hook": (_hooked, 2),
    "a hook of a submodule": (_hooked_within, 2),
    "a forward of its own": (_own_forward, 2),
    "a shape": (_narrow, 2),
    "a layout": (lambda layer: setattr(layer.inner[0].weight, "data", _transposed(layer)), 2),
}


def _transposed(layer: Any) -> torch.Tensor:
    return layer.inner[0].weight.detach().T.contiguous().T


# The changes that a test in a few seconds makes; each of them costs a compilation.
_FIRST = ("an index that forward does not read", "a number", "a tensor in a list")


def _assert_right(model: nn.Module, reference: nn.Module) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        found = model(sample())
        torch.manual_seed(seed)
        torch.testing.assert_close(found, reference(sample()), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "changes", [_FIRST, *(pytest.param((w,), marks=pytest.mark.slow) for w in _OTHERWISE)]
)
def test_layers_that_differ(changes: tuple[str, ...]) -> None:
    models = model, reference = _model(2 + len(changes)).eval(), _model(2 + len(changes)).eval()
    for each in models:
        for number, change in enumerate(changes, 1):
            _OTHERWISE[change][0](each.layers[number])
    add_tvm_dispatch(model, options=_OPTIONS)
    with torch.no_grad():
        _assert_right(model, reference)
        assert _compiled(model) == 1 + sum(_OTHERWISE[change][1] - 1 for change in changes)
        # A change after the compilation is noticed as well.
        for each in models:
            each.layers[-1].settings["shift"] = 0.125
        _assert_right(model, reference)


@pytest.mark.slow
def test_layers_that_all_hold_tensors_and_functions_of_their_own() -> None:
    model, reference = _model().eval(), _model().eval()
    for each in (model, reference):
        for number, layer in enumerate(each.layers):
            layer.held.append(torch.full((24,), float(number)).double())
            layer.function = _add_later(0.5 * number)
    add_tvm_dispatch(model, options=_OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(model(sample()), reference(sample()), rtol=1e-11, atol=1e-12)
        for each in (model, reference):
            each.layers[2].held[0].fill_(7)
        torch.testing.assert_close(model(sample()), reference(sample()), rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_shared_and_frozen_parameters_and_checkpoints() -> None:
    model, reference = _model().train(), _model().train()
    for each in (model, reference):
        each.layers[1].inner[0].weight = each.layers[0].inner[0].weight
        each.layers[2].inner[0].bias.requires_grad_(False)
    add_tvm_dispatch(model, options=_OPTIONS)
    for checkpoints in (False, True):
        for each in (model, reference):
            each.checkpoints = checkpoints
        assert_same_step(model, reference, sample())
    assert _compiled(model) == 2  # one layer has a parameter without a gradient


@pytest.mark.slow
def test_other_sizes_and_autocast() -> None:
    model, reference = _model().float().eval(), _model().float().eval()
    add_tvm_dispatch(model, options=_OPTIONS)
    for rows in (3, 6):
        x = sample(rows, 24, dtype=torch.float32)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=rows == 3):
            torch.testing.assert_close(model(x), reference(x), rtol=2e-2, atol=2e-2)
    assert _compiled(model) == 2
    assert not dispatch_report(model).fallbacks


_SCALES: dict[int, float] = {}


class _ById(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * _SCALES.get(id(self), 1.0)


def test_layers_that_read_their_id() -> None:
    models = _model(2).eval(), _model(2).eval()
    for each in models:
        for number, layer in enumerate(each.layers):
            layer.__class__ = _ById
            _SCALES[id(layer)] = 2.0 + number
    model, reference = models
    add_tvm_dispatch(model, options=_OPTIONS)
    with torch.no_grad():
        _assert_right(model, reference)


class _Place:
    """An object that all layers hold, and that holds one of them."""

    chosen: Any = None


_NUMBERS = {"plus": 0.5}


class _Compared(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if self.settings["place"].chosen is self else y


@pytest.mark.parametrize("chosen", but_slow([0, 2], 2))
def test_layers_that_compare_themselves(chosen: int) -> None:
    models = _model().eval(), _model().eval()
    results = []
    for dispatched, model in enumerate(models):
        place = _Place()
        for layer in model.layers:
            layer.__class__ = _Compared
            layer.settings["place"] = place
        place.chosen = model.layers[chosen]
        if dispatched:
            add_tvm_dispatch(model, options=_OPTIONS)
        with torch.no_grad():
            results.append(model(sample()))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


_PLACE = _Place()


class _Chosen(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if _PLACE.chosen is self else y


@pytest.mark.parametrize(
    "options", [_OPTIONS, pytest.param({"regions": "whole"}, marks=pytest.mark.slow)]
)
def test_layers_that_compare_themselves_with_one_that_a_global_holds(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model().eval()
    for layer in model.layers:
        layer.__class__ = _Chosen
    reference = copy.deepcopy(model)
    add_tvm_dispatch(model, options=options, on_fallback="silent")
    for chosen in (0, 2):
        results = []
        for each in (reference, model):
            monkeypatch.setattr(_PLACE, "chosen", each.layers[chosen])
            with torch.no_grad():
                results.append(each(sample()))
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


class _Logging(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if self.settings["log"].isEnabledFor(logging.DEBUG) else y


def test_equal_layers_that_ask_a_logger() -> None:
    model, log = _model(2).eval(), logging.getLogger("tests.regions")
    log.setLevel(logging.INFO)
    for layer in model.layers:
        layer.__class__, layer.settings["log"] = _Logging, log
    reference = copy.deepcopy(model)
    add_tvm_dispatch(model, options=_OPTIONS, on_fallback="silent")
    with torch.no_grad():
        for level in (logging.INFO, logging.DEBUG):
            log.setLevel(level)
            _assert_right(model, reference)


class _Alike(Layer):
    minus = 0.25

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + _NUMBERS["plus"] - self.minus


@pytest.mark.parametrize("changed", ["a global", "a class", "nothing"])
def test_a_change_between_equal_layers(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(undo: bool = False) -> None:
        if changed == "a global":
            monkeypatch.setitem(_NUMBERS, "plus", 0.5 if undo else 3.0)
        if changed == "a class":
            monkeypatch.setattr(_Alike, "minus", 0.25 if undo else 4.0)

    class Changing(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            change(undo=True)
            x = self.layers[1](self.layers[0](self.first(x)))
            change()
            return self.layers[2](x)

    torch.manual_seed(0)
    model = Changing().double().eval()
    for layer in model.layers:
        layer.__class__ = _Alike
    reference = copy.deepcopy(model)
    add_tvm_dispatch(model, options=_OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(model(sample()), reference(sample()), rtol=1e-11, atol=1e-12)
    assert _compiled(model) == (1 if changed == "nothing" else 2)


class _Tripled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 3


def test_parametrized_layers_share_code_also_after_unpickling() -> None:
    models = _model(2).eval(), _model(2).eval()
    for each in models:
        for layer in each.layers:
            parametrize.register_parametrization(layer.inner[0], "weight", _Tripled())
            layer.inner[0].register_load_state_dict_pre_hook(_ignore)
    model, reference = models
    for layer in model.layers:
        layer.forward = types.MethodType(Layer.forward, layer)  # as a pickle sets it
    add_tvm_dispatch(model, options=_OPTIONS)
    with torch.no_grad():
        _assert_right(model, reference)
    assert _compiled(model) == 1


def _ignore(*_: Any) -> None:
    pass


def test_blocks_that_are_put_in_later_and_taken_out() -> None:
    model = _model(2).eval()
    add_tvm_dispatch(model, options=_OPTIONS)
    model.layers.append(Layer(2).double().eval())
    assert "forward" not in vars(model.layers[2])
    add_tvm_dispatch(model)
    assert region_of(model.layers[2]) is not None
    del model.layers[1:]
    remove_tvm_dispatch(model)
    assert not any("forward" in vars(each) for each in model.modules())


def test_a_forked_process_dispatches_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = _model(2).eval(), _model(2).eval()
    add_tvm_dispatch(model, options=_OPTIONS)
    pid = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: pid + 1)
    with torch.no_grad():
        _assert_right(model, reference)
        assert dispatch_report(model).tvm_calls == 0
        add_tvm_dispatch(model)
        _assert_right(model, reference)
    assert dispatch_report(model).tvm_calls == 2


def test_blocks_are_found() -> None:
    def blocks(*widths: int) -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(w, w), nn.ReLU()) for w in widths]

    stages = nn.Sequential(nn.Sequential(*blocks(4, 4)), nn.Sequential(*blocks(4, 4, 8, 8)))
    assert list(blocks_of(stages)) == ["0.0", "0.1", "1.0", "1.1", "1.2", "1.3"]
    assert list(blocks_of(nn.ModuleList(blocks(4, 8, 8)))) == ["0", "1", "2"]
    assert not blocks_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    plain = nn.Sequential(nn.Linear(24, 24)).double().eval()
    add_tvm_dispatch(plain, sample(), options=_OPTIONS)
    with torch.no_grad():
        plain(sample())
    assert dispatch_report(plain).specializations[0].calls == 1


@pytest.mark.parametrize("given", [{"freeze": True}, {"dynamic_shapes": "auto"}, {"budget": 0.0}])
def test_what_needs_whole_modules(given: dict[str, Any]) -> None:
    model = _model().eval()
    with pytest.raises(ValueError, match='needs regions="whole"'):
        add_tvm_dispatch(model, options=_OPTIONS, **given)
    assert not any("forward" in vars(each) for each in model.modules())


class Dropped(nn.Module):
    """Leaves out layers by Python's random numbers, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(3))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() < 0.5:
                continue
            x = x + layer(x)
        return x


def test_blocks_are_the_parts_of_a_module_without_other_parts() -> None:
    module = Dropped().double()
    served = copy.deepcopy(module)
    add_tvm_dispatch(served)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    for n in range(10):
        found = []
        for each in (module, served):
            random.seed(n)
            each.zero_grad()
            result = each(x)
            result.square().sum().backward()
            found.append(
                [result, *(p.grad.clone() for p in each.parameters() if p.grad is not None)]
            )
        torch.testing.assert_close(found[1], found[0])
    report = dispatch_report(served)
    assert report.tvm_calls >= 7
    assert "3 blocks" in report.parts[0].name
    remove_tvm_dispatch(served)
    assert all("forward" not in vars(layer) for layer in served.layers)
