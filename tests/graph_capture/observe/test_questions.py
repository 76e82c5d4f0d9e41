"""Conditions about tensors that differ between a trace and a call: guarded, or refused."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tvmbridge import BridgeError, CaptureError, add_tvm_dispatch, dispatch_report
from tvmbridge.core.assumptions import Question
from tvmbridge.graph_capture.capture import capture

KNOWN = torch.ones(3)


class Asking(nn.Module):
    """Multiplies by one of two numbers, which the condition ``asks`` of the arguments selects."""

    def __init__(self, asks: Callable[..., Any]) -> None:
        super().__init__()
        self.asks = asks
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0] * (2.0 if self.asks(self, *tensors) else 3.0)


def _prints_and_catches(_: Any, x: torch.Tensor) -> None:
    with contextlib.suppress(Exception):
        print(len(x))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "type is": (lambda _, x: type(x) is torch.Tensor, "the class of a tensor with torch.Tensor"),
    "type ==": (lambda _, x: type(x) == torch.Tensor, "the class of a tensor with"),  # noqa: E721
    "type in": (lambda _, x: type(x) in (torch.Tensor, nn.Parameter), "the class of a tensor with"),
    "class": (lambda _, x: x.__class__ is torch.Tensor, "the class of a tensor with torch.Tensor"),
    "of a weight": (lambda m, _: type(m.weight) is nn.Parameter, "the class of a tensor with nn."),
    "fake": (lambda _, x: isinstance(x, FakeTensor), "asks whether tensors are fake"),
    "is": (lambda _, x: x is KNOWN, "asks whether a tensor is KNOWN"),
    "key": (lambda _, x: x in {KNOWN: 1}, "in a set or as a key"),
    "set": (lambda _, x: len({x}) == 1, "in a set or as a key"),
    "data_ptr": (lambda _, x: x.data_ptr() == 0, r"the memory of a tensor \(data_ptr\)"),
    "storage": (lambda _, x: x.storage().size() == 3, r"the memory of a tensor \(storage\)"),
    "untyped_storage": (
        lambda _, x: x.untyped_storage().nbytes() == 12,
        r"the memory of a tensor \(untyped_storage\)",
    ),
    "is_inference": (lambda _, x: x.is_inference(), "whether a tensor was made in inference"),
    "is_view": (lambda _, x: x._is_view(), r"the memory of a tensor \(_is_view\)"),
    "repr": (lambda _, x: "Fake" in repr(x), "makes text of the values"),
    "str": (lambda _, x: "Fake" in str(x), "makes text of the values"),
    "f-string": (lambda _, x: "Fake" in f"{x}", "makes text of the values"),
    "%": (lambda _, x: "Fake" in "%s" % x, "makes text of the values"),  # noqa: UP031
    "a print that is caught": (_prints_and_catches, "writes text by print"),
}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("question", REFUSED)
def test_a_question_is_refused(question: str) -> None:
    asks, message = REFUSED[question]
    with pytest.raises(CaptureError, match=message):
        add_tvm_dispatch(Asking(asks).eval(), torch.randn(3))


SERVED: dict[str, Callable[..., Any]] = {
    "isinstance": lambda _, x: isinstance(x, torch.Tensor),
    "isinstance of a weight": lambda m, _: isinstance(m.weight, nn.Parameter),
    "is None": lambda m, x: x is None or m.weight is None,
    "the shape as text": lambda _, x: f"{x.shape} {x.dtype} {x.device}" == "",
    "the class of something else": lambda m, _: type(m) is Asking,
    "equal elements": lambda _, x: (x == KNOWN).shape == x.shape,
    "a parameter as text": lambda m, _: f"{type(m).__name__}" == "Asking",
}


@pytest.mark.parametrize("question", SERVED)
def test_other_questions_are_served(question: str) -> None:
    asks, x = SERVED[question], torch.randn(3)
    module = add_tvm_dispatch(Asking(asks).eval(), x)
    torch.testing.assert_close(module(x), Asking(asks)(x))
    assert not dispatch_report(module).fallbacks


def test_identity_asked_by_a_function_is_watched() -> None:
    def same(_: Any, x: torch.Tensor, y: torch.Tensor) -> bool:
        return operator.is_(x, y)

    x, y = torch.randn(3), torch.randn(3)
    module = add_tvm_dispatch(Asking(same).eval(), (x, y))
    torch.testing.assert_close(module(x, y), x * 3)
    torch.testing.assert_close(module(x, x), x * 2)
    ((reason, _),) = dispatch_report(module).fallbacks.items()
    assert reason.startswith("one tensor is given twice")


class Viewing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x.view(-1)


def test_a_view_made_in_inference_mode_of_an_argument_that_learns_is_refused() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    assert Viewing()(x).grad_fn is None
    with pytest.raises(BridgeError, match="its gradient is not that of a view"):
        add_tvm_dispatch(Viewing().train(), x)
    module = add_tvm_dispatch(Viewing().train(), x.detach())
    torch.testing.assert_close(module(x.detach()), x.detach().view(-1))


class Inferring(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if torch.is_inference_mode_enabled() else 3.0)


def test_inference_mode_that_forward_asks_for_is_watched() -> None:
    x = torch.randn(3)
    module = add_tvm_dispatch(Inferring().eval(), x)
    with torch.inference_mode():
        torch.testing.assert_close(module(x), x * 2)
    with torch.no_grad():
        torch.testing.assert_close(module(x), x * 3)
    ((reason, _),) = dispatch_report(module).fallbacks.items()
    assert reason == "torch.is_inference_mode_enabled outside of the module changed"


BASE = torch.randn(6)
QUESTIONS: dict[str, tuple[Callable[..., bool], tuple[Any, ...], tuple[Any, ...]]] = {
    "one tensor is given twice": (lambda _, x, y: x is y, (BASE, BASE + 1), (BASE, BASE)),
    "one tensor is given twice (id)": (
        lambda _, x, y: id(x) == id(y),
        (BASE, BASE + 1),
        (BASE, BASE),
    ),
    "an argument is a parameter": (
        lambda _, x: isinstance(x, nn.Parameter),
        (BASE,),
        (nn.Parameter(BASE, requires_grad=False),),
    ),
    "a tensor starts within its memory": (
        lambda _, x: x.storage_offset() > 0,
        (BASE[:3],),
        (BASE[3:],),
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_forward_asks_of_tensors_is_watched(name: str) -> None:
    asks, sample, other = QUESTIONS[name]
    plain, module = Asking(asks).eval(), Asking(asks).eval()
    with pytest.raises(CaptureError, match=name.split(" (")[0]):
        add_tvm_dispatch(module, other)
    add_tvm_dispatch(module, sample)
    with torch.no_grad():
        for arguments in (sample, other):
            torch.testing.assert_close(module(*arguments), plain(*arguments))
    report = dispatch_report(module)
    ((reason, count),) = report.fallbacks.items()
    assert reason.startswith(name.split(" (")[0])
    assert count == 1


def test_who_asks_for_requires_grad_gets_code_for_each_answer() -> None:
    plain, module = (Asking(lambda _, x: x.requires_grad).eval() for _ in range(2))
    add_tvm_dispatch(module, BASE)
    with torch.no_grad():
        for _ in range(2):
            for x in (BASE, BASE.clone().requires_grad_()):
                torch.testing.assert_close(module(x), plain(x))
    report = dispatch_report(module)
    assert ([s.calls for s in report.specializations], report.fallbacks) == ([2, 2], {})


@pytest.mark.parametrize("name", ["is_leaf", "grad_fn", "grad", "_version", "_base"])
def test_questions_to_autograd_are_refused(name: str) -> None:
    module = Asking(lambda _, x: bool(getattr(x, name))).train()
    with pytest.raises(CaptureError, match=f"reads {name} of a tensor"):
        add_tvm_dispatch(module, torch.randn(3, requires_grad=True))


class Imports(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import imported_by_forward  # type: ignore[import-not-found]

        return x if imported_by_forward.WHOLE else x + 1


class Compares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import imported_by_forward

        return x + (2 if imported_by_forward.same(x, x) else 1)


def test_what_an_import_runs_is_not_of_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def same(a, b):\n    return a is b\n\n\nWHOLE = same(1, 2)\n"
    text = f"import os\n\nFOUND = os.path.exists('a file')\n\n\n{text}"
    (tmp_path / "imported_by_forward.py").write_text(text)
    # The whole program may run in an import too.
    (tmp_path / "imports_all.py").write_text("import builtins\nbuiltins.WHOLE_PROGRAM()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []

    def whole_program() -> None:
        for module in (Imports(), Compares()):
            asks = capture(module.eval(), torch.ones(2)).assumptions.asks
            found.append(Question.IDENTITY in asks)

    monkeypatch.setattr(builtins, "WHOLE_PROGRAM", whole_program, raising=False)
    importlib.import_module("imports_all")
    assert found == [False, True]
