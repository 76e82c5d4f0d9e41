"""Call forms: calls may pass the same arguments by position, by keyword, or by a default.

A call in another form than the sample's is bound to the parameters of forward and rewritten in the
sample's form. Code that was compiled for ``m(x, None)`` serves ``m(x)`` and ``m(x, mask=None)``.
This is done only if forward is a plain Python function, whose body cannot see the difference. A
wrapper (``*args, **kwargs``) may treat the forms differently, so its calls are not rewritten.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.contents import is_constant, same_value
from tvmbridge.core.reasons import Kind, Reason

# Functions that may read variables of their caller without naming them.
_READERS = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"})
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


NOT_TAKEN = Reason(Kind.STRUCTURE, "forward does not take these arguments")


@dataclass(frozen=True)
class Default:
    """The default of a parameter, for a call that does not pass it."""

    value: Any


# The position or keyword of an argument in a call, or the default if the call does not pass it.
Source: TypeAlias = int | str | Default
# A parameter by name; arguments in ``*args`` and ``**kwargs`` have a number or keyword as well.
_Parameter: TypeAlias = str | tuple[str, int | str]


@dataclass(frozen=True)
class Spelling:
    """A call form: how to find the arguments of the sample in a call of this form.

    - ``positional``: the source of each positional argument of the sample.
    - ``keywords``: the source of each keyword argument of the sample.
    - ``extras``: arguments that calls of this form pass and the sample leaves to their defaults:
      position or keyword, name of the parameter, and the default that the argument must equal.
    """

    positional: tuple[Source, ...]
    keywords: Mapping[str, Source]
    extras: tuple[tuple[int | str, str, Any], ...] = ()

    def respelled(self, call: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of ``call`` in the sample's call form."""
        positional = tuple(_given(source, call) for source in self.positional)
        return positional, {name: _given(source, call) for name, source in self.keywords.items()}

    def mismatch(self, call: Arguments) -> Reason | None:
        """Return which extra argument differs from its default; None if none does."""
        for place, name, default in self.extras:
            given = _given(place, call)
            if given is not default and not same_value(given, default):
                return other_constant(name, given, default, ", its default")
        return None


class Parameters:
    """The parameters of a plain Python function or method.

    - ``function``: the function, also of a bound method.
    - ``code``, ``defaults``: its code and its defaults when this object was created.
    - ``unread``: names of parameters that the code does not read, so that their values do not
      matter.
    """

    def __init__(self, forward: Callable[..., Any], function: types.FunctionType) -> None:
        self.function = function
        self.code, self.defaults = function.__code__, function.__defaults__
        self._keyword_defaults = dict(function.__kwdefaults__ or {})
        self._signature = inspect.signature(forward, follow_wrapped=False)
        self.unread = _unread(function.__code__, self._signature.parameters)

    @classmethod
    def of(cls, forward: Callable[..., Any] | None) -> Parameters | None:
        """Return the parameters of ``forward``; None if its signature may not be the true one."""
        function = getattr(forward, "__func__", forward)
        if not isinstance(function, types.FunctionType) or hasattr(function, "__signature__"):
            return None
        assert forward is not None
        try:
            return cls(forward, function)
        except ValueError:  # a method without a parameter for its object
            return None

    def changed(self) -> bool:
        """Whether the code or a default of the function has changed."""
        now = self.function
        return (
            now.__code__ is not self.code
            or now.__defaults__ is not self.defaults
            or not same_value(now.__kwdefaults__ or {}, self._keyword_defaults)
        )

    def keyword_defaults(self) -> list[dict[str, Any]]:
        """Return a list with the dictionary of keyword-only defaults; empty if there is none."""
        return [self.function.__kwdefaults__] if self.function.__kwdefaults__ else []

    def bound(self, count: int, keywords: tuple[str, ...]) -> dict[_Parameter, int | str] | None:
        """Return the position or keyword of each parameter's argument in a call.

        None: forward raises a TypeError for such a call.
        """
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
        """Whether the function does not read this argument."""
        return (parameter if isinstance(parameter, str) else parameter[0]) in self.unread

    def default(self, parameter: _Parameter) -> Default | None:
        """Return the default of a parameter; None if it has none, or not an immutable constant."""
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
    ) -> Spelling | Reason:
        """Return how to rewrite a call in the sample's form, or why that is not possible.

        Args:
            sample: the number of positional arguments and the keywords of the sample.
        """
        expected, given = self.bound(*sample), self.bound(*call)
        if expected is None or given is None:
            return NOT_TAKEN
        if _further(expected, given) != _further(given, expected):
            return Reason(Kind.STRUCTURE, "the keywords are in another order")
        sources: dict[int | str, Source] = {}
        for parameter, place in expected.items():
            source = given.get(parameter, self.default(parameter))
            if source is None:
                return Reason(Kind.STRUCTURE, f"argument `{_name(parameter)}` is not given")
            sources[place] = source
        extras = []
        for parameter, place in given.items():
            if parameter in expected or self.is_unread(parameter):
                continue
            default = self.default(parameter)
            if default is None:
                detail = f"argument `{_name(parameter)}` is given, and was not given by the sample"
                return Reason(Kind.STRUCTURE, detail)
            extras.append((place, _name(parameter), default.value))
        count, keywords = sample
        named = {name: sources[name] for name in keywords}
        return Spelling(tuple(sources[i] for i in range(count)), named, tuple(extras))


# Arguments of these types have few values, each of which may have code of its own.
_CHOICES = (str, bool, type(None), torch.dtype, torch.device)


def other_constant(name: str, given: Any, expected: Any, more: str = "") -> Reason:
    """Return the mismatch for an argument that is a constant in the sample."""
    detail = f"argument `{name}`: {shown(given)}, compiled for {shown(expected)}{more}"
    if isinstance(given, torch.Tensor):
        return Reason(Kind.TENSOR, detail)
    chooses = all(isinstance(value, _CHOICES) for value in (given, expected))
    return Reason(Kind.CHOICE if chooses else Kind.CONSTANT, detail)


def shown(value: Any) -> str:
    """Return text for ``value`` in a message, at most 60 characters of it."""
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
    """Return the variadic arguments that both calls have, in the order of ``of``.

    Forward can see the order of its ``**kwargs``.
    """
    return [p for p in of if isinstance(p, tuple) and p in others]


def _unread(code: types.CodeType, parameters: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters that no instruction of ``code`` names."""
    if not _READERS.isdisjoint(code.co_names):
        return frozenset()
    named: set[Any] = {*code.co_cellvars}
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        # From Python 3.13 on one instruction may name two variables.
        named.update(value if isinstance(value, tuple) else {value} & {*parameters})
    return frozenset(parameters) - named
