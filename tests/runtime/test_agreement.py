"""Ranks that compile together: choices and code come from rank 0, and all ranks decide alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tvmbridge import CompileOptions
from tvmbridge.cache import CacheKey, Kept
from tvmbridge.cache.store import formatted
from tvmbridge.core.errors import BuildError
from tvmbridge.kernels.table import answered_by, choice
from tvmbridge.runtime import agreement
from tvmbridge.runtime.agreement import Event, ranks_now

pytestmark = pytest.mark.filterwarnings("ignore")
KEY = CacheKey({"graph": "1"})
KEPT = Kept({"library": "x"}, b"code" * 2**20)


def run_in_threads(*bodies: Callable[[Event], Any]) -> list[Any]:
    """Run each body as a rank, in a thread of its own; return the results and errors."""
    store, found = dist.HashStore(), [None] * len(bodies)

    def run(rank: int, body: Callable[[Event], Any]) -> None:
        event = Event(store, rank, len(bodies), "a module")
        # In threads of one process, the hooks of the compiler are shared.
        try:
            found[rank] = event.run(lambda: body(event))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return found


def refuse(*_: Any) -> Any:
    raise BuildError("a planted refusal")


def test_rank_0_chooses_and_compiles() -> None:
    def first(event: Event) -> str:
        chosen = event.answer("fast?", (), lambda: "yes")
        event.give(KEY, KEPT)
        return chosen

    def second(event: Event) -> str:
        assert event.received(KEY.digest) == KEPT
        return event.answer("fast?", (), refuse)

    assert run_in_threads(first, second, second) == ["yes", "yes", "yes"]


def test_what_rank_0_does_not_have_is_made_by_the_others() -> None:
    def second(event: Event) -> str:
        assert event.received(KEY.digest) is None
        return event.answer("fast?", (), lambda: "no")

    assert run_in_threads(lambda _: "first", second) == ["first", "no"]


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_no_rank_runs_code_if_one_is_refused(refused: int) -> None:
    bodies: list[Callable[[Event], Any]] = [lambda event: event.rank] * 3
    bodies[refused] = refuse
    for rank, found in enumerate(run_in_threads(*bodies)):
        assert isinstance(found, BuildError)
        message = "a planted refusal"
        if rank != refused:
            message = f"rank {refused} has no compiled code, and all ranks decide alike: {message}"
        assert str(found) == message


def test_a_rank_that_does_not_come_is_waited_for_in_vain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agreement, "JOIN_SECONDS", 0.1)
    monkeypatch.setattr(agreement, "_LOG_SECONDS", 0.03)
    for rank in (0, 1):
        event = Event(dist.HashStore(), rank, 2, "a module")
        assert event.run(lambda e=event: e.answer("fast?", (), lambda: "here")) == "here"
        assert f"the ranks {1 - rank} do not compile it" in caplog.text
    assert "waiting for rank 1 for 0 s, which has not reached it" in caplog.text


def test_a_rank_that_is_killed_while_it_compiles_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agreement, "LOST_SECONDS", 0.3)
    store = dist.HashStore()
    store.add("begun/0", 1)
    event = Event(store, 1, 2, "a module")
    start = time.monotonic()
    for question in ("fast?", "faster?", "fastest?"):
        assert event.answer(question, (), lambda: "here") == "here"
    assert time.monotonic() - start < 0.6
    event.run(lambda: None)
    assert "the ranks 0 do not compile it" in caplog.text


def test_a_rank_that_gives_signs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LOST_SECONDS", 0.5)
    monkeypatch.setattr(agreement, "_SIGN_SECONDS", 0.05)

    def slow(event: Event) -> str:
        time.sleep(1.5)
        return event.answer("fast?", (), lambda: "yes")

    assert run_in_threads(slow, lambda event: event.answer("fast?", (), refuse)) == ["yes", "yes"]


def test_without_a_group_there_is_one_rank() -> None:
    assert ranks_now() == 1


def test_compilations_in_the_background_are_not_decided_together() -> None:
    with pytest.raises(ValueError, match="compiler_collectives needs background=False"):
        CompileOptions(compiler_collectives=True, background=True)


@pytest.mark.parametrize("damage", ["count", "huge", "bytes", "missing", "content", "key"])
def test_damaged_code_of_rank_0_is_compiled_again(damage: str) -> None:
    content = formatted(CacheKey({"graph": "2"}) if damage == "key" else KEY, KEPT)

    def first(event: Event) -> None:
        name = f"code/{KEY.digest}"
        values = {"count": b"-1", "huge": b"9" * 12, "bytes": b"\xff\xfe"}
        if damage != "missing":
            event.store.set(f"{name}/0", content[:-9] if damage == "content" else content)
        event.store.set(name, values.get(damage, b"1"))

    def second(event: Event) -> str:
        assert event.received(KEY.digest) is None
        return "compiled"

    assert run_in_threads(first, second) == [None, "compiled"]


def test_an_answer_that_is_no_text_is_none_of_the_possible_ones() -> None:
    class Damaging:
        def __init__(self, store: Any) -> None:
            self.store = store

        def set(self, key: str, _: bytes) -> None:
            self.store.set(key, b"\xff")

    def first(event: Event) -> None:
        store, event.store = event.store, Damaging(event.store)
        event.answer("fast?", (), lambda: "yes")
        event.store = store

    def second(event: Event) -> str:
        return event.answer("fast?", (), refuse)

    assert run_in_threads(first, second) == [None, "\N{REPLACEMENT CHARACTER}"]


class EndedStore:
    """A store whose process has ended: each request fails."""

    def __getattr__(self, name: str) -> Any:
        def fails(*_: Any) -> Any:
            raise dist.DistNetworkError("broken pipe")

        return fails


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_decides_alone_if_the_store_fails(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    def body(event: Event) -> str:
        assert event.received(KEY.digest) is None
        event.give(KEY, KEPT)
        return event.answer("fast?", (), lambda: "here")

    event = Event(EndedStore(), rank, 2, "a module")
    assert event.run(lambda: body(event)) == "here"
    assert caplog.text.count("the store of the process group fails") == 1
    with pytest.raises(BuildError, match="a planted refusal"):
        Event(EndedStore(), rank, 2, "a module").run(refuse)


def test_only_the_thread_that_compiles_gets_agreed_answers() -> None:
    found = []

    def other() -> None:
        found.append(choice("of another thread", ("a", "b"), lambda: "a"))

    with answered_by(lambda *_: "b"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert choice("of this thread", ("a", "b"), refuse) == "b"
    assert found == ["a"]
