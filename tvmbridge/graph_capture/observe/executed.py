"""Executed: report the user's functions that run while forward is observed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.callers import calling_python_module
from tvmbridge.calls.custom_functions import custom_functions_told
from tvmbridge.calls.own_calls import OwnCalls, is_question
from tvmbridge.core.libraries import KEEPS_BOOKS
from tvmbridge.core.torch_private import (
    METADATA_OF_FAKES,
    FakeTensor,
    TorchDispatchMode,
    call_in_transform,
    dispatch_modes,
)
from tvmbridge.graph_capture.dependence import DependenceError
from tvmbridge.graph_capture.observe.names import Names, names_of

# Functions of these packages need no guards: the settings that they read are watched elsewhere,
# and their other globals do not change results.
_LIBRARIES = frozenset({"functorch", "mpmath", "numpy", "sympy", "torch", "torchgen", "triton"})
_LIBRARIES |= {"tqdm", "tvm", "tvmbridge", "typing_extensions"}
# Python modules that look at files for their caller.
_OF_FILES = frozenset({"codecs", "configparser", "csv", "fileinput", "fnmatch", "genericpath"})
_OF_FILES |= {"glob", "gzip", "json", "mmap", "numpy", "os", "pathlib", "posixpath", "shutil"}
_OF_FILES |= {"tarfile", "tomllib", "zipfile"}
_DEVICE = torch.ops.prim.device.default
_IMPORTING = "<frozen importlib._bootstrap>"
_PRINTS = (
    "prints, which compiled code does not do: it runs in parts with on_break='eager'; print "
    "outside of forward to have it compiled whole"
)
_OF_FILTERS = frozenset(
    function.__code__
    for function in (warnings.filterwarnings, warnings.resetwarnings, warnings.simplefilter)
)
# A function transform calls custom autograd functions by this function of PyTorch.
_IN_TRANSFORM = call_in_transform.__code__


@dataclass(frozen=True)
class Executed:
    """A function of the user's that ran.

    - ``code``: its code object.
    - ``globals``: the globals of its Python module.
    - ``free``: the values of its free variables, by name.
    - ``cells``: the cells of these variables; None if the function object is unknown.
    - ``of_module``: whether its ``self`` was a module when it ran; None: it is not known.
    """

    code: CodeType
    globals: dict[str, Any] = field(repr=False)
    free: Mapping[str, Any]
    cells: Mapping[str, CellType] | None = field(default=None, repr=False)
    of_module: bool | None = None

    @property
    def names(self) -> Names:
        """The names that its code uses."""
        return names_of(self.code)


@contextmanager
def executed_functions(
    note: Callable[[Executed], None], own: OwnCalls, applied: Callable[[type], None]
) -> Iterator[None]:
    """Call ``note`` with each user's function that runs in this thread, before its first run.

    Functions of PyTorch, Python's standard library and the bridge are left out; ``own`` is notified
    of them and of builtin functions. Functions and questions during an import are left out as well,
    because they do not run again. An active profiler is suspended inside this context. Call
    ``applied`` with each custom autograd function that is applied.

    Raises:
        DependenceError: user code calls ``print``.
    """
    known: dict[tuple[int, ...], CodeType] = {}
    of_libraries: dict[int, CodeType] = {}
    before = _imports_under_way(sys._getframe())

    def called(frame: FrameType, event: str, argument: object) -> None:
        # Half of the events are returns, and nearly all calls are of libraries.
        if event == "c_call":
            own.note_builtin(argument)
            asked = is_question(argument) and _is_asked_by_user(frame)
            if asked and _imports_under_way(frame) == before:
                own.note_question(argument)
                if argument is print:
                    raise DependenceError(_PRINTS)
            return
        if event != "call":
            return
        code = frame.f_code
        if id(code) in of_libraries:
            return
        if code is _IN_TRANSFORM:
            applied(frame.f_locals["autograd_function"])
            return
        if is_library(frame.f_globals.get("__name__")) or code.co_filename.startswith("<frozen"):
            if code in _OF_FILTERS:  # Later calls may be forward's, if this one is an import's.
                own.sets_filters |= _imports_under_way(frame) == before
                return
            of_libraries[id(code)] = code
            own.note_library(frame)
            return
        values = frame.f_locals if code.co_freevars else {}
        free = {name: values[name] for name in code.co_freevars if name in values}
        key = (id(code), *map(id, free.values()))
        if key not in known and _imports_under_way(frame) == before:
            known[key] = code
            of_module = isinstance(frame.f_locals.get("self"), nn.Module)
            note(Executed(code, frame.f_globals, free, of_module=of_module))

    with custom_functions_told(applied), _profiled(called), _Unprofiled(called):
        yield


def codes_within(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects of the functions that are defined within a function."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_within(constant)


class _Unprofiled(TorchDispatchMode):
    """Suspend a profiler while PyTorch runs an operator of its own, which takes most of the time.

    No function of the user's runs then, unless a mode or a tensor has a class of the user's.

    Args:
        called: the profiler; another one that forward has set stays.
    """

    def __init__(self, called: Callable[[FrameType, str, object], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called = called
        self._alone = all(is_library(type(mode).__module__) for mode in dispatch_modes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # More than half of the operators ask for the device of a fake tensor.
        if self._alone and func is _DEVICE and type(args[0]) is FakeTensor:
            return METADATA_OF_FAKES[func](args)
        kwargs = kwargs or {}
        own = self._alone and func.namespace == "aten" and all(t is FakeTensor for t in types)
        if not own or sys.getprofile() is not self._called:
            return func(*args, **kwargs)
        sys.setprofile(None)
        try:
            return func(*args, **kwargs)
        finally:
            sys.setprofile(self._called)


def _is_asked_by_user(frame: FrameType | None) -> bool:
    """Whether user code runs in ``frame``, or called the functions for files that run there."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in _OF_FILES and name != "torch.serialization":
            return not is_library(name)
        frame = frame.f_back
    return False


def _imports_under_way(frame: FrameType | None) -> int:
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == _IMPORTING
        frame = frame.f_back
    return count


def is_called_by_library(depth: int, passing: str = "") -> bool:
    """Whether a library's function is ``depth`` calls up, without those named ``passing``."""
    caller = calling_python_module(depth + 1, passing)
    return caller is None or is_library(caller)


def is_library(name: Any) -> bool:
    """Whether ``name`` is a Python module of a library, whose functions need no guards."""
    top = str(name).partition(".")[0]
    if top in _LIBRARIES or top in sys.stdlib_module_names:
        return True
    # The constructor of a named tuple, which collections.namedtuple generates.
    if top.startswith("namedtuple_"):
        return True
    return str(name).startswith(KEEPS_BOOKS)


@contextmanager
def _profiled(function: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    """Make ``function`` the profiler of this thread; suspend an active profiler until the exit."""
    before: Any = sys.getprofile()
    if hasattr(before, "disable"):  # cProfile's profiler is an object, not a function.
        before.disable()
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(before if callable(before) else None)
        if hasattr(before, "enable"):
            before.enable()
