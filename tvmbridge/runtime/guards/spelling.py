"""Spellings: how calls give the same arguments, by position, by keyword, or by a default.

A call in another spelling than the sample's is bound to the parameters of forward, and spelled as
the sample is: code that was compiled for ``m(x, None)`` serves ``m(x)`` and ``m(x, mask=None)``.
Forward is bound where it is a plain function of Python, whose body cannot tell the spellings
apart. What a wrapper (``*args, **kwargs``) makes of them is not known, and stays as it is given.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from tvmbridge.core.contents import is_constant, same_value
from tvmbridge.graph_capture.trace.arguments import Arguments

STRUCTURE = "the structure of the arguments differs"
CONSTANT = "an argument that is not a tensor differs"
TENSOR = "an argument is a tensor, and was none"

# Functions that read their callers' variables without naming them.
_READERS = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"})
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Mismatch(NamedTuple):
    """Why a call is not served: the kind of reason, and what was expected of which argument."""

    reason: str
    detail: str = ""


NOT_TAKEN = Mismatch(STRUCTURE, "forward does not take these arguments")


@dataclass(frozen=True)
class Default:
    """The value of a parameter that a call does not give."""

    value: Any


# An argument of a call, by its position or keyword, or a default in its place.
Source: TypeAlias = int | str | Default
# A parameter by its name; what ``*args`` and ``**kwargs`` take, by the number or keyword as well.
_Parameter: TypeAlias = str | tuple[str, int | str]


@dataclass(frozen=True)
class Spelling:
    """How the arguments of the sample are found in a call.

    ``extras`` are arguments of the call that the sample leaves to their defaults, each with the
    name of the parameter and its default, which it must be.
    """

    positional: tuple[Source, ...]
    keywords: Mapping[str, Source]
    extras: tuple[tuple[int | str, str, Any], ...] = ()

    def respelled(self, call: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call as the sample spells them."""
        positional = tuple(_given(source, call) for source in self.positional)
        return positional, {name: _given(source, call) for name, source in self.keywords.items()}

    def mismatch(self, call: Arguments) -> Mismatch | None:
        """Which of the extras is not its default; None: all are."""
        for place, name, default in self.extras:
            given = _given(place, call)
            if given is not default and not same_value(given, default):
                return other_constant(name, given, default, ", its default")
        return None


class Parameters:
    """The parameters of a plain function or method of Python.

    ``unread`` are those that its code does not name: calls that differ in these do the same.
    """

    def __init__(self, forward: Callable[..., Any], function: types.FunctionType) -> None:
        self.function = function
        self.code, self.defaults = function.__code__, function.__defaults__
        self._keyword_defaults = dict(function.__kwdefaults__ or {})
        self._signature = inspect.signature(forward, follow_wrapped=False)
        self.unread = _unread(function.__code__, self._signature.parameters)

    @classmethod
    def of(cls, forward: Callable[..., Any] | None) -> Parameters | None:
        """Those of ``forward``; None where what it takes may not be what it says."""
        function = getattr(forward, "__func__", forward)
        if not isinstance(function, types.FunctionType) or hasattr(function, "__signature__"):
            return None
        assert forward is not None
        try:
            return cls(forward, function)
        except ValueError:  # a method without a parameter for its object
            return None

    def changed(self) -> bool:
        """Whether the function has other code or defaults now."""
        now = self.function
        return (
            now.__code__ is not self.code
            or now.__defaults__ is not self.defaults
            or not same_value(now.__kwdefaults__ or {}, self._keyword_defaults)
        )

    def keyword_defaults(self) -> list[dict[str, Any]]:
        """The dictionary of the defaults of keyword-only parameters, if there are any."""
        return [self.function.__kwdefaults__] if self.function.__kwdefaults__ else []

    def bound(self, count: int, keywords: tuple[str, ...]) -> dict[_Parameter, int | str] | None:
        """The arguments of a call by parameter; None: forward raises TypeError for it."""
        try:
            bound = self._signature.bind(*range(count), **{name: name for name in keywords})
        except TypeError:
            return None
        return dict(self._flat(bound.arguments))

    def _flat(self, arguments: Mapping[str, Any]) -> Iterator[tuple[_Parameter, int | str]]:
        for name, place in arguments.items():
            if self._signature.parameters[name].kind not in _VARIADIC:
                yield name, place
            else:
                several = place.items() if isinstance(place, dict) else enumerate(place)
                yield from (((name, key), each) for key, each in several)

    def is_unread(self, parameter: _Parameter) -> bool:
        """Whether the function does not read the argument."""
        return (parameter if isinstance(parameter, str) else parameter[0]) in self.unread

    def default(self, parameter: _Parameter) -> Default | None:
        """What stands for an argument that is not given; None: a tensor, what can be changed, or
        nothing."""
        if not isinstance(parameter, str):
            return None
        value = self._signature.parameters[parameter].default
        if value is inspect.Parameter.empty or not is_constant(value):
            return None
        return Default(value)

    def spelling(
        self,
        sample: tuple[int, tuple[str, ...]],
        call: tuple[int, tuple[str, ...]],
    ) -> Spelling | Mismatch:
        """How a call with so many positional arguments and these keywords gives the sample's."""
        expected, given = self.bound(*sample), self.bound(*call)
        if expected is None or given is None:
            return NOT_TAKEN
        if _further(expected, given) != _further(given, expected):
            return Mismatch(STRUCTURE, "the keywords are in another order")
        sources: dict[int | str, Source] = {}
        for parameter, place in expected.items():
            source = given.get(parameter, self.default(parameter))
            if source is None:
                return Mismatch(STRUCTURE, f"argument `{_name(parameter)}` is not given")
            sources[place] = source
        extras = []
        for parameter, place in given.items():
            if parameter in expected or self.is_unread(parameter):
                continue
            default = self.default(parameter)
            if default is None:
                detail = f"argument `{_name(parameter)}` is given, and was not given by the sample"
                return Mismatch(STRUCTURE, detail)
            extras.append((place, _name(parameter), default.value))
        count, keywords = sample
        named = {name: sources[name] for name in keywords}
        return Spelling(tuple(sources[i] for i in range(count)), named, tuple(extras))


def other_constant(name: str, given: Any, expected: Any, more: str = "") -> Mismatch:
    """The mismatch of an argument that is no tensor in the sample."""
    detail = f"argument `{name}`: {shown(given)}, compiled for {shown(expected)}{more}"
    return Mismatch(TENSOR if isinstance(given, torch.Tensor) else CONSTANT, detail)


def shown(value: Any) -> str:
    """``value`` in a message: in full where it is short."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    text = repr(value) if is_constant(value) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _given(source: Source, call: Arguments) -> Any:
    if isinstance(source, Default):
        return source.value
    return call[0][source] if isinstance(source, int) else call[1][source]


def _name(parameter: _Parameter) -> str:
    if isinstance(parameter, str):
        return parameter
    name, key = parameter
    return key if isinstance(key, str) else f"{name}[{key}]"


def _further(
    of: Mapping[_Parameter, int | str], others: Mapping[_Parameter, int | str]
) -> list[_Parameter]:
    """What ``**kwargs`` takes of both, in the order of the first: forward sees it."""
    return [p for p in of if isinstance(p, tuple) and p in others]


def _unread(code: types.CodeType, parameters: Mapping[str, Any]) -> frozenset[str]:
    """The parameters that no instruction of ``code`` names."""
    if not _READERS.isdisjoint(code.co_names):
        return frozenset()
    named: set[Any] = {*code.co_cellvars}
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        # From Python 3.13 on one instruction may name two variables.
        named.update(value if isinstance(value, tuple) else {value} & {*parameters})
    return frozenset(parameters) - named
