"""Damaged and forged plans: each is a miss, and none raises."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recall.models import load, plans_in
from tests.recall.test_recall import _OPTIONS, _look, _model, _plan, _x
from tvmbridge import add_tvm_dispatch
from tvmbridge.recall.plan import CodePlan

_MAGIC = b"tvmbridge compiled code 1\n"
# Fields that only reports, and choices of a later compilation, read.
_REPORTED = {"joint", "joint_reason", "origin", "native_calls", "aten_calls", "backward"}
_WRONG: tuple[Any, ...] = (1.5, "text", -7, ["tuple", "text", -7], ["record", "Nothing"])
_FORMS: tuple[Any, ...] = (
    ["tree", "os:system", None],
    ["tree", "builtins:dict", ["class", "os:PathLike"], ["leaf"]],
    ["operator", "os.system.default"],
    ["operator", "aten.linear.nothing"],
    ["enum", "InputKind", "mro"],
    ["torch", "load"],
    ["device", "cuda"],
    ["float", "x"],
    ["dict", 1],
    [],
    {},
    1.5,
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("damaged")
    with plans_in(folder):
        with torch.no_grad():
            add_tvm_dispatch(_model(load(folder)), (_x(),), options=_OPTIONS)
        yield folder


@pytest.fixture
def found(folder: Path) -> Iterator[Callable[[bytes], bool]]:
    """Return a function that writes the file of the plan and says whether the plan is used."""
    path = _plan(folder)
    genuine, module = path.read_bytes(), _model(load(folder))

    def used(content: bytes) -> bool:
        path.write_bytes(content)
        return _look(module)[0] is not None

    assert used(genuine)
    yield used
    assert used(genuine)


def _forged(content: bytes, change: Callable[[Any], object]) -> bytes:
    """Return the file with a changed description and a right checksum."""
    rest = content[len(_MAGIC) + 64 :]
    end = 8 + int.from_bytes(rest[:8], "big")
    described = json.loads(rest[8:end])
    change(described["description"])
    text = json.dumps(described).encode()
    rest = len(text).to_bytes(8, "big") + text + rest[end:]
    return _MAGIC + hashlib.sha256(rest).hexdigest().encode() + rest


def test_damaged_files_are_misses(folder: Path, found: Callable[[bytes], bool]) -> None:
    genuine = _plan(folder).read_bytes()
    start = len(_MAGIC) + 64
    for content in (
        b"",
        genuine[: start - 1],
        genuine[: len(genuine) // 2],
        genuine[:-1],
        b"x" + genuine[1:],
        genuine.replace(b'"facts"', b'"fakes"'),
        genuine[: start + 20] + b"\0" + genuine[start + 21 :],
    ):
        assert not found(content)


def test_a_wrong_value_in_a_plan_is_a_miss(folder: Path, found: Callable[[bytes], bool]) -> None:
    genuine = _plan(folder).read_bytes()
    for number, name in enumerate(CodePlan.__dataclass_fields__):
        wrong = _WRONG[number % len(_WRONG)]
        content = _forged(genuine, lambda d, n=name, w=wrong: d["plan"].__setitem__(n, w))
        assert not found(content) or name in _REPORTED, name


def test_wrong_forms_are_misses(folder: Path, found: Callable[[bytes], bool]) -> None:
    genuine = _plan(folder).read_bytes()
    for form in _FORMS:
        content = _forged(genuine, lambda d, f=form: d["plan"].update(convention=f))
        assert not found(content), form


def _inputs(change: Callable[[list[Any]], object]) -> Callable[[Any], object]:
    return lambda d: change(d["plan"]["inputs"][-1])


def _swapped(field: str, part: int | None) -> Callable[[Any], object]:
    """Swap the descriptions of the two weights of shape (8, 8), or one part of them."""

    def swap(described: Any) -> None:
        one, other = [d for d in described["plan"][field][1:] if "['tuple', 8, 8]" in str(d)]
        if part is None:
            one[:], other[:] = list(other), list(one)
        else:
            one[part], other[part] = other[part], one[part]

    return swap


_CHANGES: dict[str, Callable[[Any], object]] = {
    "two weights swapped": _swapped("inputs", None),
    "the names of two weights swapped": _swapped("inputs", 2),
    "the targets of two weights swapped": _swapped("inputs", 5),
    "the results swapped": lambda d: d["plan"].update(
        outputs=[d["plan"]["outputs"][0], *d["plan"]["outputs"][:0:-1]]
    ),
    "the keys of the results": lambda d: d["plan"].update(
        convention=json.loads(json.dumps(d["plan"]["convention"]).replace('"sum"', '"other"'))
    ),
    "no plan": lambda d: d.pop("plan"),
    "no facts": lambda d: d.pop("facts"),
    "facts of a list": lambda d: d.update(facts=[]),
    "no codes": lambda d: d["facts"].update(codes=[]),
    "other codes": lambda d: d["facts"].update(codes=["00"]),
    "codes of numbers": lambda d: d["facts"].update(codes=[1]),
    "other names": lambda d: d["facts"].update(named="00"),
    "no values": lambda d: d["facts"].update(values=[]),
    "values of no submodule": lambda d: d["facts"].update(values=[["x.y", "z", None]]),
    "values of wrong templates": lambda d: d["facts"]["values"][0].__setitem__(2, ["part"]),
    "values with deep templates": lambda d: d["facts"]["values"][0].__setitem__(
        2, ["items", [["items", [["items", [["items", [["items", []]]]]]]]]]
    ),
    "no outside": lambda d: d["facts"].update(outside=[]),
    "outside unused": lambda d: d["facts"].update(outside=["unused"] * len(d["facts"]["outside"])),
    "digests": lambda d: d["facts"].update(digests=["", ""]),
    "another name of an input": _inputs(lambda each: each.__setitem__(5, "tail.weight")),
    "no name of an input": _inputs(lambda each: each.__setitem__(5, "nothing.weight")),
    "another kind of input": _inputs(
        lambda each: each.__setitem__(3, ["enum", "InputKind", "USER"])
    ),
    "another graph": lambda d: d["plan"].update(
        source=["dict", "graph", "00", "residuals", "None"]
    ),
    "one output more": lambda d: d["plan"].update(num_outputs=9),
    "a view of nothing": lambda d: d["plan"].update(copied_outputs=["frozenset", 9]),
    "a pack of nothing": lambda d: d["plan"].update(packs=["tuple", ["tuple", "a", "b"]]),
}


def test_forged_plans_are_misses(folder: Path, found: Callable[[bytes], bool]) -> None:
    genuine = _plan(folder).read_bytes()
    for name, change in _CHANGES.items():
        assert not found(_forged(genuine, change)), name
