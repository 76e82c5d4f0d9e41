"""The processes of the other ranks, to report which of them ended when a collective fails."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tvmbridge.core.errors import CommunicationError
from tvmbridge.core.torch_private import default_store

# Host name and process id, by rank.
_peers: list[tuple[str, int]] = []
# Seconds to wait until a process that closed its connections is seen to have ended.
_GRACE = 3.0
_KEY = "tvmbridge/lost/{}"


def exchange(value: Any) -> list[Any]:
    """Gather ``value`` from each rank of the default group, and remember the ranks' processes.

    Returns:
        The values by rank; a list of one value if there is no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    given = (socket.gethostname(), os.getpid(), value)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, given)
    _peers[:] = [(host, process) for host, process, _ in found]
    return [each for _, _, each in found]


def lost(error: BaseException) -> CommunicationError:
    """Return the error to raise after a collective failed: it names the ranks that have ended."""
    end = time.monotonic() + _GRACE
    ended = _first(ended_ranks(_peers))
    while not ended and _peers and time.monotonic() < end:
        time.sleep(0.05)
        ended = _first(ended_ranks(_peers))
    if ended:
        _announce(ended)
        names = ", ".join(map(str, ended))
        who = f"rank {names} has ended" if len(ended) == 1 else f"ranks {names} have ended"
    else:
        elsewhere = [r for r, (host, _) in enumerate(_peers) if host != socket.gethostname()]
        who = "all processes of this host run"
        who += f"; of ranks {elsewhere} nothing is known here" if elsewhere else ""
    return CommunicationError(f"a collective failed: {who} ({error})")


def _announce(ended: Sequence[int]) -> None:
    """Record for the other ranks which ranks ended first.

    Otherwise the others would take this rank, which ends next, for a cause.
    """
    try:
        default_store().set(_KEY.format(dist.get_rank()), " ".join(map(str, ended)))
    except Exception:
        return  # The store ended with its rank, so nothing can be recorded.


def _first(ended: list[int]) -> list[int]:
    """Return the ranks that ended first.

    Return those of ``ended`` that named no other rank; if each named one, the ranks named.
    """
    named: set[int] = set()
    own: list[int] = []
    for rank in ended:
        try:
            store, key = default_store(), _KEY.format(rank)
            told = store.get(key).decode() if store.check([key]) else ""
        except Exception:
            told = ""
        named |= set(map(int, told.split()))
        if not told:
            own.append(rank)
    return own or sorted(named)


def ended_ranks(peers: Sequence[tuple[str, int]]) -> list[int]:
    """Return the ranks of this host whose processes have ended.

    ``peers`` has the host name and process id of each rank.
    """
    host = socket.gethostname()
    return [r for r, (where, process) in enumerate(peers) if where == host and not _runs(process)]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2]
    except OSError:
        return Path("/proc/self").exists() is False
    return state.split()[0] not in ("Z", "X")
