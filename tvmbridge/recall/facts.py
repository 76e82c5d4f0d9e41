"""The facts that capture has observed: described when code is kept, compared before it is used.

What forward read of the module is kept by path and name, with a digest of the values. What it read
elsewhere is found again from the functions that it ran, by the same search as during capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tvmbridge.cache.key import digest_of
from tvmbridge.calls.copies import copied_values
from tvmbridge.core.assumptions import OutsideValue
from tvmbridge.core.captured_graph import Assumptions
from tvmbridge.core.contents import ANY_TENSOR, MISSING, PartOf
from tvmbridge.core.states import StateOf, reader_of
from tvmbridge.graph_capture.observe.attributes import own_names
from tvmbridge.graph_capture.observe.objects import NO_READS, ObjectReads
from tvmbridge.graph_capture.observe.outside import OutsideReads
from tvmbridge.graph_capture.observe.watching import Codes
from tvmbridge.recall.describe import Describer, UndescribableError
from tvmbridge.recall.walk import NotFoundError, Walk, walk

# Which attributes of a value were read: None for all of them, else a nested list.
Template = Any
_TENSOR = "tensor"
_UNUSED = "unused"
_STATE = "state"
_ANY_STATE = "any state"
_MOST_CODES = 4096


class ChangedError(UndescribableError):
    """A fact differs from the one that was kept; the message names it."""


@dataclass(frozen=True)
class Facts:
    """What a module and its surroundings must still be.

    - ``codes``: digests of the code that forward ran.
    - ``named``: the digest of everything that this code names.
    - ``values``: the attributes of the module that forward read: path, name and template.
    - ``outside``: a template for each value that is found outside of the module.
    - ``digests``: digests of the values of ``values`` and of ``outside``.
    """

    codes: tuple[str, ...]
    named: str
    values: tuple[tuple[str, str, Template], ...]
    outside: tuple[Template, ...]
    digests: tuple[str, str]

    def content(self) -> dict[str, Any]:
        """Return the facts as plain JSON."""
        return {
            "codes": list(self.codes),
            "named": self.named,
            "values": [list(each) for each in self.values],
            "outside": list(self.outside),
            "digests": list(self.digests),
        }

    @classmethod
    def parse(cls, content: Any) -> Facts:
        """Return the facts that :meth:`content` has described.

        Raises:
            ValueError: ``content`` is of another form.
        """
        if not isinstance(content, dict):
            raise ValueError("it has no facts")
        entries: Mapping[str, Any] = content
        codes, named, digests = (entries.get(n, 0) for n in ("codes", "named", "digests"))
        values, outside = entries.get("values"), entries.get("outside")
        texts = [codes, digests, [named]]
        if not all(isinstance(t, list) and all(type(e) is str for e in t) for t in texts):
            raise ValueError("its facts have another form")
        if len(digests) != 2 or not isinstance(values, list) or not isinstance(outside, list):
            raise ValueError("its facts have another form")
        for each in values:
            if not isinstance(each, list) or [type(part) for part in each[:2]] != [str, str]:
                raise ValueError("an attribute has no name")
            _checked(*each[2:])
        for each in outside:
            _checked(each)
        named_values = tuple((path, name, template) for path, name, template in values)
        return cls(tuple(codes), named, named_values, tuple(outside), (digests[0], digests[1]))


def observed(module: nn.Module, assumed: Assumptions, describer: Describer) -> Facts:
    """Return the facts behind the assumptions of a graph that was captured just now.

    Raises:
        UndescribableError: a fact cannot be described as data.
    """
    labels = {describer.code(code): code.co_name for code in assumed.executed}
    if len(labels) > _MOST_CODES:
        raise UndescribableError(f"{len(labels)} functions")
    values = tuple((p, n, _template(value)) for (p, n), value in assumed.values.items())
    # Before the walk, because functions of the values' classes run as well.
    _, of_values = _values(module, values, describer)
    try:
        walked = walk(module, describer, tuple(labels))
    except NotFoundError as error:
        raise UndescribableError(f"{labels[error.code]}, which no name leads to") from None
    # Two functions may have the same code, and only one of them may have run.
    met = {id(each.code) for each in walked.functions}
    for code in assumed.executed:
        if id(code) not in met:
            raise UndescribableError(f"{code.co_name}, which no name leads to")
    read = {value.key: value for value in assumed.outside if not isinstance(value.holder, Codes)}
    found = _searched(module, walked)
    missed = [value.label for key, value in read.items() if key not in {v.key for v in found}]
    if missed:
        raise UndescribableError(f"{missed[0]}, which no function that forward runs leads to")
    outside = tuple(_template(read[v.key].expected) if v.key in read else _UNUSED for v in found)
    _, of_outside = _outside(outside, found, describer, walked)
    return Facts(tuple(labels), _named(walked), values, outside, (of_values, of_outside))


def verified(
    module: nn.Module, facts: Facts, describer: Describer
) -> tuple[Mapping[tuple[str, str], Any], tuple[OutsideValue, ...]]:
    """Return what guards expect of attributes and of outside values, if nothing has changed.

    Raises:
        ChangedError: a fact differs.
        UndescribableError: a fact cannot be described as data any more.
    """
    values, of_values = _values(module, facts.values, describer)
    if of_values != facts.digests[0]:
        raise ChangedError("an attribute that forward reads has another value")
    walked = walk(module, describer, facts.codes)
    if _named(walked) != facts.named:
        raise ChangedError("something that forward names is another")
    found = _searched(module, walked)
    if len(found) != len(facts.outside):
        raise ChangedError("forward names other values outside of the module")
    outside, of_outside = _outside(facts.outside, found, describer, walked)
    if of_outside != facts.digests[1]:
        raise ChangedError("a value outside of the module is another")
    codes = Codes(value.expected for value in outside if value.itself).watched()
    return values, (*outside, codes)


def _named(walked: Walk) -> str:
    lines = (f"{place} {sorted(digests)}" for place, digests in walked.named.items())
    # The order of the walk depends on what was imported before.
    return digest_of("\n".join(sorted(lines)))


def _searched(module: nn.Module, walked: Walk) -> list[OutsideValue]:
    """Return the values outside of the module that the functions found by a walk may read."""
    reads = OutsideReads(module, ObjectReads())
    for executed in walked.functions:
        reads.note(executed)
    if reads.complaints:
        raise UndescribableError(f"forward {reads.complaints[0]}")
    return [value for value in reads.values() if not isinstance(value.holder, Codes)]


def _values(
    module: nn.Module, wanted: Sequence[tuple[str, str, Template]], describer: Describer
) -> tuple[dict[tuple[str, str], Any], str]:
    """Return the expected values of attributes, reduced by their templates, and a digest."""
    raw = {(p, n): _attribute(module, p, n, template) for p, n, template in wanted}
    copies = copied_values(raw)
    values = {(p, n): _narrowed(template, copies[p, n]) for p, n, template in wanted}
    lines = [f"{p} {n} {_of(describer, f'{p}.{n}', v)}" for (p, n), v in values.items()]
    for path, name in values:
        if name == "__dict__":
            owner = module.get_submodule(path)
            lines.append(f"{path} {[n for n in vars(owner) if n in own_names(owner)]}")
    return values, digest_of("\n".join(lines))


def _outside(
    templates: Sequence[Template],
    found: Sequence[OutsideValue],
    describer: Describer,
    walked: Walk,
) -> tuple[list[OutsideValue], str]:
    """Return the values outside of the module, reduced by their templates, and a digest.

    The digest covers the order of all sets that were described, if forward may depend on it.
    """
    outside, lines = [], []
    for value, template in zip(found, templates, strict=True):
        if template == _UNUSED:
            continue
        if not value.itself:
            value = replace(value, expected=_narrowed(template, value.expected))
        outside.append(value)
        digest = _of(describer, value.label, value.expected)
        lines.append(f"{value.label} {value.name} {value.itself} {digest}")
    lines += describer.orders(walked.used)
    return outside, digest_of("\n".join(sorted(lines)))


def _of(describer: Describer, label: str, value: Any) -> str:
    try:
        return describer.named(label.rpartition(".")[2], value)
    except UndescribableError as error:
        raise UndescribableError(f"{label.lstrip('.')}, which is or holds {error}") from None


def _attribute(module: nn.Module, path: str, name: str, template: Template) -> Any:
    """Return the present value of an attribute, as ``values_read`` of the observation does."""
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        raise ChangedError(f"there is no submodule {path}") from None
    if name == "__dict__":
        return own_names(owner)
    value = vars(owner).get(name, MISSING)
    if template == _TENSOR:
        if not isinstance(value, torch.Tensor):
            raise ChangedError(f"{path}.{name} is no tensor")
        return ANY_TENSOR
    if isinstance(value, torch.Tensor):
        raise ChangedError(f"{path}.{name} is a tensor")
    return value


def _template(expected: Any) -> Template:
    """Return which parts of an expected value were read."""
    if expected is ANY_TENSOR:
        return _TENSOR
    if type(expected) is StateOf:
        return _ANY_STATE if expected.state is None else _STATE
    if type(expected) is PartOf:
        parts = [[name, _template(each)] for name, each in expected.attributes.items()]
        return ["part", expected.asks, parts]
    if type(expected) in (list, tuple, dict):
        held = list(expected.values() if type(expected) is dict else expected)
        parts = list(map(_template, held))
        return None if all(part is None for part in parts) else ["items", parts]
    return None


def _narrowed(template: Template, copied: Any) -> Any:
    """Return ``copied`` with the parts that were read, as ``ObjectReads.narrowed`` does."""
    if template is None or copied is ANY_TENSOR or type(copied) is StateOf:
        return copied
    if template in (_STATE, _ANY_STATE):
        if reader_of(type(copied)) is None:
            raise ChangedError("the state of a value cannot be read")
        return NO_READS.state(copied) if template == _STATE else StateOf(type(copied), None)
    if template == _TENSOR:
        if not isinstance(copied, torch.Tensor):
            raise ChangedError("a value is no tensor")
        return ANY_TENSOR
    if template[0] == "part":
        if isinstance(copied, type) or not hasattr(copied, "__dict__"):
            raise ChangedError("a value is no object")
        part = PartOf(type(copied), {}, template[1])
        for name, each in template[2]:
            part.attributes[name] = _narrowed(each, part.found(copied, name))
        return part
    if type(copied) not in (list, tuple, dict) or len(copied) != len(template[1]):
        raise ChangedError("a container is another")
    held = list(copied.values() if type(copied) is dict else copied)
    parts = [_narrowed(t, value) for t, value in zip(template[1], held, strict=True)]
    return dict(zip(copied, parts, strict=True)) if type(copied) is dict else type(copied)(parts)


def _checked(template: Any) -> None:
    """Raise ValueError unless ``template`` has the form that :func:`_template` returns."""
    if template in (None, _TENSOR, _UNUSED, _STATE, _ANY_STATE):
        return
    if not isinstance(template, list):
        raise ValueError("it is no template")
    if template[:1] == ["items"] and len(template) == 2 and isinstance(template[1], list):
        for each in template[1]:
            _checked(each)
        return
    kinds = [type(part) for part in template[1:]]
    if template[:1] != ["part"] or kinds != [bool, list]:
        raise ValueError("it is no template")
    for pair in template[2]:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not str:
            raise ValueError("it is no template")
        _checked(pair[1])
