"""A module whose forward reads much that may change, as source text that tests change and load."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

NAME = "recalled_models"

SOURCE = """
import functools

import torch
from torch import nn
from torch.nn import functional as F

SCALE = 2.0
TABLE = {"act": F.gelu, "other": torch.tanh}
UNREAD = 1


def decorated(by):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs) * by

        return wrapper

    return decorate


def scaled(x, offset=0.5):
    return x * SCALE + offset


class Config:
    kind = "config"

    def __init__(self):
        self.factor = 1.5
        self.unread = [1]


class Inner(nn.Module):
    bias = 0.25

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.linear = nn.Linear(8, 8)
        self.act = nn.ReLU()
        self.register_buffer("shift", torch.ones(8))

    @decorated(3.0)
    def forward(self, x):
        x = TABLE["act"](self.linear(x)) + self.bias
        return scaled(self.act(x)) * self.config.factor + self.shift


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner(Config())
        self.tail = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.power = 2
        self.weights = [1.0, 0.5]

    def forward(self, x, y=None, flag=False):
        z = self.drop(self.tail(self.inner(x))) ** self.power * self.weights[1]
        z = z if y is None else z + y
        return (z, {"sum": z.sum(-1)}) if not flag else (z, {"sum": z.amax(-1)})


class Sub(Model):
    def forward(self, x, y=None, flag=False):
        return super().forward(x * 1.0, y, flag)
"""


@contextmanager
def plans_in(folder: Path) -> Iterator[None]:
    """A context in which plans are kept below ``folder``; afterwards the loaded module is gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVMBRIDGE_CACHE", "1")
        patch.setenv("TVMBRIDGE_CACHE_DIR", str(folder / "cache"))
        patch.delitem(sys.modules, NAME, raising=False)
        yield
    sys.modules.pop(NAME, None)


def load(folder: Path, source: str = SOURCE, name: str = NAME) -> ModuleType:
    """Load ``source`` as the Python module ``name``, as a new process would."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Byte code is not read back: a file that is written twice in a second would look unchanged.
    exec(compile(source, str(path), "exec"), vars(module))
    return module
