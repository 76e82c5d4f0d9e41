"""Count the calls of functions that TorchDynamo runs eagerly, past its limit of recompilations.

After ``recompile_limit`` captures of a function, Dynamo runs the calls that none of its graphs
serves in eager PyTorch, and no backend notices. Such calls are failed look-ups of a graph that no
new capture follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvmbridge.core.torch_private import (
    captured_in,
    captures_of_function,
    dynamo_config,
    limits_reached,
    on_capture,
    replace_lookup_hook,
)


@dataclass
class _Watch:
    """What was noted since the first function came near the limit.

    - ``names``: the functions near the limit, or the modules' classes; the value is None.
    - ``missed``: the number of calls that no graph served and no new capture followed.
    - ``refused``: how often Dynamo had refused a capture before.
    """

    refused: int
    names: dict[str, None] = field(default_factory=dict)
    missed: int = 0
    before: Callable[[bool], Any] | None = None
    end: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Have Dynamo report the result of each look-up, and each further capture."""
        self.before = replace_lookup_hook(self._note_lookup)
        self.end = on_capture(self._note_capture)

    def stop(self) -> None:
        """Undo :meth:`begin`; a hook that was set later stays."""
        self.end()
        current = replace_lookup_hook(self.before)
        if current != self._note_lookup:
            replace_lookup_hook(current)

    def _note_lookup(self, found: bool) -> Any:
        result = found if self.before is None else self.before(found)
        if not result:
            self.missed += 1
        return result

    def _note_capture(self, number: int) -> None:
        # Dynamo looks up no graph for the first capture of a function.
        if number > 1:
            self.missed -= 1


_watch: _Watch | None = None


def watch_limit() -> None:
    """Begin to count if the capture that is under way may be the last one of its function."""
    global _watch
    config = dynamo_config()
    limit = min(config.recompile_limit, config.accumulated_recompile_limit)
    if captures_of_function() < limit:
        return
    if _watch is None:
        _watch = _Watch(limits_reached())
        _watch.begin()
    _watch.names[captured_in()] = None


def stop_watching() -> None:
    """Forget all counts."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def past_limit() -> tuple[int, tuple[str, ...]]:
    """Return the number of calls past the limit, and the names of functions that reached it."""
    if _watch is None or limits_reached() == _watch.refused:
        return 0, ()
    return max(_watch.missed, 0), tuple(_watch.names)
