"""The table of choices on disk: the fastest candidate for each question on this machine.

A choice is measured once and then holds in every process. Code in the cache depends on choices, and
two runs should not differ because the machine was busy during one of them. The table is JSON in the
cache folder, with one file for each processor, build of PyTorch and setting of its libraries. With
``TVMBRIDGE_CACHE=0`` each process has its own table in memory. A file that is damaged, or that
somebody else may have written, is logged once and not used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path

import torch

from tvmbridge.core.kernel_settings import kernel_settings
from tvmbridge.core.locks import Lock
from tvmbridge.core.machine import cache_folder, caching_is_off, cpu_model, threads
from tvmbridge.core.own_files import UntrustedFileError, distrust, read_own, replace_file
from tvmbridge.core.plain_json import parse_json
from tvmbridge.core.set_within import set_within

logger = logging.getLogger(__name__)

_VERSION = 1
MOST_BYTES = 16 * 2**20
_MOST_VALUES = 2**20
_PREFIXES = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_")
PATTERN = "choices-*.json"


class Table:
    """The choices of one file, with the answer to each question.

    - ``path``: the file; None: the choices are in the memory of this process alone.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = Lock(reentrant=True)
        self._known: dict[str, str] | None = None

    def choice(self, question: str, among: Sequence[str], measure: Callable[[], str]) -> str:
        """Return the known answer to ``question``, or else store and return ``measure()``.

        A known answer that is not in ``among`` is ignored.
        """
        with self._lock:
            if self._known is None:
                self._known = self._read()
            found = self._known.get(question)
            if found is not None and found in among:
                return found
            found = measure()
            # An answer that another process stored during the measurement takes precedence.
            on_disk = self._read()
            if on_disk.get(question) in among:
                found = on_disk[question]
            self._known = {**self._known, **on_disk, question: found}
            self._write(self._known)
            return found

    def adopt(self, choices: dict[str, str]) -> None:
        """Add choices of an equal machine; answers that are known here stay."""
        with self._lock:
            known = {**choices, **(self._known or {}), **self._read()}
            self._known = known
            self._write(known)

    def known(self, question: str) -> str | None:
        """Return the stored answer to ``question``; None if there is none."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return self._known.get(question)

    def keep(self, question: str, answer: str) -> None:
        """Store ``answer`` in place of any known answer."""
        with self._lock:
            self._known = {**(self._known or {}), **self._read(), question: answer}
            self._write(self._known)

    def _read(self) -> dict[str, str]:
        if self.path is None:
            return {}
        try:
            reason = distrust(self.path.parent.stat())
            if reason is not None:
                raise UntrustedFileError(f"{self.path.parent} {reason}")
            return _parsed(read_own(self.path, MOST_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, *_DAMAGED) as error:
            logger.warning("choices in %s are not used: %s", self.path, error)
            self.path = None
            return {}

    def _write(self, choices: dict[str, str]) -> None:
        if self.path is None:
            return
        content = {"version": _VERSION, "choices": dict(sorted(choices.items()))}
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.path, json.dumps(content, indent=1).encode())
        except OSError as error:
            logger.warning("choices cannot be kept in %s: %s", self.path, error)
            self.path = None


_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _parsed(content: bytes) -> dict[str, str]:
    """Parse the content of a file; return no choices if it is of another version."""
    found = parse_json(content, _MOST_VALUES)
    if found["version"] != _VERSION:
        return {}
    return {str(k): str(v) for k, v in dict(found["choices"]).items()}


def adopt_choices(path: Path, content: bytes) -> str | None:
    """Add measured choices of kernels to the table in the file ``path``.

    ``content`` is the content of another machine's table. Return why it was not added, or None.
    """
    try:
        choices = _parsed(content)
    except _DAMAGED as error:
        return f"they are damaged: {type(error).__name__}"
    table = _tables.setdefault(path, Table(path))
    table.adopt(choices)
    return None if table.path is not None else "they cannot be kept"


_tables: dict[Path | None, Table] = {}
# Answers questions by measurement in another process, if set.
_elsewhere: Callable[[str, Sequence[str], Callable[[], str]], str] | None = None


def ask_elsewhere(ask: Callable[[str, Sequence[str], Callable[[], str]], str]) -> None:
    """Make :func:`choice` call ``ask`` in place of ``measure``: another process then measures."""
    global _elsewhere
    _elsewhere = ask


# Gives the answers on which several processes agree; the third argument decides here. Of the
# thread that compiles alone: another one may compile what other processes do not.
_agreed: ContextVar[Callable[[str, Sequence[str], Callable[[], str]], str] | None] = ContextVar(
    "agreed", default=None
)


def answered_by(
    ask: Callable[[str, Sequence[str], Callable[[], str]], str],
) -> AbstractContextManager[object]:
    """Make :func:`choice` return the answers of ``ask`` within this context.

    Args:
        ask: called with the question, the possible answers, and a function that decides here.
    """
    return set_within(_agreed, ask)


def choice(question: str, among: Sequence[str], measure: Callable[[], str]) -> str:
    """Return the answer to ``question`` on this machine, measured unless it is known.

    Args:
        question: a text that describes the choice. PyTorch's number of threads is added to it.
        measure: returns the answer. It can be pickled, because another process may call it.
    """
    if _elsewhere is not None:
        measure = functools.partial(_elsewhere, question, among, measure)
    asked, table = _on_threads(question), _table_of_now()
    decide = functools.partial(table.choice, asked, among, measure)
    agreed = _agreed.get()
    if agreed is None:
        return decide()
    found = agreed(asked, among, decide)
    if found not in among:
        return decide()
    if table.known(asked) != found:
        table.keep(asked, found)
    return found


def known_answer(question: str) -> str | None:
    """Return the answer that :func:`keep_answer` stored on this machine; None if there is none."""
    return _table_of_now().known(_on_threads(question))


def keep_answer(question: str, answer: str) -> None:
    """Store ``answer``, measured during calls, for this machine and PyTorch's thread count."""
    _table_of_now().keep(_on_threads(question), answer)


def _table_of_now() -> Table:
    path = None if caching_is_off() else cache_folder() / f"choices-{surroundings()}.json"
    return _tables.setdefault(path, Table(path))


def _on_threads(question: str) -> str:
    return f"{question}, {threads()} threads"


def clear_tables(folder: Path) -> int:
    """Remove the tables in ``folder`` and in memory; return how many files were removed."""
    _tables.clear()
    count = 0
    for path in folder.glob(PATTERN) if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            count += 1
    return count


def surroundings() -> str:
    """Return a digest of the machine, PyTorch build and settings that choices depend on."""
    variables = sorted((n, v) for n, v in os.environ.items() if n.upper().startswith(_PREFIXES))
    backends = torch.backends
    what = (
        cpu_model(),
        backends.cpu.get_cpu_capability(),
        torch.__version__,
        str(torch.version.git_version),
        backends.mkldnn.is_available(),
        backends.mkl.is_available(),
        kernel_settings(),
        variables,
    )
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]
