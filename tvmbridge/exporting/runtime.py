"""Import the package ``tvmbridge_runtime``, which is a separate distribution."""

from __future__ import annotations

from typing import Any

from tvmbridge.core.errors import ExportError


def runtime() -> Any:
    """Return the module ``tvmbridge_runtime``.

    Raises:
        ExportError: the package is not installed.
    """
    try:
        import tvmbridge_runtime
    except ImportError as error:
        raise ExportError(
            "tvmbridge_runtime is not installed: pip install tvmbridge-runtime, or "
            "pip install ./runtime in a checkout"
        ) from error
    return tvmbridge_runtime
