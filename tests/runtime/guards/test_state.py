"""State beside tensors that forward reads or writes: changes are noticed, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.dispatch_helpers import eager
from tvmbridge import add_tvm_dispatch, dispatch_report


class Config:
    """A plain object with settings."""

    def __init__(self) -> None:
        self.factor = 3
        self.nested = {"bias": [1.0, 2.0]}


class Reader(nn.Module):
    """Reads attributes of every kind; a change of any of them changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.scale = 2.0
        self.mode = "plus"
        self.powers = [1, 2]
        self.config = Config()
        self.unread = 0
        self.plain = torch.ones(6)
        self.table = [torch.ones(6), torch.ones(6)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale * self.config.factor + sum(self.config.nested["bias"])
        x = x * self.plain * self.table[1] + sum(self.powers)
        return x + self.weight if self.mode == "plus" else x - self.weight


class Layers(nn.Module):
    """Iterates over its layers, and has a buffer and a parameter that are still None."""

    mask: torch.Tensor | None
    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.last = nn.Linear(6, 6, bias=False)
        parametrize.register_parametrization(self.last, "weight", Doubled())
        self.register_buffer("mask", None)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x if self.mask is None else x * self.mask
        x = x if self.bias is None else x + self.bias
        return self.last(x)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _x() -> torch.Tensor:
    return torch.linspace(-1, 2, 18).reshape(3, 6)


@pytest.fixture(scope="module")
def reader() -> nn.Module:
    return add_tvm_dispatch(Reader().eval(), _x())


@pytest.fixture(scope="module")
def layers() -> nn.Module:
    torch.manual_seed(0)
    return add_tvm_dispatch(Layers().eval(), _x())


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda m: setattr(m, name, value)


NOTICED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (_set("scale", 3.0), "the attribute scale changed"),
    "type of a number": (_set("scale", 2), "the attribute scale changed"),
    "string": (_set("mode", "minus"), "the attribute mode changed"),
    "list": (lambda m: m.powers.append(3), "the attribute powers changed"),
    "configuration": (lambda m: setattr(m.config, "factor", 5), "the attribute config changed"),
    "inner list": (
        lambda m: m.config.nested["bias"].append(1.0),
        "the attribute config changed",
    ),
    "tensor in a list": (
        lambda m: m.table.__setitem__(1, torch.zeros(6)),
        "the attribute table changed",
    ),
}


@pytest.mark.parametrize("kind", NOTICED)
def test_a_changed_attribute_is_noticed(reader: nn.Module, kind: str) -> None:
    change, reason = NOTICED[kind]
    module = copy.deepcopy(reader)
    with torch.no_grad():
        module(_x())
        change(module)
        torch.testing.assert_close(module(_x()), eager(module)(_x()))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (1, {reason: 1})


SEEN: dict[str, Callable[[Any], Any]] = {
    "an equal number": _set("scale", float("2.0")),
    "an equal list": _set("powers", [1, 2]),
    "an attribute that is not read": _set("unread", 7),
    "a tensor attribute replaced": _set("plain", torch.full((6,), 4.0)),
    "a tensor attribute written": lambda m: m.plain.mul_(3),
    "the data of a tensor attribute": lambda m: m.plain.data.add_(3),
    "a tensor of a list written": lambda m: m.table[1].mul_(3),
    "the data of a tensor of a list": lambda m: m.table[1].data.mul_(3),
}


@pytest.mark.parametrize("kind", SEEN)
def test_what_does_not_matter_or_is_an_input_is_served(reader: nn.Module, kind: str) -> None:
    module = copy.deepcopy(reader)
    with torch.no_grad():
        SEEN[kind](module)
        for _ in range(2):
            torch.testing.assert_close(module(_x()), eager(module)(_x()))
    assert dispatch_report(module).tvm_calls == 2


ADDED = "a submodule, parameter or buffer was added or removed"
STRUCTURE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "layer appended": (lambda m: m.layers.append(nn.Linear(6, 6)), ADDED),
    "another parametrization": (
        lambda m: parametrize.register_parametrization(m.last, "weight", Doubled()),
        ADDED,
    ),
    "buffer set": (_set("mask", torch.zeros(6)), "a parameter or buffer was added"),
    "layers exchanged": (
        lambda m: m.layers._modules.update({"0": m.layers._modules.pop("0")}),
        "the order of submodules changed",
    ),
    "parameter set": (
        _set("bias", nn.Parameter(torch.ones(6))),
        "a parameter or buffer was added",
    ),
    "forward of an instance": (
        lambda m: setattr(m.layers[0], "forward", lambda x: x * 2),
        "the forward of a submodule was replaced",
    ),
    "class": (
        lambda m: setattr(m.layers[0], "__class__", type("Other", (nn.Linear,), {})),
        "the class of a submodule changed",
    ),
    "subclass of tensor": (
        lambda m: setattr(
            m.layers[0], "weight", nn.Parameter(m.layers[0].weight.as_subclass(_Sub))
        ),
        "a parameter or buffer is not a plain tensor",
    ),
}


class _Sub(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", STRUCTURE)
def test_changed_structure_is_noticed(layers: nn.Module, kind: str) -> None:
    change, reason = STRUCTURE[kind]
    module = copy.deepcopy(layers)
    with torch.no_grad():
        change(module)
        own = module.forward.code.original  # type: ignore[union-attr]
        torch.testing.assert_close(module(_x()), own(_x()))
    assert dispatch_report(module).fallbacks == {reason: 1}


def test_a_patched_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    module = add_tvm_dispatch(nn.Sequential(Own(6, 6)).eval(), _x())
    monkeypatch.setattr(Own, "forward", lambda self, x: x * 5)
    with torch.no_grad():
        torch.testing.assert_close(module(_x()), _x() * 5)


def test_a_buffer_that_is_exchanged_is_exchanged() -> None:
    class Exchanges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))
            self.register_buffer("written", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.count = self.count + 1
            self.written += 1
            return x * self.count[0], self.count, self.written

    module = add_tvm_dispatch(Exchanges().eval(), _x())
    for each in (module, Exchanges()):
        count, written = each.count, each.written
        for _ in range(2):
            outputs = each(_x())
        assert torch.equal(count, torch.zeros(2))  # type: ignore[arg-type]
        assert outputs[1] is each.count
        assert outputs[2] is each.written is written
        assert torch.equal(each.count, torch.full((2,), 2.0))  # type: ignore[arg-type]
    assert dispatch_report(module).tvm_calls == 2


def test_forward_that_reaches_the_module_by_a_closure_is_traced_itself() -> None:
    module = nn.Linear(6, 6).eval()
    module.forward = lambda x: nn.functional.linear(x, module.weight) * 2  # type: ignore[assignment]
    add_tvm_dispatch(module, _x())
    with torch.no_grad():
        module.weight.mul_(2)
        torch.testing.assert_close(module(_x()), _x() @ module.weight.T * 2)
    assert dispatch_report(module).tvm_calls == 1


def test_tensors_that_stand_in_for_parameters_do_not_keep_the_module_from_being_compiled() -> None:
    module = nn.Linear(4, 4).eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        add_tvm_dispatch(module, x)
    others = {name: p.detach() * 2 for name, p in module.named_parameters()}
    module.train()
    found = torch.func.functional_call(module, others, (x,))
    torch.testing.assert_close(found, nn.functional.linear(x, others["weight"], others["bias"]))
    module(x).sum().backward()
    report = dispatch_report(module)
    assert report.tvm_calls == 1
    assert ["stands in for weight" in reason for reason in report.fallbacks] == [True]


OTHER_WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the dtype of a parameter or buffer": lambda w: w.double(),
    "the shape of a parameter or buffer": lambda w: w[:, :3].clone(),
    "the layout of a parameter or buffer": lambda w: w.to_sparse(),
    "the device of a parameter or buffer": lambda w: w.to("meta"),
}


@pytest.mark.parametrize("what", OTHER_WEIGHTS)
def test_another_sort_of_weight_is_noticed(layers: nn.Module, what: str) -> None:
    module, x = copy.deepcopy(layers), _x()
    add_tvm_dispatch(module, x)
    for _ in range(2):
        module(x)
    assert dispatch_report(module).fallbacks == {}
    linear: Any = module.layers[0]  # type: ignore[index]
    other = OTHER_WEIGHTS[what](linear.weight.detach())
    linear.weight = nn.Parameter(other)
    with suppress(RuntimeError):
        module(x)
    assert dispatch_report(module).fallbacks == {f"{what} changed": 1}


def test_who_looks_past_requires_grad_does_not_make_others_do_so() -> None:
    module = add_tvm_dispatch(nn.Linear(6, 6).train(), _x())
    ((_, entry),) = module.forward.code.kept.known[0].compiled()  # type: ignore[union-attr]
    module.weight.requires_grad_(False)
    assert not entry.state.is_otherwise()
    tensors = entry.state.tensors()
    reason = entry.state.changed(tensors, check_grad=True)
    assert str(reason) == "requires_grad of a parameter changed"
