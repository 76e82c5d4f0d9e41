"""The compiler of a dispatched module: it compiles code for a call and runs it once as a test."""

from __future__ import annotations

import contextvars
import functools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from tvmbridge.cache import CacheKey
from tvmbridge.calls.arguments import Arguments
from tvmbridge.calls.standins import without_inference_tensors
from tvmbridge.compiler.cached_build import HIT
from tvmbridge.compiler.compiled import CompiledModule, compile_module
from tvmbridge.compiler.durations import stages_told_to
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.collection import full_collections_put_off
from tvmbridge.core.errors import BridgeError, BuildError, NotApartError, first_line
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.profiling import region
from tvmbridge.core.turns import compiling
from tvmbridge.graph_capture.observe.refusal import raise_if_forward_refuses
from tvmbridge.graph_capture.surroundings import tracing_here, undisturbed
from tvmbridge.recall import RECALLED, SHARED, Caller, SharedPlans, keep, recalled
from tvmbridge.runtime.agreement import decided_together, ranks_now
from tvmbridge.runtime.background import Background
from tvmbridge.runtime.changing_attributes import ChangingAttributes
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.guards.forwards import is_wrapped, original_forward, with_own_forward
from tvmbridge.runtime.guards.mode import Flags, Mode, flags_of
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.guards.state import ModuleState
from tvmbridge.runtime.progress import progress
from tvmbridge.runtime.trial import try_out

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Compiler:
    """Compiles one module.

    Args:
        own: the forward that was set on the instance; None if it has only that of its class.
        instead: a function that replaces :func:`compile_module`; None: compile_module.
        background: runs compilations in another process while calls go on; None: calls wait.
        attributes: decides which numbers in attributes are inputs; None: all are constants.
        shared: the code that equal modules share; None: this module shares none.
    """

    module: nn.Module
    own: Callable[..., Any] | None
    target: Any
    options: CompileOptions
    packing: ModulePacks
    instead: Callable[[CompileRequest], CompiledModule] | None = None
    background: Background | None = None
    attributes: ChangingAttributes | None = None
    shared: SharedPlans | None = None

    @property
    def original(self) -> Callable[..., Any]:
        """Return the module's own forward: the instance's, or the one its class has now."""
        return original_forward(self.module, self.own)

    def entry(
        self,
        signature: Signature,
        mode: Mode,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        why: str | None = None,
    ) -> CompiledEntry:
        """Compile code for these arguments and return it as an entry.

        Args:
            why: why a call needs the code, for the log; None: the dispatch is being added.

        Raises:
            CaptureError, UnsupportedOperatorError, PassError, BuildError: it cannot be compiled.
            UnderWayError: it is being compiled in the background.
        """
        body = functools.partial(self._logged, signature, mode, args, kwargs, why)
        if self.background is None or self.instead is not None:
            return body()
        flags = flags_of(self.module, signature.flatten(args, kwargs) or [])
        what = f"compiling {type(self.module).__name__} {signature} for {mode}"
        return self.background.run(what, signature, (mode, flags), body)

    def _logged(
        self,
        signature: Signature,
        mode: Mode,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        why: str | None,
    ) -> CompiledEntry:
        """Compile the code; show progress on a terminal and log the result."""
        start = time.perf_counter()
        name = type(self.module).__name__
        waiting = "" if why is None else f"; a call asks for it: {why}"
        with (
            progress(f"compiling {name} for {mode}", waiting) as tell,
            stages_told_to(tell),
            region(f"compile {name}"),
            full_collections_put_off(),
        ):
            # Each compilation leaves more variables of PyTorch in the context of its thread.
            context = contextvars.copy_context()
            tried = functools.partial(self._tried, signature, mode, args, kwargs, tell)
            if self.options.compiler_collectives and ranks_now() > 1:
                label = f"{name} {signature} for {mode}"
                entry = context.run(decided_together, label, tried)
            else:
                entry = context.run(tried)
        compiled = entry.compiled
        for names in compiled.packs:
            self.packing.claim(names)
        logger.info(
            "compiled %s %s for %s: %d operators, %.1f s (%s); code %s%s",
            name,
            signature,
            mode,
            sum(compiled.native_calls.values()) + sum(compiled.aten_calls.values()),
            time.perf_counter() - start,
            ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in compiled.seconds.items()),
            "from disk" if compiled.cache == HIT else f"compiled ({compiled.cache or 'no cache'})",
            waiting,
        )
        return entry

    def _tried(
        self,
        signature: Signature,
        mode: Mode,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> CompiledEntry:
        """Compile the code and run it once on the arguments, before it may serve calls."""
        leaves = signature.flatten(args, kwargs) or []
        flags = flags_of(self.module, leaves)
        with compiling(), tracing_here(), undisturbed():
            args, kwargs = without_inference_tensors((args, dict(kwargs)))
            caller = self._caller(signature, mode, flags, (args, kwargs))
            entry, alone, caller, digest = self._shared(caller, flags)
            if entry is not None:
                return entry
            entry, why, key = self._recalled(caller, flags)
            if entry is not None:
                return entry
            given, named = signature.marked((args, kwargs))
            compile_ = functools.partial(self._compiled, mode, tuple(given), named)
            compiled = compile_() if self.attributes is None else self.attributes.compiled(compile_)
            for i, served in compiled.captured.convention.numbers.items():
                signature.numbers[i].narrow(served)
            state = ModuleState(self.module, compiled.captured)
            entry = CompiledEntry(state, compiled, self.packing, flags)
            tell("first run")
            try:
                try_out(entry, signature.flatten(args, kwargs) or leaves)
            except Exception as error:
                raise_if_forward_refuses(self.module, args, kwargs, mode.autocast)
                raise BuildError(f"the compiled code cannot run on the sample: {error}") from error
            entry.fills_first = state.is_otherwise()
            first = "state that the first call fills" if entry.fills_first else None
            if why:
                refused = first or keep(caller, key, compiled)
                entry.plan = key.digest if key is not None and refused is None else ""
                entry.recalled = f"captured: {why}" + (f"; not kept: {refused}" if refused else "")
            if self.shared is not None:
                entry.alone = alone
                if digest:
                    entry.alone = first or self.shared.keep(caller, digest, compiled)
        return entry

    def _caller(
        self, signature: Signature, mode: Mode, flags: Flags, arguments: Arguments
    ) -> Caller:
        refusal = "the module has a forward of its own" if self.own is not None else None
        if is_wrapped(self.module):
            refusal = "a library has wrapped forward"
        if self.instead is not None:
            refusal = "the graph comes from torch.compile"
        if signature.numbers:
            refusal = "numbers among the inputs of the code"
        args, kwargs = arguments
        return Caller(
            self.module,
            tuple(args),
            kwargs,
            (*mode, flags),
            self.options,
            self.target,
            self.packing,
            refusal,
        )

    def _shared(
        self, caller: Caller, flags: Flags
    ) -> tuple[CompiledEntry | None, str | None, Caller, str]:
        """Return an entry with the code of an equal module; or None, and why there is none.

        The last results are ``caller``, which also shares code from disk, and the digest to share
        other code under; "" if it cannot be shared.
        """
        if self.shared is None:
            return None, None, caller, ""
        compiled, why, digest = self.shared.find(caller)
        if compiled is None:
            offer = functools.partial(self.shared.add, digest) if digest else None
            return None, why, replace(caller, offer=offer), digest
        entry = self._bound(compiled, flags)
        if entry is None:
            return None, "the module is not as it was", caller, ""
        entry.recalled = SHARED
        return entry, None, caller, digest

    def _bound(self, compiled: CompiledModule, flags: Flags) -> CompiledEntry | None:
        """Return an entry with code that was captured elsewhere; None if it does not fit."""
        state = ModuleState(self.module, compiled.captured)
        entry = CompiledEntry(state, compiled, self.packing, flags)
        return None if state.is_otherwise() else entry

    def _recalled(
        self, caller: Caller, flags: Flags
    ) -> tuple[CompiledEntry | None, str, CacheKey | None]:
        """Return an entry with the code that an earlier process has captured and tried.

        Return None, why there is none, and the key to keep a plan under, if it may be kept.
        """
        compiled, why, key = recalled(caller)
        if compiled is None:
            return None, why, key
        try:
            entry = self._bound(compiled, flags)
            if entry is None:
                return None, "the module is not as it was", key
        except Exception as error:
            logger.warning("a plan of compiled code is not used: %s", first_line(error))
            return None, f"the plan cannot be used: {first_line(error)}", key
        entry.recalled, entry.plan = RECALLED, "" if key is None else key.digest
        return entry, "", None

    def _compiled(
        self, mode: Mode, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> CompiledModule:
        try:
            return self._compiled_apart(mode, args, kwargs)
        except (BridgeError, OSError, MemoryError):
            raise
        except Exception as error:
            raise_if_forward_refuses(self.module, args, kwargs, mode.autocast)
            name = type(self.module).__name__
            raise BuildError(
                f"tvmbridge fails on {name} ({type(error).__name__}: {first_line(error)}), which "
                "is a mistake of its own: please report it"
            ) from error

    def _compiled_apart(
        self, mode: Mode, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> CompiledModule:
        """Compile from the trace of a stand-in copy; trace the module itself if it has no copy."""
        request = CompileRequest(
            self.module,
            args,
            kwargs,
            needs_grad=mode.needs_grad,
            options=self.options,
            target=self.target,
            packing=self.packing,
            autocast=mode.autocast,
        )
        compile_ = self.instead or compile_module
        return self.apart_or_itself(lambda apart: compile_(replace(request, apart=apart)))

    def apart_or_itself(self, make: Callable[[bool], Result]) -> Result:
        """Return what :func:`apart_or_itself` does for the module."""
        return apart_or_itself(self.module, self.own, make)


def apart_or_itself(
    module: nn.Module, own: Callable[..., Any] | None, make: Callable[[bool], Result]
) -> Result:
    """Return what ``make`` makes of the trace of a copy; without one, of the module itself.

    Args:
        own: the forward that was set on the instance; None if it has only that of its class.
        make: is told whether a copy is traced.
    """
    with suppress(NotApartError):
        return make(True)
    with with_own_forward(module, own):
        return make(False)
