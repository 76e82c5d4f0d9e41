"""tvmbridge: run and train PyTorch modules on code compiled by Apache TVM."""

from tvmbridge.core import versions

__version__ = "0.1.0"

__all__ = [
    "BridgeError",
    "BuildError",
    "CaptureError",
    "CapturedGraph",
    "ComparisonReport",
    "CompileOptions",
    "Departure",
    "DispatchReport",
    "ExplainReport",
    "NumericsError",
    "PassError",
    "TuningReport",
    "UnsupportedOperatorError",
    "VersionError",
    "add_tvm_dispatch",
    "capture",
    "compare",
    "dispatch_report",
    "explain",
    "remove_tvm_dispatch",
    "to_relax",
    "tune",
    "visualize",
]

# The doctor must be able to say what is wrong with versions that crash when they are loaded.
if not versions.running_doctor():
    versions.check_versions()
    from tvmbridge.core.errors import (
        BridgeError,
        BuildError,
        CaptureError,
        NumericsError,
        PassError,
        UnsupportedOperatorError,
        VersionError,
    )
    from tvmbridge.core.options import CompileOptions
    from tvmbridge.core.types import CapturedGraph
    from tvmbridge.dispatch import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch
    from tvmbridge.frontend import to_relax
    from tvmbridge.graph_capture.capture import capture
    from tvmbridge.inspect import (
        ComparisonReport,
        Departure,
        ExplainReport,
        compare,
        explain,
        visualize,
    )
    from tvmbridge.report import DispatchReport
    from tvmbridge.tuning import TuningReport, tune
