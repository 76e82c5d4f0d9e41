"""Patches of other libraries' functions apply to one thread, can be nested, and are removed."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from torch import nn

from tvmbridge.calls import patches
from tvmbridge.calls.patches import forward_patched_here, patched_here


class Base:
    def told(self, word: str) -> str:
        return f"base {word}"

    @staticmethod
    def alone(word: str) -> str:
        return f"alone {word}"


class Derived(Base):
    """A class that inherits the patched function."""


def _marking(mark: str) -> Callable[..., str]:
    return lambda genuine, *args: f"{mark} {genuine(*args)}"


def _in_another_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_the_innermost_patch_of_this_thread_is_called() -> None:
    genuine = Base.told
    with patched_here(Base, "told", _marking("outer")) as given:
        assert given is genuine
        with patched_here(Base, "told", _marking("inner")):
            assert Base().told("x") == "inner base x"
            assert _in_another_thread(lambda: Base().told("x")) == "base x"
        assert Base().told("x") == "outer base x"
    assert Base.told is genuine


def test_threads_patch_one_function_each_for_itself() -> None:
    def other() -> str:
        with patched_here(Base, "told", _marking("other")):
            return Base().told("x")

    with patched_here(Base, "told", _marking("own")):
        assert _in_another_thread(other) == "other base x"
        assert Base().told("x") == "own base x"


def test_what_is_inherited_or_static_is_so_again_afterwards() -> None:
    before = inspect.getattr_static(Base, "alone")
    with (
        patched_here(Derived, "told", _marking("patched")),
        patched_here(Base, "alone", _marking("patched")),
    ):
        assert Derived().told("x") == "patched base x"
        assert Base().told("x") == "base x"
        assert Base().alone("x") == Base.alone("x") == "patched alone x"
    assert "told" not in vars(Derived)
    assert inspect.getattr_static(Base, "alone") is before


def test_an_error_within_takes_the_patch_away() -> None:
    genuine = Base.told
    with pytest.raises(ValueError, match="within"), patched_here(Base, "told", _marking("x")):
        raise ValueError("within")
    assert Base.told is genuine


class Named(nn.Module):
    def forward(self, word: str) -> str:
        return f"forward {word}"


def test_a_forward_that_an_instance_holds_is_replaced_too() -> None:
    held, plain = Named(), Named()
    held.forward = own = held.forward
    root, genuine = nn.ModuleList([held, plain]), Named.forward
    with patched_here(Named, "forward", _marking("outer")):
        with forward_patched_here(root, Named, _marking("patched")):
            assert held("x") == plain("x") == "patched forward x"
        assert plain("x") == "outer forward x"
    assert held.__dict__["forward"] is own
    assert Named.forward is genuine


def test_a_signal_handler_may_raise_after_any_call() -> None:
    """A profiler raises once after each call of the patch, where Python runs signal handlers."""
    genuine, before = Base.told, dict(patches._INSTALLED)

    def calls_of_a_patch(interrupted: int) -> int:
        calls = 0

        def profiler(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal calls
            if event in ("call", "c_return") and frame.f_code.co_filename == patches.__file__:
                calls += 1
                if calls == interrupted:
                    raise KeyboardInterrupt

        sys.setprofile(profiler)
        try:
            with patched_here(Base, "told", _marking("outer")):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        return calls

    every = calls_of_a_patch(0)
    assert every > 10
    for interrupted in range(1, every + 1):
        calls_of_a_patch(interrupted)
        assert Base.told is genuine, interrupted
        assert before == patches._INSTALLED, interrupted
