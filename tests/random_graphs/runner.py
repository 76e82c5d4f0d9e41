"""Draw programs from a seed, and check them in worker processes that may crash."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.conformance.runner import Worker, WorkerDied
from tests.processes import in_threads
from tests.random_graphs.check import is_valid
from tests.random_graphs.modules import modules
from tests.random_graphs.outcome import Outcome
from tests.random_graphs.program import Program
from tests.random_graphs.strategy import programs

# A worker is replaced after this many programs, because compilers leak memory.
PROGRAMS_OF_A_WORKER = 60


KINDS = {"functions": programs, "modules": modules}


def drawn(number: int, seed_number: int, kind: str = "functions") -> Program:
    """Draw the program of a number, a seed and one of ``KINDS``.

    Each program is drawn in a hypothesis run of its own, because within a run hypothesis varies
    earlier programs. Programs that eager PyTorch rejects, mostly because a value that backward
    needs was written, are filtered out.
    """
    found: list[Program] = []

    @seed(seed_number * 1_000_003 + number)
    @settings(
        max_examples=2,  # The first example is always the simplest program.
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(KINDS[kind]().filter(is_valid))
    def collect(program: Program) -> None:
        found.append(program)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return found[-1]


def run_programs(
    chosen: Iterable[tuple[int, Program]],
    record: Callable[[int, Outcome, Program], None],
    *,
    workers: int = 1,
    timeout: float = 120.0,
) -> None:
    """Check numbered programs.

    Args:
        chosen: numbers and programs; an iterator may draw a program when it is asked for one.
        record: gets number, outcome and program, reduced if it failed; called from one thread at
            a time.
        workers: the number of worker processes.
        timeout: seconds for one program.
    """
    lock = threading.Lock()

    def serve(taken: Iterator[tuple[int, Program]]) -> None:
        served = Served(timeout)
        try:
            for number, program in taken:
                outcome = served.outcome(program)
                if outcome.result in ("wrong", "error") or "BuildError" in outcome.reason:
                    program = served.reduced(program)
                with lock:
                    record(number, outcome, program)
        finally:
            served.worker.close()

    in_threads(chosen, serve, workers)


class Served:
    """A worker process that is replaced if it dies, and after many programs."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.worker = Worker("tests.random_graphs.worker")
        self._count = 0

    def _renew(self) -> None:
        self.worker.close()
        self.worker, self._count = Worker("tests.random_graphs.worker"), 0

    def outcome(self, program: Program) -> Outcome:
        """Check a program, and return its outcome: *crash* or *timeout* if the worker died."""
        if self._count >= PROGRAMS_OF_A_WORKER:
            self._renew()
        self._count += 1
        task = {"program": program.to_json(), "reduce": False}
        try:
            (answer,) = self.worker.run(task, self.timeout)
            return Outcome(**answer["outcome"])
        except WorkerDied as death:
            self._renew()
            return Outcome(death.result, str(death))

    def reduced(self, program: Program) -> Program:
        """Return a smaller program that fails too, or the same one if reducing takes too long."""
        task = {"program": program.to_json(), "reduce": True}
        try:
            (answer,) = self.worker.run(task, 5 * self.timeout)
            return Program.from_json(answer["reduced"])
        except WorkerDied:
            self._renew()
            return program
