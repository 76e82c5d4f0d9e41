"""A plugin for all tests: seeds, checks of global state, and a check around every Relax pass.

Each pass must get a well-formed module, return a well-formed module, and not change the module
that it got. The runner in ``tvmbridge.pipeline`` checks TVM's own passes. Well-formedness is
checked in tests of passes, of whole models and of random programs; everywhere else the check would
take a thirtieth of each compilation.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import inspect
import linecache
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import tvm
from torch import nn
from torch._subclasses import fake_tensor
from tvm import relax
from tvm.relax.script.parser import entry as relax_parser
from tvm.script.parser.ir import entry as module_parser

import tvmbridge.passes.relax
from tests import process_state
from tests.dispatch_helpers import make_block, sample
from tests.relax_helpers import compile_and_run, fingerprint
from tvmbridge import add_tvm_dispatch
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.kernels import choice
from tvmbridge.passes.base import PassReport, RelaxPass
from tvmbridge.runtime import entry_compiler as compiler
from tvmbridge.runtime.fallbacks import log_summaries
from tvmbridge.schedules import target

Apply = Callable[[RelaxPass, tvm.IRModule, PassReport], tvm.IRModule]


# The folders and files in whose tests each pass must get and return a well-formed module.
_WELL_FORMED_IN = (
    "tests/architectures",
    "tests/compiler",
    "tests/differentiation",
    "tests/end_to_end",
    "tests/frontend",
    "tests/gradients",
    "tests/passes",
    "tests/random_graphs",
    "tests/test_",
)
# The folders in whose tests LLVM does not optimize, which would take a fifth of a compilation: they
# ask when code is compiled, and whether it serves a call. Other tests ask what the code computes.
_UNOPTIMIZED_IN = (
    "tests/calls",
    "tests/core",
    "tests/dynamo",
    "tests/fx",
    "tests/graph_capture",
    "tests/inspect",
    "tests/runtime",
)
# Files with tests of many seconds that would come near the end.
_LONGEST = ("tests/test_demo.py", "tests/test_notebooks.py", "tests/test_dropout.py")
# Where the contents of the module that a pass gets are compared too, which takes longer.
_LOOKED_INTO = ("tests/passes", "tests/schedules")


def _stack() -> list[Any]:
    """Return the frames of the caller, with what TVM's decorators read of them.

    TVM's decorators read a line of source of the third frame, and of no other. ``inspect.stack``
    searches the sources of all frames, some hundred under pytest: a sixth of collection's time.
    """
    frames: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        near = len(frames) < 3
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if near else ""
        context = [line] if line else None
        frames.append(SimpleNamespace(frame=frame, lineno=frame.f_lineno, code_context=context))
        frame = frame.f_back
    return frames


for _parser in (relax_parser, module_parser):
    _parser.inspect = SimpleNamespace(**{**vars(inspect), "stack": _stack})

# A seed keeps a formatted stack for each kind of device that is not there yet, and a fake mode
# keeps one too: under pytest's hundred frames, a millisecond each.
_NO_STACKS = SimpleNamespace(**{**vars(traceback), "format_stack": list, "extract_stack": list})
for _module in (torch.cuda, torch.mtia, torch.xpu, fake_tensor):
    _module.traceback = _NO_STACKS  # type: ignore[attr-defined]

# At exit, it would list the fallbacks of the hundreds of modules that tests dispatch.
atexit.unregister(log_summaries)


# Tests must not load code from the user's cache or from an earlier test.
os.environ["TVMBRIDGE_CACHE"] = "0"
# Tests count the calls that compiled code serves, which must not depend on measured times.
os.environ["TVMBRIDGE_ONLY_IF_FASTER"] = "0"
# No test depends on measured times, so each candidate kernel runs the fewest times.
choice._ENOUGH_SECONDS = 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and let hypothesis draw the same examples in any process.

    A long file that is last leaves the other workers idle. Hypothesis would read the constants of
    all modules of the repository, which takes two seconds, and draw some of them: a change
    anywhere, or another order of files, would change the examples.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))
    drawing = sys.modules.get("hypothesis.internal.conjecture.providers")
    if drawing is not None and hasattr(drawing, "is_local_module_file"):
        drawing.is_local_module_file = lambda path: False


def pytest_collection_finish() -> None:
    """Exempt the objects of the imported modules from garbage collection; end PyTorch's trace log.

    Collections take an eighth of the tests' CPU time otherwise. PyTorch describes each tensor that
    it traces in its trace log, if this has a handler; pytest gives one to each logger that does not
    propagate, for each test.
    """
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)


@pytest.fixture(autouse=True)
def _state_of_the_process(_seeds: None) -> Iterator[None]:
    """Check that each test leaves PyTorch's global state unchanged, which takes a millisecond."""
    before = process_state.now()
    yield
    left = process_state.changed(before, process_state.now())
    # PyTorch's older precision setter cannot restore its state; tests/core compares precisions.
    assert [name for name in left if "precision" not in name and name != "settings"] == []


@pytest.fixture(autouse=True)
def _state_after_refusals(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--watch-state``, check that each refused compilation leaves PyTorch's state unchanged.

    A whole test may restore, or change, what a refusal within it has changed. The generator of
    random numbers and the settings of TorchDynamo are compared too.
    """
    left: list[list[str]] = []
    tried = compiler.Compiler._tried

    @functools.wraps(tried)
    def watched(*args: Any) -> Any:
        before = {**process_state.now(), **process_state.more()}
        try:
            return tried(*args)
        except BaseException:
            after = {**process_state.now(), **process_state.more()}
            left.append(process_state.changed(before, after))
            raise

    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--watch-state"):
            patch.setattr(compiler.Compiler, "_tried", watched)
        yield
    assert [names for names in left if names] == []


@pytest.fixture(autouse=True, scope="session")
def _checked_passes() -> Iterator[None]:
    for found in pkgutil.iter_modules(tvmbridge.passes.relax.__path__):
        importlib.import_module(f"tvmbridge.passes.relax.{found.name}")
    with pytest.MonkeyPatch.context() as patch:
        for pass_class in RelaxPass.__subclasses__():
            patch.setattr(pass_class, "apply", _checked(pass_class.apply))
        yield


@pytest.fixture(autouse=True, scope="session")
def _unoptimized_code() -> Iterator[None]:
    genuine = target._target_named

    @functools.lru_cache
    def unoptimized(name: str, capability: str, cores: int) -> tvm.target.Target:
        found = genuine(name, capability, cores).export()
        return tvm.target.Target({**found, "opt-level": 0})

    def named(name: str, capability: str, cores: int) -> tvm.target.Target:
        where = os.environ.get("PYTEST_CURRENT_TEST", "")
        chosen = unoptimized if where.startswith(_UNOPTIMIZED_IN) else genuine
        return chosen(name, capability, cores)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "_target_named", named)
        yield


@pytest.fixture
def run_relax() -> Callable[..., list[torch.Tensor]]:
    """``run_relax(mod, *tensors, name="main")``: build a Relax module and call its function."""
    return compile_and_run


def _checked(apply: Apply) -> Apply:
    @functools.wraps(apply)
    def checked(self: RelaxPass, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        name = type(self).__name__
        where = os.environ.get("PYTEST_CURRENT_TEST", "")
        checks = where.startswith(_WELL_FORMED_IN)
        if checks and not mod.same_as(_well_formed[-1]):
            relax.analysis.well_formed(mod)
        deep = where.startswith(_LOOKED_INTO)
        content = fingerprint(mod) if deep else ()
        before = tuple(mod.functions_items()), mod.attrs
        after = apply(self, mod, report)
        if checks and not after.same_as(mod):
            relax.analysis.well_formed(after)
        same = (tuple(mod.functions_items()), mod.attrs) == before
        if deep:
            same = same and fingerprint(mod) == content
        assert same, f"{name} changed the module it was given"
        if checks:
            _well_formed[:] = [after]
        return after

    return checked


# The last module that a pass returned and that was checked.
_well_formed: list[tvm.IRModule | None] = [None]


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A block that is dispatched in train mode."""
    return add_tvm_dispatch(make_block().train(), sample().requires_grad_())


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the class names of modules, to which each compilation appends one."""
    begun: list[str] = []
    genuine = compiler.compile_module

    def noted(request: CompileRequest) -> CompiledModule:
        begun.append(type(request.module).__name__)
        return genuine(request)

    monkeypatch.setattr(compiler, "compile_module", noted)
    return begun
