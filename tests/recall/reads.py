"""Source texts of a module that reads values in many ways, and of the functions that it imports."""

from __future__ import annotations

SOURCE = """
import collections
import dataclasses
import enum
import functools
import math
import types
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import recalled_helpers
from recalled_helpers import imported

FACTOR = 2.0
SHAPES = {"a": (1, 2)}
NEST = types.SimpleNamespace(deep=types.SimpleNamespace(value=1.5))
Point = collections.namedtuple("Point", "x y")
POINT = Point(1.0, 2.0)
FUNCTIONS = [torch.relu, lambda x: x + 1.0]
half = functools.partial(torch.mul, other=0.5)


@dataclasses.dataclass
class Options:
    scale: float = 1.25
    names: tuple = ("a",)

    @property
    def doubled(self):
        return self.scale * 2.0

    def applied(self, x):
        return x * self.doubled


class Kind(enum.Enum):
    ONE = 1.5
    TWO = 2.5

    def on(self, x):
        return x * self.value


class Descriptor:
    def __init__(self, value):
        self.value = value

    def __get__(self, owner, kind=None):
        return self.value


class Meta(type):
    def __call__(cls, *args):
        made = super().__call__(*args)
        made.by_meta = 1.0625
        return made


class Thing(metaclass=Meta):
    pass


class Lookup:
    def __getattr__(self, name):
        if name == "found":
            return 0.75
        raise AttributeError(name)


@functools.lru_cache
def cached(n):
    return n * 1.125


def closing(k):
    def inner(x):
        return x * k
    return inner


by_three = closing(3.0)


@torch.enable_grad()
def with_grad(x):
    return x.sin()


def attributed(x):
    return x * attributed.factor


attributed.factor = 1.75


def keyword(x, *, w=0.125):
    return x + w


def generator(xs):
    for each in xs:
        yield each * 1.0


class Base(nn.Module):
    level = 3

    def helper(self, x):
        return x - 0.5

    @staticmethod
    def static(x):
        return x * 1.1

    @classmethod
    def of_class(cls, x):
        return x * cls.level

    @property
    def prop(self):
        return 0.3


class Mid(Base):
    pass


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.norm(self.a(x)) - self.b(x)


class Model(Mid):
    described = Descriptor(0.6)

    def __init__(self):
        super().__init__()
        self.part = Part()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Tanh()])
        self.options = Options()
        self.kind = Kind.ONE
        self.lookup = Lookup()
        self.thing = Thing()
        self.table = {"k": [1.0, (2.0, 3.0)]}
        self.dtype = torch.float32
        self.call = closing(1.5)
        self.bound = self.options.applied
        self.ordered = collections.OrderedDict(a=1.0, b=2.0)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x, y):
        x = self.part(x)
        for layer in self.layers:
            x = layer(x)
        x = self.options.applied(x) + self.kind.on(y)
        x = self.helper(x) + self.static(x) + self.of_class(x) * self.prop
        x = x * self.lookup.found + self.thing.by_meta + self.described
        x = x * self.table["k"][1][0] + SHAPES["a"][1] + NEST.deep.value + POINT.y
        for function in FUNCTIONS:
            x = function(x)
        x = half(x) * cached(2) + by_three(x) + attributed(x) + keyword(x)
        x = recalled_helpers.named(x) + imported(x) + recalled_helpers.VALUE * x
        for each in generator([x]):
            x = each
        x = x.to(self.dtype) + self.shift + self.call(x) + self.bound(x)
        for value in self.ordered.values():
            x = x / value
        if hasattr(self, "extra"):
            x = x + 1
        if "z" in self.table:
            x = x + 1
        x = x + math.pi * FACTOR
        return torch.clamp(x, -100.0, 100.0) - y * 0.01
"""
HELPERS = """
VALUE = 0.2
_PRIVATE = 0.9


def _deeper(x):
    return x * _PRIVATE


def named(x):
    return _deeper(x) + 1


def imported(x):
    return x.cos() * 0.1
"""
