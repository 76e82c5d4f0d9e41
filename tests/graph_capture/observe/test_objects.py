"""The guard watches what forward reads of plain objects: an attribute, its absence, or all."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.contents import MISSING, PartOf
from tvmbridge.graph_capture.observe.staging import staged


class Config:
    """A configuration with a default in its class, and a property."""

    act = "relu"

    def __init__(self) -> None:
        self.scale = 2.0
        self.name = "none"
        self.size = types.SimpleNamespace(width=3)

    @property
    def doubled(self) -> float:
        return 2 * self.scale


class Mapped(Config):
    """A configuration with aliases for some attributes, as in transformers."""

    names = {"factor": "scale"}

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(Mapped.names.get(name, name))


class Falling(Config):
    """A configuration that looks up missing attributes in another object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Config()
        self.inner.depth = 4.0  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Reader(nn.Module):
    def __init__(self, config: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.config = config
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self.config)


def _expected(config: Any, read: Callable[[Any], Any]) -> Any:
    module = Reader(config, read)
    seen = staged(module, (torch.ones(2),), {}, False).observation
    assert seen is not None
    return seen.values["", "config"]


def _read_in_part(config: Any, read: Callable[[Any], Any]) -> dict[str, Any]:
    expected = _expected(config, read)
    assert type(expected) is PartOf
    return expected.attributes


@pytest.mark.parametrize(
    ("read", "attributes"),
    [
        (lambda c: c.scale, {"scale": 2.0}),
        (lambda c: getattr(c, "sca" + "le"), {"scale": 2.0}),
        (lambda c: 2.0 if hasattr(c, "missing") else 3.0, {"missing": MISSING}),
        (lambda c: c.doubled, {"doubled": MISSING, "scale": 2.0}),
        (lambda c: 1.0 if c.act == "relu" else 2.0, {"act": MISSING}),
        (lambda c: 1.0 if isinstance(c, Config) and c else 2.0, {}),
    ],
    ids=["attribute", "computed", "absence", "property", "class", "class-alone"],
)
def test_an_object_is_read_in_part(read: Callable[[Any], Any], attributes: dict[str, Any]) -> None:
    assert _read_in_part(Config(), read) == attributes


@pytest.mark.parametrize(
    "read",
    [
        lambda c: vars(c)["scale"],
        lambda c: c.__dict__["scale"],
        lambda c: copy.copy(c).scale,
        lambda c: copy.deepcopy(c).scale,
        lambda c: object.__getattribute__(c, "scale"),
        lambda c: 1.0 if "scale" in vars(c) else 2.0,
        lambda c: float(len(vars(c))),
    ],
    ids=["vars", "dict", "copy", "deepcopy", "past-the-class", "in", "len"],
)
def test_an_object_is_read_whole(read: Callable[[Any], Any]) -> None:
    assert type(_expected(Config(), read)) is Config


def test_objects_in_containers_and_objects_are_read_in_part() -> None:
    outer = Config()
    outer.layers = [Config(), Config()]  # type: ignore[attr-defined]
    outer.layers[1].scale = 5.0  # type: ignore[attr-defined]
    layers = _read_in_part(outer, lambda c: c.layers[1].scale)["layers"]
    assert [part.attributes for part in layers] == [{}, {"scale": 5.0}]


def test_a_class_that_decides_itself_is_asked_again() -> None:
    expected = _expected(Mapped(), lambda c: c.factor)
    assert expected.asks
    assert expected.attributes == {"factor": 2.0}
    now = Mapped()
    now.name = "other"
    assert expected.fits(now)
    now.scale = 3.0
    assert not expected.fits(now)


def test_what_is_looked_up_elsewhere_is_read_there() -> None:
    attributes = _read_in_part(Falling(), lambda c: c.depth)
    assert attributes["depth"] is MISSING
    assert attributes["inner"].attributes == {"depth": 4.0}


# Served and not served ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Config, Mapped])
def test_what_is_not_read_may_change_and_what_is_may_not(kind: type[Config]) -> None:
    module = Reader(kind(), lambda c: c.scale if c.act == "relu" else -c.scale).eval()
    x = torch.randn(3)
    add_tvm_dispatch(module, x)
    for _ in range(3):
        module(x)
    (path, _), *_ = module.forward.code.paths.known  # type: ignore[union-attr]
    for step in range(4):
        module.config.name = f"step {step}"
        module.config.step = module.step = step
        torch.testing.assert_close(module(x), 2 * x)
    assert module.forward.code.paths.known[0][0] is path  # type: ignore[union-attr]
    assert dispatch_report(module).fallbacks == {}
    module.config.act = "gelu"  # hides the class attribute
    torch.testing.assert_close(module(x), -2 * x)
    del module.config.act
    torch.testing.assert_close(module(x), 2 * x)
    module.config.scale = 3.0
    torch.testing.assert_close(module(x), eager(module)(x))
    report = dispatch_report(module)
    assert (report.tvm_calls, sum(report.fallbacks.values())) == (8, 2)


class _Settings:
    factor = 2.0

    def __init__(self) -> None:
        self.offset = 1.0
        self.note = ""


SETTINGS = _Settings()


def test_of_an_object_in_a_global_a_part_is_watched() -> None:
    module = Reader(Config(), lambda c: SETTINGS.offset).eval()
    x = torch.randn(3)
    add_tvm_dispatch(module, x)
    try:
        for note in ("first", "second"):
            SETTINGS.note = note
            torch.testing.assert_close(module(x), x)
        SETTINGS.offset = 4.0
        torch.testing.assert_close(module(x), 4 * x)
    finally:
        SETTINGS.__init__()  # type: ignore[misc]
    report = dispatch_report(module)
    assert (report.tvm_calls, sum(report.fallbacks.values())) == (2, 1)


def test_a_copy_of_a_module_watches_its_own_object() -> None:
    module = Reader(Config(), lambda c: c.scale).eval()
    x = torch.randn(3)
    add_tvm_dispatch(module, x)
    copied = copy.deepcopy(module)
    module.config.scale = 5.0
    copied.config.name = "copy"
    torch.testing.assert_close(copied(x), 2 * x)
    copied.config.scale = 7.0
    torch.testing.assert_close(copied(x), 7 * x)
    torch.testing.assert_close(module(x), 5 * x)
    assert dispatch_report(copied).tvm_calls == 1
    assert dispatch_report(module).tvm_calls == 0
