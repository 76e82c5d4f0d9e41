"""The errors of tvmbridge, one class for each stage that can fail.

All are subclasses of :class:`BridgeError`, so ``except BridgeError`` catches every error that
tvmbridge raises on purpose, and nothing else. When ``add_tvm_dispatch`` raises one, the module is
unchanged.
"""

from __future__ import annotations

from typing import Any


class BridgeError(RuntimeError):
    """Base class of every error that tvmbridge raises on purpose.

    It is raised itself if no subclass fits: the argument is not a module, backward is called twice
    without ``retain_graph``, or a second derivative is requested.
    """


class CaptureError(BridgeError):
    """The module cannot be captured as a graph.

    Raised if forward fails on the sample inputs, or if ``torch.export`` cannot export the module,
    for example because its control flow depends on data. The message names the line.
    """


class NotApartError(CaptureError):
    """The module cannot be traced on a copy, only on the module itself."""


class NumberReadError(CaptureError):
    """Forward needs the value of a Python number that was to be an input of compiled code.

    - ``leaves``: the arguments that the number is or is computed from, as leaf positions.
    - ``attributes``: the places in modules that it is or is computed from, as (submodule's name,
      attribute's name, steps into a container ...).
    """

    def __init__(
        self,
        message: str,
        leaves: frozenset[int] = frozenset(),
        attributes: frozenset[tuple[Any, ...]] = frozenset(),
    ) -> None:
        super().__init__(message)
        self.leaves = leaves
        self.attributes = attributes


class StateWrittenError(CaptureError):
    """Forward reads attributes of the module and writes them, so that calls depend on the last one.

    - ``attributes``: these attributes, as (submodule's name, attribute's name); empty: the state is
      outside of the module.
    """

    def __init__(self, message: str, attributes: frozenset[tuple[Any, ...]] = frozenset()) -> None:
        super().__init__(message)
        self.attributes = attributes


class UnsupportedOperatorError(BridgeError):
    """The graph contains operators that cannot be compiled or differentiated.

    Raised once for a whole graph; the message lists all such operators by name.
    """


class DataDependentError(CaptureError, UnsupportedOperatorError):
    """A size or a decision of forward depends on the values of tensors.

    Raised if a mask, ``nonzero`` or ``item()`` decides what forward does next, so that one graph
    cannot represent all of forward, and if forward makes a sparse tensor. ``add_tvm_dispatch``
    compiles such a module in parts.
    """


class PassError(BridgeError):
    """A graph pass failed.

    Raised if a pass raises an error, or returns a module that is not well-formed. The message names
    the pass.
    """


class BuildError(BridgeError):
    """TVM cannot build the graph for the target.

    Raised if the target is unknown, if this build of TVM has no code generator for it, or if TVM's
    compiler fails.
    """


class ExportError(BridgeError):
    """The module cannot be exported, because it cannot run without PyTorch.

    Raised once for a whole module. The message lists all operators and effects that need PyTorch,
    and the lines of the model that they come from.
    """


class NumericsError(BridgeError):
    """Two computations that must agree differ.

    Raised by comparisons with PyTorch if a difference is larger than rounding explains. The message
    names the tensor and the size of the difference.
    """


class FallbackError(BridgeError):
    """Compiled code cannot serve a call, and the module's own forward is not allowed to.

    Raised by calls of a module that was dispatched with ``on_fallback="raise"``. The message names
    the reason, and says what to do.
    """


class PipelineError(BridgeError):
    """A pipeline over several devices cannot be built, or one of its steps failed.

    Every rank raises it. The message names the stage and the rank that caused it, if known. After
    a failed step no parameter has changed, and the pipeline cannot be used any more.
    """


class CommunicationError(BridgeError):
    """A collective failed.

    Raised if a rank has ended in the middle of a step; the message names the rank.
    """


class VersionError(BridgeError, ImportError):
    """The installed packages do not have the versions that tvmbridge requires.

    Raised when tvmbridge is imported, if apache-tvm or apache-tvm-ffi is missing or has another
    version than the pinned one, or if torch is too old. The message names the required versions and
    the command that installs them.
    """


# Advice about a module that compiled code cannot serve, for each entry point.
LEAVE_TO_EAGER = (
    "leave the module to eager PyTorch: remove_tvm_dispatch(module) after add_tvm_dispatch, "
    "torch.compiler.disable(module) under torch.compile"
)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if the text is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
