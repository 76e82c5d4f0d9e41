"""Recall: unchanged modules need no capture, and each change of what forward reads is a miss."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.recall.models import SOURCE, load, plans_in
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.cache import surroundings
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.core.autocast import autocast_now
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.turns import compiling
from tvmbridge.graph_capture.surroundings import tracing_here, undisturbed
from tvmbridge.recall import RECALLED, Caller, recalled
from tvmbridge.runtime.guards.mode import Mode, flags_of

_OPTIONS = CompileOptions(recall=True, measure_kernels=False)


def _x(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 32).reshape(shape or (4, 8))


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the plan of the module in eval mode, without gradients."""
    folder = tmp_path_factory.mktemp("recall")
    with plans_in(folder):
        module = _model(load(folder))
        with torch.no_grad():
            add_tvm_dispatch(module, (_x(),), options=_OPTIONS)
        assert _told(module) == "captured: nothing is kept for this graph"
        yield folder


def _model(space: ModuleType, kind: str = "Model") -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = getattr(space, kind)().eval()
    return module


def _told(module: nn.Module) -> str:
    return dispatch_report(module).specializations[-1].recalled


def _look(
    module: nn.Module,
    args: tuple[Any, ...] | None = None,
    options: CompileOptions = _OPTIONS,
    kwargs: dict[str, Any] | None = None,
    grad: bool = False,
) -> tuple[CompiledModule | None, str]:
    """Look for a plan as a dispatch does, but compile nothing."""
    args = (_x(),) if args is None else args
    with torch.set_grad_enabled(grad):
        mode = Mode.of_now(module.training, grad, autocast_now())
        flags = flags_of(module, [a for a in args if isinstance(a, torch.Tensor)])
        packing = ModulePacks(module)
        caller = Caller(module, args, kwargs or {}, (*mode, flags), options, None, packing)
        with compiling(), tracing_here(), undisturbed():
            compiled, why, _ = recalled(caller)
    return compiled, why


def test_an_unchanged_module_is_not_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _model(load(folder))
    eager = copy.deepcopy(module)

    def captures(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the module is captured")

    monkeypatch.setattr("tvmbridge.compiler.lowering.staged", captures)
    with torch.no_grad():
        add_tvm_dispatch(module, (_x(),), options=_OPTIONS)
        assert _told(module) == RECALLED
        assert dispatch_report(module).specializations[0].cache == "hit"
        assert f"capture, eval ((4, 8) float32): {RECALLED}" in str(dispatch_report(module))
        for parameter in (*module.parameters(), *eager.parameters()):
            parameter.mul_(1.25)
        torch.testing.assert_close(module(_x()), eager(_x()))
        # Guards of the values that forward reads are there as after a capture.
        module.power = eager.power = 3  # type: ignore[assignment]
        torch.testing.assert_close(module(_x()), eager(_x()))
    assert dispatch_report(module).fallbacks == {"the attribute power changed": 1}


_EDITS: dict[str, tuple[str, str]] = {
    "a line of forward": ("+ self.shift", "- self.shift"),
    "a default": ("offset=0.5", "offset=0.75"),
    "a line of a decorator": ("return function(*args, **kwargs) * by", "return by"),
    "what a decorator closes over": ("@decorated(3.0)", "@decorated(4.0)"),
    "a global": ("SCALE = 2.0", "SCALE = 3.0"),
    "an own call": ("    bias = 0.25", "    __call__ = None\n    bias = 0.25"),
}


@pytest.mark.parametrize("edit", _EDITS)
def test_another_source_is_a_miss(edit: str, folder: Path) -> None:
    before, after = _EDITS[edit]
    assert before in SOURCE
    module = _model(load(folder, SOURCE.replace(before, after)))
    compiled, why = _look(module)
    assert compiled is None
    assert why
    assert _look(_model(load(folder)))[1] == ""


def test_what_forward_does_not_read_may_change(folder: Path) -> None:
    for before, after in (("UNREAD = 1", "UNREAD = 2"), ("\nSCALE", "\n# a comment\nSCALE")):
        assert _look(_model(load(folder, SOURCE.replace(before, after))))[1] == ""
    module: Any = _model(load(folder))
    module.inner.config.unread = [2]
    module.inner.config.more = module.more = "an attribute that nothing reads"
    assert _look(module)[1] == ""


def _state(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    def changed(module: Any) -> Any:
        change(module)
        return contextlib.nullcontext()

    return changed


def _patched(owner: Any, name: str, value: Any) -> Callable[[Any], Any]:
    @contextlib.contextmanager
    def patched(module: Any) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            yield

    return patched


@contextlib.contextmanager
def _default_dtype(module: Any) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic(module: Any) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _global_hook(module: Any) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        yield
    finally:
        handle.remove()


def _other(*args: Any, **kwargs: Any) -> Any:
    return args[0]


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": _state(lambda m: setattr(m, "power", 3)),
    "an attribute of another type": _state(lambda m: setattr(m, "power", 2.0)),
    "an item of a list": _state(lambda m: m.weights.__setitem__(1, 0.25)),
    "a configuration": _state(lambda m: setattr(m.inner.config, "factor", 2.5)),
    "another configuration": _state(lambda m: setattr(m.inner, "config", type("C", (), {})())),
    "a class attribute hidden": _state(lambda m: setattr(m.inner, "bias", 0.5)),
    "the width": _state(lambda m: setattr(m, "tail", nn.Linear(8, 6))),
    "no bias": _state(lambda m: setattr(m.tail, "bias", None)),
    "a tie": _state(lambda m: setattr(m.tail, "weight", m.inner.linear.weight)),
    "another submodule": _state(lambda m: setattr(m.inner, "act", nn.Tanh())),
    "a submodule's attribute": _state(lambda m: setattr(m.drop, "p", 0.25)),
    "one more buffer": _state(lambda m: m.register_buffer("more", None)),
    "the order of submodules": _state(lambda m: m._modules.update(inner=m._modules.pop("inner"))),
    "train": _state(lambda m: m.train()),
    "a submodule in train": _state(lambda m: m.drop.train()),
    "float64": _state(lambda m: m.double()),
    "a buffer's dtype": _state(lambda m: setattr(m.inner, "shift", m.inner.shift.double())),
    "strides": _state(lambda m: setattr(m.tail.weight, "data", m.tail.weight.data.t())),
    "requires_grad": _state(lambda m: m.tail.weight.requires_grad_(False)),
    "shared memory": _state(lambda m: setattr(m.tail.bias, "data", m.inner.linear.bias.data)),
    "a hook": _state(lambda m: m.tail.register_forward_hook(_other)),
    "a hook before": _state(lambda m: m.tail.register_forward_pre_hook(lambda *a: None)),
    "a hook of a tensor": _state(lambda m: m.tail.weight.register_hook(lambda g: g)),
    "an own forward": _state(lambda m: setattr(m.tail, "forward", _other)),
    "an attribute deleted": _state(lambda m: delattr(m, "power")),
    "a tensor as attribute": _state(lambda m: setattr(m, "power", torch.tensor(2))),
    "a removed submodule": _state(lambda m: m.__setattr__("drop", None)),
    "another class": _state(lambda m: setattr(m.inner.act, "__class__", nn.Sigmoid)),
    "autocast": lambda m: torch.autocast("cpu", torch.bfloat16),
    "a default dtype": _default_dtype,
    "deterministic algorithms": _deterministic,
    "hooks of all modules": _global_hook,
    "F.linear": _patched(nn.functional, "linear", _other),
    "F.relu": _patched(nn.functional, "relu", _other),
    "torch.relu": _patched(torch, "relu", _other),
    "Linear.forward": _patched(nn.Linear, "forward", _other),
    "Module.__call__": _patched(nn.Module, "__call__", _other),
    "Tensor.sum": _patched(torch.Tensor, "sum", _other),
    "PyTorch": _patched(surroundings, "_torch", lambda: "2.99"),
    "TVM": _patched(surroundings, "_tvm", lambda: "2.99"),
    "tvmbridge": _patched(surroundings, "_sources", lambda: ("another", 0.0)),
    "another processor": _patched(surroundings, "_processor", lambda: "another"),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_another_state_is_a_miss(change: str, folder: Path) -> None:
    module = _model(load(folder))
    with _CHANGES[change](module):
        compiled, why = _look(module)
    assert compiled is None
    assert why


def test_globals_are_read_from_the_living_module(folder: Path) -> None:
    space = load(folder)
    for name, value in (("SCALE", 4.0), ("scaled", _other), ("TABLE", {"act": torch.tanh})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(space, name, value)
            assert _look(_model(space))[0] is None
    space.scaled.__code__ = (lambda x, offset=0.5: x).__code__  # type: ignore[attr-defined]
    assert _look(_model(space))[0] is None


def test_other_calls_are_misses(folder: Path) -> None:
    module = _model(load(folder))
    x = _x()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((_x(2, 16)[:, :8],), {}),
        ((x.double(),), {}),
        ((x.t().contiguous().t(),), {}),
        ((x.clone().requires_grad_(),), {}),
        ((x, x), {}),
        ((x, None), {}),
        ((x,), {"flag": True}),
        ((nn.Parameter(x),), {}),
        ((module.tail.weight.detach()[:4],), {}),  # type: ignore[union-attr,index]
        ((torch.empty(4, 8, device="meta"),), {}),
    ]
    assert [_look(module, args, kwargs=kwargs)[0] for args, kwargs in calls] == [None] * len(calls)
    assert _look(module, grad=True)[0] is None
    assert _look(module, options=CompileOptions(recall=True))[0] is None
    assert _look(_model(load(folder), "Sub"))[0] is None
    assert _look(module)[0] is not None


def test_the_option_and_the_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _model(load(folder))
    off = CompileOptions(recall=False, measure_kernels=False)
    assert _look(module, options=off) == (None, "")
    monkeypatch.setenv("TVMBRIDGE_RECALL", "0")
    assert _look(module) == (None, "")
    monkeypatch.setenv("TVMBRIDGE_RECALL", "1")
    assert _look(module)[0] is not None
    monkeypatch.setenv("TVMBRIDGE_CACHE", "0")
    assert _look(module) == (None, "")


def _plan(folder: Path) -> Path:
    """Return the file of the plan."""
    for path in (folder / "cache").glob("*.tvmbridge"):
        if b'"facts"' in path.read_bytes():
            return path
    raise AssertionError("no plan is kept")


def test_a_plan_is_plain_json(folder: Path) -> None:
    content = _plan(folder).read_bytes()
    start = content.index(b'{"key"')
    described, _ = json.JSONDecoder().raw_decode(content[start:].decode())
    assert described["description"].keys() == {"plan", "facts", "structures"}
