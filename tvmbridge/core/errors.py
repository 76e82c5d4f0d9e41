"""The errors of tvmbridge, one class for each stage that can refuse.

All of them are :class:`BridgeError`, so ``except BridgeError`` catches whatever the toolkit refuses
and nothing else. When one is raised, the module that was to be dispatched is as it was before the
call.
"""


class BridgeError(RuntimeError):
    """Base of every error that tvmbridge raises on purpose.

    Raised itself when none of the narrower classes fits: the argument is not a module, backward is
    called twice without ``retain_graph``, a gradient of a gradient is asked for.
    """


class CaptureError(BridgeError):
    """The module cannot be captured as a graph.

    Raised when the module's own forward refuses the sample, or when ``torch.export`` refuses the
    module, as it does for control flow that depends on data; the message names the line.
    """


class NotApartError(CaptureError):
    """A module that cannot be traced by a stand-in, but only itself."""


class UnsupportedOperatorError(BridgeError):
    """The graph holds operators that cannot be compiled, or not be differentiated.

    Raised once for a whole graph, with all the operators listed by name.
    """


class DataDependentError(CaptureError, UnsupportedOperatorError):
    """A size or a decision of forward depends on the values of tensors.

    Raised where a mask, ``nonzero`` or ``item()`` decides what forward does next, so that no one
    graph has all of it. ``add_tvm_dispatch`` compiles such a module in parts.
    """


class PassError(BridgeError):
    """A graph pass failed or broke its promise.

    Raised when a pass stops with an error, or when the module that it returns is not well-formed;
    the message names the pass.
    """


class BuildError(BridgeError):
    """TVM cannot build the graph for the target.

    Raised when the target is unknown, when this TVM has no code generator for it, and when its
    compiler stops with an error.
    """


class ExportError(BridgeError):
    """The module cannot run without PyTorch, so that it cannot be exported.

    Raised once for a whole module, with all operators and effects that need PyTorch, and the lines
    of the model that they come from.
    """


class NumericsError(BridgeError):
    """Two computations that must agree do not.

    Raised by the comparisons with PyTorch when a difference is larger than rounding explains; the
    message names the tensor and the size of the difference.
    """


class FallbackError(BridgeError):
    """A call that compiled code does not serve, where the module's own forward must not run.

    Raised by calls of a module that was dispatched with ``on_fallback="raise"``; the message names
    the reason, and what to do.
    """


class PipelineError(BridgeError):
    """A pipeline over several devices cannot be built, or a step of it failed.

    Every rank raises it; the message names the stage and the rank that are at fault, where that is
    known. After a failed step the pipeline is of no further use, and no parameter was changed.
    """


class CommunicationError(BridgeError):
    """A collective failed.

    Raised where a rank has ended in the middle of a step; the message names it.
    """


class VersionError(BridgeError, ImportError):
    """The installed packages are not the ones that tvmbridge is pinned to.

    Raised by importing tvmbridge when apache-tvm or apache-tvm-ffi is missing or is not the pinned
    version, or when torch is too old; the message names the pin and the command that installs it.
    """


# What to do about a module that compiled code cannot serve, by the door that it came in by.
LEAVE_TO_EAGER = (
    "leave the module to eager PyTorch: remove_tvm_dispatch(module) after add_tvm_dispatch, "
    "torch.compiler.disable(module) under torch.compile"
)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none, as a bare ``assert``."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
