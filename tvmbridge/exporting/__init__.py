"""Export a module's forward into a file that runs without PyTorch."""

from __future__ import annotations

from tvmbridge.exporting.api import export
from tvmbridge.exporting.comparing import ExportComparison, compare_export

__all__ = ["ExportComparison", "compare_export", "export"]
