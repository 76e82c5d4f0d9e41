"""``TVMBRIDGE_LOGS`` turns on logging by topic, as ``TORCH_LOGS`` does for PyTorch."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

VARIABLE = "TVMBRIDGE_LOGS"

# Topic -> names of its loggers below ``tvmbridge``.
TOPICS: Mapping[str, tuple[str, ...]] = {
    "all": ("",),
    "cache": ("cache", "compiler.cached_build"),
    "compile": (
        "compiler.partial_backwards",
        "graph_capture",
        "pipeline",
        "runtime.any_size",
        "runtime.background",
        "runtime.entry_compiler",
        "runtime.family",
        "runtime.module_code",
    ),
    "fallbacks": ("runtime.fallbacks",),
    "guards": ("runtime.guards",),
    "tuning": ("records", "tuning"),
}
_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}


def set_logs(text: str | None = None) -> None:
    """Log the topics that ``text`` lists to standard error.

    Args:
        text: topics, separated by commas. ``compile`` logs the topic at level INFO, ``+compile`` at
            DEBUG, ``-compile`` at ERROR. None: use ``TVMBRIDGE_LOGS``. Without any topic, logging
            is not changed.

    Raises:
        ValueError: there is no such topic.
    """
    given = os.environ.get(VARIABLE, "") if text is None else text
    words = [word.strip() for word in given.split(",") if word.strip()]
    unknown = [word for word in words if word.lstrip("+-") not in TOPICS]
    if unknown:
        raise ValueError(
            f"{VARIABLE}: there is no topic {', '.join(unknown)}; the topics are "
            f"{', '.join(TOPICS)}, as in {VARIABLE}=+compile,cache"
        )
    for word in words:
        for name in TOPICS[word.lstrip("+-")]:
            logging.getLogger(f"tvmbridge.{name}".rstrip(".")).setLevel(
                _LEVELS.get(word[0], logging.INFO)
            )
    if words:
        _write_to_standard_error(logging.getLogger("tvmbridge"))


def _write_to_standard_error(logger: logging.Logger) -> None:
    """Add a handler for standard error to ``logger``, unless the program has set up logging."""
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(levelname).1s %(asctime)s %(name)s: %(message)s", "%H:%M:%S")
    )
    logger.addHandler(handler)
