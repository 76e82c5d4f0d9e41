"""Tensors of globals, closures, defaults, classes and containers are inputs of compiled code."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tvmbridge
from tests.thinned import but_slow, thinned
from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report


@dataclass
class Config:
    """An object with a tensor, which a global refers to."""

    scale: torch.Tensor


class Globals:
    """The tensors that the forwards below read, as class attributes."""

    scale: torch.Tensor
    learned: torch.Tensor
    made: torch.Tensor
    leaf: torch.Tensor
    count: torch.Tensor
    choice: torch.Tensor


ARRAY = np.ones(4, dtype=np.float32)
SCALE = torch.ones(4)
OF_ARRAY = torch.from_numpy(ARRAY)
HELD: dict[str, Any] = {"list": [torch.ones(4)], "config": Config(torch.ones(4))}
Forward = Callable[[Any, torch.Tensor], Any]


def _closure() -> tuple[Forward, torch.Tensor]:
    scale = torch.ones(4)
    return lambda m, x: m.layer(x) * scale, scale


CLOSURE, IN_CLOSURE = _closure()


class Reads(nn.Module):
    """Runs ``function``, which reads tensors that are no parameters or buffers."""

    of_class = torch.ones(4)

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.held = [torch.ones(4)]
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


class Defaults(Reads):
    """Reads a tensor that is the default value of an argument."""

    def forward(self, x: torch.Tensor, default: torch.Tensor = SCALE.clone()) -> Any:  # noqa: B008
        return self.layer(x) * default


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Globals.scale, Globals.count = torch.full((4,), 2.0), torch.zeros(4)
    Globals.learned = torch.full((4,), 1.5, requires_grad=True)
    Globals.leaf = torch.ones(4, requires_grad=True)
    Globals.made, Globals.choice = Globals.leaf * 2, torch.tensor(1)


def _default() -> torch.Tensor:
    found: torch.Tensor = (Defaults.forward.__defaults__ or ())[0]
    return found


# By name: a forward, and the tensor that it reads, whose data the test changes.
READS: dict[str, tuple[Forward, Callable[[Any], torch.Tensor]]] = {
    "global": (lambda m, x: m.layer(x) * SCALE, lambda m: SCALE),
    "its data": (lambda m, x: m.layer(x) * SCALE.data, lambda m: SCALE),
    "a view of it": (lambda m, x: m.layer(x) * SCALE[1:2], lambda m: SCALE),
    "memory of numpy": (lambda m, x: m.layer(x) * OF_ARRAY, lambda m: OF_ARRAY),
    "class": (lambda m, x: m.layer(x) * m.of_class, lambda m: Reads.of_class),
    "closure": (CLOSURE, lambda m: IN_CLOSURE),
    "list of a global": (lambda m, x: m.layer(x) * HELD["list"][0], lambda m: HELD["list"][0]),
    "object": (lambda m, x: m.layer(x) * HELD["config"].scale, lambda m: HELD["config"].scale),
    "list of the module": (lambda m, x: m.layer(x) * m.held[0], lambda m: m.held[0]),
    "in a list": (lambda m, x: torch.stack([m.layer(x)[0], SCALE]), lambda m: SCALE),
    "returned": (lambda m, x: (m.layer(x), SCALE, SCALE[:2]), lambda m: SCALE),
    "index": (lambda m, x: m.layer(x)[:, (SCALE > 0)], lambda m: SCALE),
    "item": (lambda m, x: m.layer(x) * SCALE.max().item(), lambda m: SCALE),
    "default": (lambda m, x: m.layer(x), lambda m: _default()),
}


def _assert_same(module: nn.Module, x: torch.Tensor) -> None:
    found, expected = module(x), type(module).forward(module, x)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other)


# A read of one of the names in ALONE cuts the graph or needs a class of its own. One module makes
# all other reads.
ALONE = ("index", "item", "default")
TOGETHER = tuple(name for name in READS if name not in ALONE)


@pytest.mark.parametrize("names", thinned([(TOGETHER,), *(((name,),) for name in ALONE)], 3))
def test_writes_that_leave_no_version_are_seen(names: tuple[str, ...]) -> None:
    functions = tuple(READS[name][0] for name in names)
    kind = Defaults if names == ("default",) else Reads
    module, x = kind(lambda m, x: [f(m, x) for f in functions]).eval(), torch.randn(3, 4)
    add_tvm_dispatch(module, x, on_fallback="raise")
    for name in names:
        tensor = READS[name][1](module)
        before = tensor.data.clone()
        try:
            _assert_same(module, x)
            for change in (
                lambda t=tensor: t.data.mul_(3),
                lambda t=tensor: t.detach().numpy().__imul__(0.5),
                lambda t=tensor, b=before: setattr(t, "data", b * 5),
                lambda t=tensor, b=before: t.data.copy_(b),
                lambda t=tensor: t.add_(1),
            ):
                change()
                _assert_same(module, x)
        finally:
            tensor.data = before


@pytest.mark.parametrize("name", but_slow(["learned", "made", "leaf"], "leaf"))
def test_gradients_arrive_in_globals(name: str) -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = m.layer(x) * getattr(Globals, name)
        return result

    leaf = Globals.leaf if name == "made" else getattr(Globals, name)
    module, x = Reads(function), torch.randn(3, 4)
    add_tvm_dispatch(module, x, on_fallback="raise")
    found = []
    for forward in (module, functools.partial(Reads.forward, module)):
        leaf.grad = None
        forward(x).square().sum().backward(retain_graph=True)
        found.append((leaf.grad, module.layer.weight.grad))
        module.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_global_that_is_written_and_a_global_that_decides() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        Globals.count.add_(1)
        result: torch.Tensor = m.layer(x) + Globals.count
        return result * 2 if Globals.choice > 0 else result

    module, x = Reads(function).eval(), torch.randn(3, 4)
    add_tvm_dispatch(module, x, on_fallback="silent")
    assert Globals.count.tolist() == [0.0] * 4
    for call, choice in enumerate([1, 1, -1, 1], start=1):
        Globals.choice.data.fill_(choice)
        expected = (module.layer(x) + call) * (2 if choice > 0 else 1)
        torch.testing.assert_close(module(x), expected)
        assert Globals.count.tolist() == [call] * 4
    assert dispatch_report(module).tvm_calls >= 3


def test_another_tensor_in_its_place_is_seen() -> None:
    module, x = Reads(lambda m, x: m.layer(x) * Globals.scale).eval(), torch.randn(3, 4)
    add_tvm_dispatch(module, x, on_fallback="silent")
    _assert_same(module, x)
    Globals.scale = torch.full((4,), 7.0)
    _assert_same(module, x)
    (reason,) = dispatch_report(module).fallbacks
    assert "scale outside of the module changed" in reason


def test_a_copy_of_the_module_reads_the_same_globals_and_its_own_lists() -> None:
    module, x = Reads(lambda m, x: m.layer(x) * m.held[0] * Globals.scale).eval(), torch.randn(3, 4)
    add_tvm_dispatch(module, x, on_fallback="raise")
    copied: Any = copy.deepcopy(module)
    Globals.scale.data.mul_(3)
    copied.held[0].data.mul_(5)
    for each in (module, copied):
        _assert_same(each, x)


def test_flags_of_a_global_may_change() -> None:
    module, x = Reads(lambda m, x: m.layer(x) * Globals.scale), torch.randn(3, 4)
    add_tvm_dispatch(module, x, on_fallback="silent")
    module(x)
    Globals.scale.requires_grad_()
    module(x).sum().backward()
    found, Globals.scale.grad = Globals.scale.grad, None
    Reads.forward(module, x).sum().backward()
    torch.testing.assert_close(found, Globals.scale.grad)


def test_what_cannot_be_an_input_is_refused_by_name() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.vmap(torch.mul)(m.layer(x).t(), SCALE)
        return found

    with pytest.raises(CaptureError, match=r"reads the tensor SCALE \(of shape \(4,\)\)"):
        add_tvm_dispatch(Reads(function).eval(), torch.randn(3, 4))


class Scaled(torch.autograd.Function):
    """Multiplies by an argument; backward reads the saved argument, or a global."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, saves: bool) -> torch.Tensor:
        ctx.save_for_backward(scale)
        ctx.saves = saves
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * (ctx.saved_tensors[0] if ctx.saves else SCALE), None, None


class ScaledBySetup(torch.autograd.Function):
    """As Scaled, with its context set up apart from forward."""

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor, power: int = 1) -> torch.Tensor:
        return x * scale**power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, scale, power = inputs  # PyTorch fills in the default.
        ctx.save_for_backward(scale**power)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0], None, None


STORED = Scaled.apply, ScaledBySetup.apply


def assert_gradients_follow(module: nn.Module, x: torch.Tensor, write: Any) -> None:
    """Check that gradients are those of eager PyTorch after ``write(SCALE.data, factor)``."""
    for factor in (1.0, 3.0):
        write(SCALE.data, factor)
        found = []
        for called in (module, functools.partial(Reads.forward, module)):
            module.zero_grad()
            called(x).square().sum().backward()
            found.append(module.layer.weight.grad)
        torch.testing.assert_close(*found)
    SCALE.data.fill_(1)


@pytest.mark.parametrize("stored", [False, True])
def test_custom_functions_of_both_forms_get_globals_current_or_are_refused(stored: bool) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = STORED if stored else (Scaled.apply, ScaledBySetup.apply)
        return second(first(m.layer(x), SCALE, True), SCALE)  # type: ignore[no-any-return]

    x, module = torch.randn(3, 4), Reads(forward)
    if stored and isinstance(torch.autograd.Function.apply, types.BuiltinFunctionType):
        # Since PyTorch 2.14 nothing can give a stored apply another tensor.
        with pytest.raises(CaptureError, match=r"a stored Scaled\.apply is called with a tensor"):
            add_tvm_dispatch(module, x, on_fallback="raise")
        return
    add_tvm_dispatch(module, x, on_fallback="raise")
    assert_gradients_follow(module, x, torch.Tensor.fill_)


def test_custom_functions_read_globals_that_they_are_given_alone() -> None:
    x = torch.randn(3, 4)
    module = Reads(lambda m, x: Scaled.apply(m.layer(x), SCALE, True))
    add_tvm_dispatch(module, x, on_fallback="raise")
    assert_gradients_follow(module, x, torch.Tensor.mul_)
    unsaved = Reads(lambda m, x: Scaled.apply(m.layer(x), SCALE, False))
    with pytest.raises(tvmbridge.BridgeError, match=r"save it by ctx\.save_for_backward"):
        add_tvm_dispatch(unsaved, x)
