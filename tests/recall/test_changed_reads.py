"""Each change of something that forward reads, in whatever way, is a miss in the next process."""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.recall.models import NAME, load, plans_in
from tests.recall.reads import HELPERS, SOURCE
from tests.recall.test_recall import _OPTIONS, _look
from tvmbridge import add_tvm_dispatch

_HELPERS = "recalled_helpers"


def _sample() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    return x, x.flip(0).contiguous()


def _model(folder: Path, source: str = SOURCE, helpers: str = HELPERS) -> Any:
    sys.modules.pop(_HELPERS, None)
    load(folder, helpers, _HELPERS)
    torch.manual_seed(0)
    return load(folder, source).Model().eval()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the plan of the module without gradients."""
    folder = tmp_path_factory.mktemp("reads")
    with plans_in(folder):
        with torch.no_grad():
            add_tvm_dispatch(_model(folder), _sample(), options=_OPTIONS)
        yield folder
    sys.modules.pop(_HELPERS, None)


def test_no_change_is_a_hit(folder: Path) -> None:
    compiled, why = _look(_model(folder), _sample())
    assert why == ""
    assert compiled is not None


_EDITS: dict[str, tuple[str, str]] = {
    "an inherited method": ("return x - 0.5", "return x - 0.75"),
    "a static method": ("return x * 1.1", "return x * 1.2"),
    "a class method": ("return x * cls.level", "return x + cls.level"),
    "a class attribute of a base": ("level = 3", "level = 4"),
    "a class attribute that hides it": (
        "class Mid(Base):\n    pass",
        "class Mid(Base):\n    level = 9",
    ),
    "an overridden method": (
        "class Mid(Base):\n    pass",
        "class Mid(Base):\n    def helper(self, x):\n        return x",
    ),
    "another base": ("class Model(Mid)", "class Model(Base)"),
    "a property": ("return 0.3", "return 0.4"),
    "a descriptor's value": ("described = Descriptor(0.6)", "described = Descriptor(0.7)"),
    "a descriptor's code": ("return self.value\n\n\nclass Meta", "return 1.0\n\n\nclass Meta"),
    "a metaclass": ("made.by_meta = 1.0625", "made.by_meta = 1.125"),
    "a look-up of attributes": (
        'if name == "found":\n            return 0.75',
        "if name:\n            return 0.5",
    ),
    "a dataclass's default": ("scale: float = 1.25", "scale: float = 1.5"),
    "a dataclass's property": ("return self.scale * 2.0", "return self.scale * 3.0"),
    "a dataclass's method": ("return x * self.doubled", "return x + self.doubled"),
    "a value of an enumeration": ("ONE = 1.5", "ONE = 1.75"),
    "a method of an enumeration": ("return x * self.value", "return x + self.value"),
    "a member of an enumeration": ("self.kind = Kind.ONE", "self.kind = Kind.TWO"),
    "a cached function": ("return n * 1.125", "return n * 1.25"),
    "a free variable of a global": ("by_three = closing(3.0)", "by_three = closing(4.0)"),
    "a free variable of an attribute": ("closing(1.5)", "closing(1.75)"),
    "the code of a closure": ("return x * k", "return x + k"),
    "an attribute of a function": ("attributed.factor = 1.75", "attributed.factor = 1.5"),
    "a keyword's default": ("w=0.125", "w=0.25"),
    "a generator": ("yield each * 1.0", "yield each * 2.0"),
    "a partial": ("other=0.5", "other=0.25"),
    "a function in a list": ("[torch.relu,", "[torch.sigmoid,"),
    "a lambda in a list": ("lambda x: x + 1.0", "lambda x: x + 2.0"),
    "a named tuple": ("Point(1.0, 2.0)", "Point(1.0, 3.0)"),
    "a nested namespace": ("value=1.5)", "value=1.25)"),
    "an entry of a mapping": ('"a": (1, 2)', '"a": (1, 3)'),
    "a type of a constant": ("FACTOR = 2.0", "FACTOR = 2"),
    "the sign of zero": ("FACTOR = 2.0", "FACTOR = -0.0"),
    "a nested tuple": ("(2.0, 3.0)", "(4.0, 3.0)"),
    "a dtype": ("self.dtype = torch.float32", "self.dtype = torch.float64"),
    "the order of a mapping": ("OrderedDict(a=1.0, b=2.0)", "OrderedDict(b=2.0, a=1.0)"),
    "an added attribute": ("self.kind = Kind.ONE", "self.kind = Kind.ONE\n        self.extra = 1"),
    "an added key": ('{"k": [', '{"z": 0, "k": ['),
    "an argument of a layer": ("nn.LayerNorm(8)", "nn.LayerNorm(8, eps=1e-3)"),
    "a layer in a list": ("nn.Tanh()]", "nn.Sigmoid()]"),
    "one layer more": ("nn.Tanh()]", "nn.Tanh(), nn.Tanh()]"),
    "two submodules swapped": ("- self.b(x)", "* 0 + self.b(x)"),
    "an imported function": (
        "from recalled_helpers import imported",
        "from recalled_helpers import named as imported",
    ),
    "a function of PyTorch by name": ("torch.clamp(x, -100.0", "torch.clamp(x, -1.0"),
    "the arguments swapped": ("def forward(self, x, y)", "def forward(self, y, x)"),
}
_HELPER_EDITS: dict[str, tuple[str, str]] = {
    "a function behind a function": ("x * _PRIVATE", "x + _PRIVATE"),
    "a global behind a function": ("_PRIVATE = 0.9", "_PRIVATE = 0.8"),
    "a function of another module": ("_deeper(x) + 1", "_deeper(x) + 2"),
    "an imported function": ("x.cos()", "x.sin()"),
    "a global of another module": ("VALUE = 0.2", "VALUE = 0.25"),
}


@pytest.mark.parametrize("edit", _EDITS)
def test_an_edit_is_a_miss(edit: str, folder: Path) -> None:
    before, after = _EDITS[edit]
    assert SOURCE.count(before) == 1
    compiled, why = _look(_model(folder, SOURCE.replace(before, after)), _sample())
    assert compiled is None
    assert why


@pytest.mark.parametrize("edit", _HELPER_EDITS)
def test_an_edit_of_what_is_imported_is_a_miss(edit: str, folder: Path) -> None:
    before, after = _HELPER_EDITS[edit]
    assert HELPERS.count(before) == 1
    model = _model(folder, helpers=HELPERS.replace(before, after))
    compiled, why = _look(model, _sample())
    assert compiled is None
    assert why


def _swap(owner: Any, first: str, second: str) -> None:
    one, other = getattr(owner, first), getattr(owner, second)
    setattr(owner, first, other)
    setattr(owner, second, one)


def _replaced(name: str) -> Callable[[Any], object]:
    return lambda m: setattr(sys.modules[_HELPERS], name, lambda x: x * 9)


_CHANGES: dict[str, Callable[[Any], object]] = {
    "a shared submodule": lambda m: setattr(m.part, "a", m.part.b),
    "a function replaced": _replaced("named"),
    "a function behind it replaced": _replaced("_deeper"),
    "the code of a function": lambda m: setattr(
        sys.modules[_HELPERS]._deeper, "__code__", (lambda x: x).__code__
    ),
    "the defaults of a function": lambda m: setattr(
        sys.modules[NAME].keyword, "__kwdefaults__", {"w": 7.0}
    ),
    "a method of a class": lambda m: setattr(type(m.part), "forward", lambda self, x: x),
    "a method of a base": lambda m: setattr(sys.modules[NAME].Base, "helper", lambda self, x: x),
    "an attribute of the class": lambda m: setattr(type(m), "level", 8),
    "a method of an object": lambda m: setattr(m.options, "applied", lambda x: x),
    "a bound method of another object": lambda m: setattr(m, "bound", type(m.options)(2.0).applied),
    "an entry of a nested mapping": lambda m: m.table["k"].__setitem__(1, (9.0, 3.0)),
    "a subclass of a mapping": lambda m: setattr(
        m, "table", collections.defaultdict(list, m.table)
    ),
    "a hook of backward": lambda m: m.layers[0].register_full_backward_hook(lambda *a: None),
    "weight_norm": lambda m: nn.utils.weight_norm(m.part.a),
    "a parametrization": lambda m: nn.utils.parametrize.register_parametrization(
        m.part.a, "weight", nn.Tanh()
    ),
    "a pruned weight": lambda m: prune.l1_unstructured(m.part.a, "weight", 3),  # type: ignore[no-untyped-call]
    "the layers reversed": lambda m: setattr(m, "layers", nn.ModuleList(list(m.layers)[::-1])),
    "another normalized shape": lambda m: setattr(m.part.norm, "normalized_shape", (4, 8)),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_change_of_the_module_is_a_miss(change: str, folder: Path) -> None:
    model = _model(folder)
    _CHANGES[change](model)
    compiled, why = _look(model, _sample())
    assert compiled is None
    assert why


def _set(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            yield

    return replaced


def _first(*args: Any, **kwargs: Any) -> Any:
    return args[0]


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    with torch.device("cpu"):
        yield


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_AROUND: dict[str, Callable[[], Any]] = {
    "a default device": _default_device,
    "the number of threads": _threads,
    "a module of a layer": _set(nn.modules.linear, "F", torch),
    "a default of PyTorch": _set(nn.functional.layer_norm, "__defaults__", (None, None, 1.0)),
    "torch.clamp": _set(torch, "clamp", _first),
    "Tensor.__add__": _set(torch.Tensor, "__add__", _first),
    "one function of PyTorch for another": _set(nn.functional, "layer_norm", nn.functional.gelu),
    "ModuleList.__iter__": _set(nn.ModuleList, "__iter__", lambda self: iter(())),
}


@pytest.mark.parametrize("change", _AROUND)
def test_a_change_around_the_module_is_a_miss(change: str, folder: Path) -> None:
    model = _model(folder)
    with _AROUND[change]():
        compiled, why = _look(model, _sample())
    assert compiled is None
    assert why
