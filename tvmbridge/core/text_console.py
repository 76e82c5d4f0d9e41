"""Write tables of rich as plain text."""

from __future__ import annotations

import io
from typing import Any


def text_console(width: int = 110) -> Any:
    """Return a rich console that keeps plain text; ``console.file.getvalue()`` returns it."""
    from rich.console import Console

    plain: dict[str, Any] = {"force_terminal": False, "force_jupyter": False, "highlight": False}
    return Console(file=io.StringIO(), width=width, **plain)
