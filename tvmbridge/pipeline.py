"""The ordered lists of passes, and the runner that times, checks and records each pass."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import tvm
import tvm_ffi
from tvm import relax

from tvmbridge.core.errors import PassError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.set_within import set_within
from tvmbridge.core.types import PassRecord
from tvmbridge.passes.base import PassReport, RelaxPass
from tvmbridge.passes.fx.horizontal_fusion import HorizontalFusion
from tvmbridge.passes.relax.collapse_views import CollapseViews
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination
from tvmbridge.passes.relax.eliminate_common_subexpr import EliminateCommonSubexpr
from tvmbridge.passes.relax.lay_out import LayOut, Permuted
from tvmbridge.passes.relax.lower_batch_norm import LowerBatchNorm
from tvmbridge.passes.relax.lower_dropout import LowerDropout
from tvmbridge.passes.relax.lower_group_norm import LowerGroupNorm
from tvmbridge.passes.relax.lower_instance_norm import LowerInstanceNorm
from tvmbridge.passes.relax.lower_layer_norm import LowerLayerNorm
from tvmbridge.passes.relax.lower_rms_norm import LowerRMSNorm
from tvmbridge.passes.relax.nest_splits import NestSplits
from tvmbridge.passes.relax.one_zapp import OneZapp
from tvmbridge.passes.relax.stop_gradients import RemoveNoGrad
from tvmbridge.passes.relax.zapp_like import ZappLike
from tvmbridge.passes.relax.zero_zapp import ZeroZapp

logger = logging.getLogger(__name__)

# A RelaxPass of tvmbridge, a pass of TVM, or a function from module to module.
AnyPass: TypeAlias = Callable[[Any], Any]

# Called with the record of a pass, the module before it and the module after it.
PassObserver: TypeAlias = Callable[[PassRecord, tvm.IRModule, tvm.IRModule], None]
_observer: ContextVar[PassObserver | None] = ContextVar("observer", default=None)


def fx_passes_of(options: CompileOptions) -> tuple[Any, ...]:
    """Return the passes that run on the captured program before it is decomposed.

    By default HorizontalFusion needs at least eight equal chains, because TVM fuses the operators
    of fewer chains itself.
    """
    return (HorizontalFusion(least=8),) if options.fx_passes is None else options.fx_passes


def inference_passes() -> list[AnyPass]:
    """Return the graph passes of code without a backward."""
    return [LowerDropout(), *_unscheduled_norms(fold=True), RemoveNoGrad(), *tidy_passes()]


def lowering_passes() -> list[AnyPass]:
    """Return the passes before the gradient in training: they expand operators without a rule."""
    return [
        LowerDropout(),
        LowerLayerNorm(),
        LowerRMSNorm(),
        *_unscheduled_norms(fold=False),
        NestSplits(),
        *tidy_passes(),
    ]


def recorded_passes() -> list[AnyPass]:
    """Return the passes before :func:`zapp_passes` if PyTorch's autograd derives the backward."""
    return _unscheduled_norms(fold=False)


def _unscheduled_norms(*, fold: bool) -> list[AnyPass]:
    """Return the passes that expand norms which are never legalized as single operators."""
    return [LowerBatchNorm(fold=fold), LowerGroupNorm(), LowerInstanceNorm()]


def zapp_passes(cotangents: tuple[str, ...]) -> list[AnyPass]:
    """Return the passes after the gradient: they remove zeros, ones and copies that it created."""
    return [
        RemoveNoGrad(),
        # Unpacks tuples: the gradient of a split adds to the fields of a tuple of zeros.
        relax.transform.CanonicalizeBindings(),
        ZappLike(),
        OneZapp(),
        ZeroZapp(cotangents),
        ZappLike(),
        CollapseViews(),
        *tidy_passes(),
    ]


def layout_passes(
    function: str, results: Sequence[Permuted], parameters: Sequence[Permuted]
) -> list[AnyPass]:
    """Return passes that give results and parameters the dimension order of their memory."""
    if not results and not parameters:
        return []
    return [LayOut(function, tuple(results), tuple(parameters)), CollapseViews(), *tidy_passes()]


def tidy_passes() -> list[AnyPass]:
    """Return the cleaning passes: they remove copies, equal expressions and dead code."""
    return [
        relax.transform.CanonicalizeBindings(),
        EliminateCommonSubexpr(),
        relax.transform.CanonicalizeBindings(),
        DeadCodeElimination(),
    ]


def run_passes(
    mod: tvm.IRModule,
    passes: Iterable[AnyPass],
    records: list[PassRecord],
    *,
    check_types: bool = True,
) -> tvm.IRModule:
    """Apply ``passes`` in order, and append a record of each to ``records``.

    The structure of the module is checked after each pass. Its types are checked only after the
    last one, because inferring all types takes longer than a pass.

    Args:
        check_types: whether to check types; False for passes that leave all types as they are.

    If ``TVMBRIDGE_DUMP`` names a folder, the module after each pass is written there. A failure to
    write logs a warning.

    Raises:
        PassError: a pass failed, or left an ill-formed module; the message names the pass. Wrong
            types are detected after the last pass.
    """
    passes, settled = list(passes), set[Any]()
    bindings = count_bindings(mod)
    for number, pass_ in enumerate(passes, 1):
        last, key = number == len(passes), _cleaning(pass_)
        known = not last and key in settled
        types = check_types and last
        mod = _run_pass(mod, pass_, records, bindings, check_types=types, known=known)
        bindings = records[-1].bindings_after
        settled = set() if records[-1].changed else settled | ({key} - {None})
    return mod


def _cleaning(pass_: AnyPass) -> Any:
    """Return a key of a pass that is run several times, equal for equal passes; else None.

    Such a pass decides by the module alone, so it need not run again on one that it left as it was.
    """
    if isinstance(pass_, DeadCodeElimination):
        return pass_
    name = pass_name(pass_)
    return name if name == "CanonicalizeBindings" else None


def observed_passes(observe: PassObserver) -> AbstractContextManager[object]:
    """Call ``observe`` after each pass that this thread runs within the context."""
    return set_within(_observer, observe)


def passes_are_observed() -> bool:
    """Whether an observer is called after each pass that this thread runs."""
    return _observer.get() is not None


def run_extra_passes(
    mod: tvm.IRModule, passes: Iterable[AnyPass], records: list[PassRecord]
) -> tvm.IRModule:
    """Run the user's passes as :func:`run_passes` does, and check the calling convention.

    Raises:
        PassError: a pass failed, left an ill-formed module, or changed the parameters or results of
            a function. The message names the pass.
    """
    for pass_ in passes:
        before = _conventions(mod)
        mod = _run_pass(mod, pass_, records, count_bindings(mod), check_types=True)
        if _conventions(mod) != before:
            raise PassError(
                f"pass {pass_name(pass_)} changed the parameters or results of a function; an "
                "extra pass may change its body alone"
            )
    return mod


def _conventions(mod: tvm.IRModule) -> dict[str, tuple[list[tuple[str, str]], str]]:
    return {
        name.name_hint: ([(p.name, str(p.ty)) for p in function.params], str(function.ret_ty))
        for name, function in mod.functions_items()
        if isinstance(function, relax.Function)
    }


def pass_name(pass_: AnyPass) -> str:
    """Return the name of a pass for records and errors."""
    if isinstance(pass_, RelaxPass):
        return type(pass_).__name__
    if isinstance(pass_, tvm.transform.Pass):
        return str(pass_.info.name)
    return getattr(pass_, "__name__", type(pass_).__name__)


@functools.cache
def let_interrupts_through() -> None:
    """Register the exceptions that end a program with TVM.

    Without this, one that a callback raises would leave TVM as a RuntimeError.
    """
    for error in (KeyboardInterrupt, SystemExit):
        tvm_ffi.register_error(error.__name__, error)


def _run_pass(
    mod: tvm.IRModule,
    pass_: AnyPass,
    records: list[PassRecord],
    bindings: int,
    *,
    check_types: bool,
    known: bool = False,
) -> tvm.IRModule:
    """Run one pass on a module of ``bindings`` bindings, and record it.

    If ``known``, it would change nothing: only record it.
    """
    let_interrupts_through()
    report = PassReport()
    start = time.perf_counter()
    try:
        after = mod if known else _applied(pass_, mod, report)
        # A comparison of the modules takes longer than most passes.
        changed = not after.same_as(mod) and (report.rewrites > 0 or not _are_equal(mod, after))
        if changed or check_types:
            relax.analysis.well_formed(after, check_types)
    except Exception as error:
        raise PassError(f"pass {pass_name(pass_)} failed: {error}") from error
    record = PassRecord(
        name=pass_name(pass_),
        options=_options_of(pass_),
        seconds=time.perf_counter() - start,
        rewrites=report.rewrites,
        declined=tuple(report.declined),
        bindings_before=bindings,
        bindings_after=bindings if after.same_as(mod) else count_bindings(after),
        changed=changed,
    )
    records.append(record)
    logger.debug(
        "%s: %d -> %d bindings", record.name, record.bindings_before, record.bindings_after
    )
    _dump(after, record, len(records))
    observe = _observer.get()
    if observe is not None:
        observe(record, mod, after)
    return after


def _applied(pass_: AnyPass, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
    return pass_.apply(mod, report) if isinstance(pass_, RelaxPass) else pass_(mod)


def _are_equal(mod: tvm.IRModule, after: tvm.IRModule) -> bool:
    return bool(tvm_ffi.structural_equal(mod, after, map_free_vars=True))


def _options_of(pass_: AnyPass) -> str:
    if not isinstance(pass_, RelaxPass):
        return ""
    return ", ".join(f"{f.name}={_told(getattr(pass_, f.name))}" for f in fields(pass_))


def _told(option: Any) -> str:
    """Return ``option`` as readable text; a method is shown by its name alone."""
    if isinstance(option, functools.partial):
        return _told(option.func)
    return str(getattr(option, "__qualname__", None) or repr(option))


def count_bindings(mod: tvm.IRModule) -> int:
    """Return the number of bindings in all Relax functions of ``mod``."""
    return sum(
        len(block.bindings)
        for _, function in mod.functions_items()
        if isinstance(function, relax.Function)
        for block in function.body.blocks
    )


def _dump(mod: tvm.IRModule, record: PassRecord, number: int) -> None:
    folder = os.environ.get("TVMBRIDGE_DUMP")
    if not folder:
        return
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        text = mod.script(show_meta=False)
        (path / f"{number:03d}_{record.name}.py").write_text(text, encoding="utf-8")
    except OSError as error:
        # A dump is only for inspection, so compilation continues without it.
        logger.warning("TVMBRIDGE_DUMP: what %s left is not written: %s", record.name, error)
