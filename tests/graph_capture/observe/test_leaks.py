"""Caches outside the module are filled by the first call, as in eager PyTorch, never by a trace."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tvmbridge import BridgeError, CaptureError, add_tvm_dispatch, capture, dispatch_report

TABLES: dict[Any, Any] = {}
KEPT: list[torch.Tensor] = []
TABLE: torch.Tensor | None = None


@functools.lru_cache(maxsize=4)
def table(size: int) -> tuple[torch.Tensor, ...]:
    return torch.arange(float(size)), torch.ones(size)


class Cached(nn.Module):
    """Multiplies by a table that ``find`` creates once and caches."""

    made: torch.Tensor | None = None

    def __init__(self, find: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.find = find
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.find(self)

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
    def of_method(self) -> torch.Tensor:
        return torch.arange(6.0)


def _of_dict(_: Any) -> torch.Tensor:
    if 6 not in TABLES:
        TABLES[6] = {"table": torch.arange(6.0)}
    return TABLES[6]["table"]  # type: ignore[no-any-return]


def _of_global(_: Any) -> torch.Tensor:
    global TABLE
    if TABLE is None:
        TABLE = torch.arange(6.0)
    return TABLE


def _of_class(_: Any) -> torch.Tensor:
    if Cached.made is None:
        Cached.made = torch.arange(6.0)
    return Cached.made


CACHES: dict[str, Callable[[Any], torch.Tensor]] = {
    "function": lambda m: table(6)[0],
    "method": lambda m: m.of_method(),
    "dict": _of_dict,
    "global": _of_global,
    "class": _of_class,
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_is_filled_with_what_a_call_would_fill_it_with(kind: str) -> None:
    module = Cached(CACHES[kind]).train()
    x = torch.randn(2, 6)
    add_tvm_dispatch(module, x)
    # Eager PyTorch fills and reads the same cache.
    expected = eager(module)(x)
    assert type(expected) is torch.Tensor
    torch.testing.assert_close(module(x), expected)
    assert dispatch_report(module).tvm_calls == 1


class Tables:
    """An object that caches tables, one of which exists before the test."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor | None] = {5: torch.ones(5), 6: None}
        self.last: torch.Tensor | None = None

    def find(self, size: int) -> torch.Tensor:
        if self.made[size] is None:
            self.made[size] = self.last = torch.arange(float(size))
        return self.made[size]  # type: ignore[return-value]


OBJECT = Tables()
KEPT_OF_FIVE = OBJECT.made[5]


def test_an_object_that_keeps_tables_keeps_those_that_it_had() -> None:
    def raises(_: Any) -> torch.Tensor:
        raise ValueError(OBJECT.find(6).shape)

    x = torch.randn(2, 6)
    with pytest.raises(BridgeError):
        add_tvm_dispatch(Cached(raises).train(), x)
    OBJECT.made[6], OBJECT.last = None, None
    module = Cached(lambda _: OBJECT.find(6)).train()
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), eager(module)(x))
    assert OBJECT.made[5] is KEPT_OF_FIVE
    assert type(OBJECT.made[6]) is type(OBJECT.last) is torch.Tensor
    assert dispatch_report(module).tvm_calls == 1


# A cache that forward does not name.
TABLES_WITHOUT_A_NAME: list[Any] = []
KEEP = TABLES_WITHOUT_A_NAME.append


def test_what_is_kept_where_no_name_leads_is_refused() -> None:
    module = Cached(lambda _: KEEP(torch.arange(6.0)) or torch.ones(6)).train()
    try:
        with pytest.raises(CaptureError, match="Cached keeps a tensor outside of the module"):
            add_tvm_dispatch(module, torch.randn(2, 6))
    finally:
        TABLES_WITHOUT_A_NAME.clear()


def test_what_is_kept_of_each_call_is_refused_and_left_as_it_was() -> None:
    def keeps(module: Any) -> torch.Tensor:
        KEPT.append(module.weight * 2)
        return KEPT[-1]

    KEPT[:] = [torch.ones(1)]
    with pytest.raises(CaptureError, match="changes KEPT outside of the module"):
        add_tvm_dispatch(Cached(keeps).train(), torch.randn(2, 6))
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in KEPT)


def _decides(m: Any) -> torch.Tensor:
    doubled = m.weight * 2
    return doubled if doubled.sum().item() > 0 else m.weight


def _refuses(m: Any) -> torch.Tensor:
    return (m.weight * 2) @ torch.ones(5)


def _raise_with(variable: str) -> None:
    raise KeyError


@pytest.mark.parametrize("find", [_decides, _refuses])
def test_a_refusal_looks_at_no_object_of_others(find: Callable[[Any], torch.Tensor]) -> None:
    """A refusal must not search all objects of the process, which can take seconds."""
    full = mock.Mock(wraps=gc.collect)
    try:
        _raise_with("a variable")
    except KeyError as outside:
        frame = outside.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
        with (
            mock.patch.object(gc, "get_referrers", side_effect=AssertionError),
            mock.patch.object(gc, "collect", full),
            pytest.raises(BridgeError),
        ):
            add_tvm_dispatch(Cached(find).train(), torch.randn(2, 6), on_break="forward")
    assert mock.call() not in full.mock_calls
    assert gc.isenabled()
    # The frames of an exception that the caller handles keep their variables.
    assert frame.f_locals == {"variable": "a variable"}


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_compilation_leaves_no_weak_reference_to_a_parameter(mode: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).train(mode == "train")
    captured = capture(module, torch.randn(2, 3))
    add_tvm_dispatch(module, torch.randn(2, 3))
    assert captured.program is not None
    for _ in range(2):
        output = module(torch.randn(2, 3))
        if mode == "train":
            output.sum().backward()
    del output
    assert [weakref.getweakrefcount(p) for p in module.parameters()] == [0, 0]


def test_parameters_can_be_exchanged_in_place() -> None:
    module: nn.Module = nn.Linear(3, 3).eval()
    x, weight = torch.randn(2, 3), module.weight
    plain = copy.deepcopy(module).double()
    add_tvm_dispatch(module, x)
    with torch.no_grad():
        module(x)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.to(torch.float64)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert module.weight is weight
        torch.testing.assert_close(module(x.double()), plain(x.double()))
        torch.testing.assert_close(module.to(torch.float32)(x), plain(x.double()).float())
    assert dispatch_report(module).tvm_calls == 2


def test_number_that_a_hook_collects_is_no_proxy() -> None:
    module, seen = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), list[float]()
    module[0].register_forward_hook(lambda _, given, result: seen.append(result.sum().item()))
    with pytest.raises(CaptureError, match="changes seen outside of the module"):
        add_tvm_dispatch(module, torch.randn(2, 3))
    assert all(type(number) is float for number in seen)
