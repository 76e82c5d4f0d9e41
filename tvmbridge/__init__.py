"""tvmbridge: run and train PyTorch modules on code compiled by Apache TVM."""

from __future__ import annotations

import gc
import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tvmbridge.core import versions
from tvmbridge.core.logs import set_logs

__version__ = "0.1.0"

__all__ = [
    "BridgeError",
    "BuildError",
    "BundleError",
    "BundleReport",
    "CaptureError",
    "CapturedGraph",
    "ComparisonReport",
    "CompileOptions",
    "CompileReport",
    "Departure",
    "DispatchReport",
    "ExplainReport",
    "ExportComparison",
    "ExportError",
    "FallbackError",
    "FxReport",
    "NumericsError",
    "PassError",
    "RelayText",
    "TuningReport",
    "UnsupportedOperatorError",
    "VersionError",
    "add_tvm_dispatch",
    "capture",
    "compare",
    "compare_export",
    "compile",
    "compile_report",
    "dispatch_report",
    "explain",
    "export",
    "fx_graphs",
    "fx_passes",
    "fx_report",
    "load_compiled",
    "optimize_fx",
    "remove_fx",
    "remove_tvm_dispatch",
    "save_compiled",
    "to_relax",
    "to_relay",
    "tune",
    "visualize",
    "visualize_html",
    "wait",
]

if TYPE_CHECKING:
    from tvmbridge.bundles import load_compiled, save_compiled
    from tvmbridge.cache.bundle import BundleError
    from tvmbridge.cache.exchange import BundleReport
    from tvmbridge.core.captured_graph import CapturedGraph
    from tvmbridge.core.errors import (
        BridgeError,
        BuildError,
        CaptureError,
        ExportError,
        FallbackError,
        NumericsError,
        PassError,
        UnsupportedOperatorError,
        VersionError,
    )
    from tvmbridge.core.options import CompileOptions
    from tvmbridge.dispatch import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch, wait
    from tvmbridge.dynamo import CompileReport, compile, compile_report
    from tvmbridge.exporting import ExportComparison, compare_export, export
    from tvmbridge.frontend import to_relax
    from tvmbridge.fx.api import FxReport, fx_graphs, fx_passes, fx_report, optimize_fx, remove_fx
    from tvmbridge.graph_capture.capture import capture
    from tvmbridge.inspect.compare import ComparisonReport, Departure, compare
    from tvmbridge.inspect.explain import ExplainReport, explain
    from tvmbridge.inspect.page import visualize_html
    from tvmbridge.inspect.visualize import visualize
    from tvmbridge.relay import RelayText, to_relay
    from tvmbridge.report import DispatchReport
    from tvmbridge.tuning import TuningReport, tune

# Each name is imported at its first use, because torch.export imports all of TorchDynamo.
_HOMES = MappingProxyType(
    {
        "bundles": ("load_compiled", "save_compiled"),
        "cache.bundle": ("BundleError",),
        "cache.exchange": ("BundleReport",),
        "core.errors": (
            "BridgeError",
            "BuildError",
            "CaptureError",
            "ExportError",
            "FallbackError",
            "NumericsError",
            "PassError",
            "UnsupportedOperatorError",
            "VersionError",
        ),
        "core.options": ("CompileOptions",),
        "core.captured_graph": ("CapturedGraph",),
        "dispatch": ("add_tvm_dispatch", "dispatch_report", "remove_tvm_dispatch", "wait"),
        "dynamo": ("CompileReport", "compile", "compile_report"),
        "exporting": ("ExportComparison", "compare_export", "export"),
        "frontend": ("to_relax",),
        "fx.api": ("FxReport", "fx_graphs", "fx_passes", "fx_report", "optimize_fx", "remove_fx"),
        "graph_capture.capture": ("capture",),
        "inspect.compare": ("ComparisonReport", "Departure", "compare"),
        "inspect.explain": ("ExplainReport", "explain"),
        "inspect.page": ("visualize_html",),
        "inspect.visualize": ("visualize",),
        "relay": ("RelayText", "to_relay"),
        "report": ("DispatchReport",),
        "tuning": ("TuningReport", "tune"),
    }
)
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

set_logs()

# The doctor must run with versions that crash when they are loaded, to report the problem.
if not versions.running_doctor():
    versions.check_versions()


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imports create a million objects and free few: collections took a quarter of their time.
    collects = gc.isenabled()
    gc.disable()
    try:
        home = importlib.import_module(f"{__name__}.{_HOME_OF[name]}")
    finally:
        if collects:
            gc.enable()
    globals()[name] = value = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
