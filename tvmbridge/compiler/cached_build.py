"""Build with the cache: load code that another process compiled from the same graph.

The key of code consists of the whole graph that is built, and of everything else that affects the
result. Newly compiled code is exported, written to the cache, and loaded from its exported form. A
first and a second process therefore run the same instructions.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import tvm

from tvmbridge.backends import backend_for
from tvmbridge.cache import CacheKey, Kept, Store
from tvmbridge.cache.key import digest_of
from tvmbridge.cache.store import source_now
from tvmbridge.cache.surroundings import records_entry, surroundings, unusable
from tvmbridge.compiler.build import (
    Built,
    Code,
    compile_code,
    load_code,
    make_ready,
    prepare,
    schedule,
)
from tvmbridge.compiler.description import described, description_of
from tvmbridge.compiler.exported import exported, module_of
from tvmbridge.core.errors import BuildError, first_line
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.profiling import region
from tvmbridge.core.reasons import Reason
from tvmbridge.core.types import PassRecord
from tvmbridge.kernels.keys import adopt
from tvmbridge.passes.relax.bundle_residuals import BundleResiduals
from tvmbridge.records import Library
from tvmbridge.records.library import EMPTY, named_log_dir

logger = logging.getLogger(__name__)

HIT = "hit"
RECEIVED = "received from another rank"
BOUND = "inputs and results"


@dataclass(frozen=True)
class CachedBuild:
    """Builds graphs for one target, with these options, for tensors on this device.

    - ``bound``: how the code is bound to the module, by :func:`bound_entry`; empty if it is not.
    """

    target: tvm.target.Target
    options: CompileOptions
    device: torch.device
    bound: str = ""

    def __call__(
        self, mod: tvm.IRModule, records: list[PassRecord], bundle: BundleResiduals | None = None
    ) -> Built:
        """Load code for ``mod`` from the cache, or compile it.

        Args:
            bundle: the pass that makes one result of all residuals; None: there are none.

        Raises:
            BuildError: TVM cannot compile it for the target.
        """

        def graph() -> dict[str, str]:
            # Unlike TVM's structural hash, this has the names of variables and the values of
            # constants, and two graphs cannot have the same.
            digest = digest_of(tvm.ir.save_json(mod))
            return {"graph": digest, "residuals": repr(bundle), BOUND: self.bound}

        return self.found_or_compiled(graph, partial(self._compiled, mod, bundle), records)

    def found_or_compiled(
        self,
        entries: Callable[[], Mapping[str, str]],
        compile_: Callable[[list[PassRecord]], Code],
        records: list[PassRecord],
    ) -> Built:
        """Load code from the cache, or call ``compile_`` and store its result.

        Args:
            entries: returns the entries of the cache key that identify the source of the code.

        Raises:
            BuildError: TVM cannot compile it for the target.
        """
        make_ready(self.target)
        off, source = self.unused(), source_now()
        if off is not None and source is None:
            code = compile_(records)
            module = code.executable
            return load_code(code, module, self.target, self.device, f"off: {off}")
        store, compiled_of = Store.of_now(), entries()
        key = self.key(compiled_of)
        with region("compile: read the cache"):
            found = store.read(key) if off is None else f"off: {off}"
        if isinstance(found, Kept):
            built = self._loaded(found, records)
            if isinstance(built, Built):
                if source is not None:
                    source.give(key, found)
                count_code(from_disk=True)
                logger.info("compiled code: %s; %s", built.cache, disk_text())
                return replace(built, key=key.digest, source=compiled_of)
            found = built
        kept = None if source is None else source.received(key.digest)
        if kept is not None:
            built = self._loaded(kept, records)
            if isinstance(built, Built):
                refusal = store.write(key, kept) if off is None else "off"
                digest = key.digest if refusal is None else ""
                return replace(built, cache=RECEIVED, key=digest, source=compiled_of)
        mine: list[PassRecord] = []
        code = compile_(mine)
        records += mine
        count_code(from_disk=False)
        logger.info("compiled code: miss: %s; %s", found, disk_text())
        # A change of the key during the compilation may have affected the code.
        unchanged = self.key(compiled_of) == key
        built = self._keep(store, key if unchanged else None, code, mine, f"miss: {found}")
        return replace(built, source=compiled_of)

    def recalled(self, compiled_of: Mapping[str, str], records: list[PassRecord]) -> Built | str:
        """Load code that is kept for a graph that this process does not have; or say why not.

        Args:
            compiled_of: the entries of the cache key that identify the graph.
        """
        make_ready(self.target)
        compiled_of = {**compiled_of, BOUND: self.bound}
        key = self.key(compiled_of)
        found = Store.of_now().read(key)
        built = self._loaded(found, records) if isinstance(found, Kept) else found
        if isinstance(built, str):
            return built
        count_code(from_disk=True)
        return replace(built, key=key.digest, source=compiled_of)

    def unused(self) -> Reason | None:
        """Return why the cache is not used; None if it is used."""
        return unusable(self.options.cache)

    def key(self, compiled_of: Mapping[str, str]) -> CacheKey:
        """Return the cache key; ``compiled_of`` has the entries that identify the code's source."""
        options = self.options
        return CacheKey(
            {
                **compiled_of,
                "options": f"measure_kernels={options.measure_kernels}",
                "tuning records": records_entry(
                    options.tuning_logs, options.tuning_records, self.target
                ),
                "device": backend_for(self.target).identity(self.device),
                **surroundings(self.target),
            }
        )

    def _compiled(
        self, mod: tvm.IRModule, bundle: BundleResiduals | None, records: list[PassRecord]
    ) -> Code:
        use_records = self.options.tuning_records
        library = Library.open(self.options.tuning_logs, self.target) if use_records else EMPTY
        measure = self.options.measure_kernels
        fused = prepare(mod, self.target, records, measure=measure)
        scheduled = schedule(fused, records, library=library, bundle=bundle)
        code = compile_code(scheduled, records)
        untuned = sum(code.missing.values()) if use_records else 0
        return replace(code, coverage=replace(code.coverage, untuned=untuned))

    def _loaded(self, kept: Kept, records: list[PassRecord]) -> Built | str:
        """Return the loaded code, or the reason why it cannot be loaded in this process."""
        try:
            code, passes = described(kept.description, kept.library)
            if not adopt(dict(code.keys)):
                return "kernels of this process have the keys of others of the code's"
            module = module_of(kept.library)
            built = load_code(code, module, self.target, self.device, HIT)
        except Exception as error:  # the code is compiled again
            logger.warning("compiled code from the cache cannot be loaded: %s", error)
            return f"it cannot be loaded: {type(error).__name__}"
        records += passes
        return built

    def _keep(
        self,
        store: Store,
        key: CacheKey | None,
        code: Code,
        passes: list[PassRecord],
        why: str,
    ) -> Built:
        """Export ``code``, load it from its exported form, and write this to the cache.

        Code that cannot be exported is loaded directly. ``key`` is None if the key has changed
        during the compilation; then nothing is written. ``why`` says why the code was compiled.
        """
        digest = ""
        try:
            library, module = _exported_and_loaded(code.executable)
        except Exception as error:  # a full disk, or kernels for a GPU and no linker
            level = logging.INFO if isinstance(error, BuildError) else logging.WARNING
            logger.log(level, "compiled code is not kept: it cannot be exported: %s", error)
            module = code.executable
            why += "; it cannot be exported"
        else:
            if key is not None:
                # Tasks are large, and needed only if there is a list of pending tasks.
                noted = named_log_dir(self.options.tuning_logs) is not None
                missing = code.missing if noted else {}
                kept = Kept(description_of(code, missing, passes, library), library)
                source = source_now()
                if source is not None:
                    source.give(key, kept)
                # Without a cache on disk the code is exported for other processes alone.
                refusal = store.write(key, kept) if self.unused() is None else "it is off"
                digest = key.digest if refusal is None else ""
            else:
                refusal = "settings have changed meanwhile"
            why += "" if refusal is None else f"; {refusal}"
        return replace(load_code(code, module, self.target, self.device, why), key=digest)


def _exported_and_loaded(executable: Any) -> tuple[bytes, Any]:
    """Return the executable as bytes, and the module that is loaded from them.

    The bytes are a shared library if one can be linked and loaded. Otherwise they are bitcode:
    there may be no linker, or the folder of temporary files may not allow executable code.
    """
    try:
        library = exported(executable, linked=True)
        return library, module_of(library)
    except Exception as error:  # a linker fails in as many ways as there are linkers
        logger.info("compiled code is kept as bitcode: %s", first_line(error))
    bitcode = exported(executable, linked=False)
    return bitcode, module_of(bitcode)


_codes: Counter[bool] = Counter()


def count_code(from_disk: bool) -> None:
    """Count one piece of code as loaded from disk, or as compiled."""
    _codes[from_disk] += 1


def disk_text() -> str:
    """Return a text such as ``3 of 4 from disk``, or "" before any code was counted."""
    total = _codes.total()
    return f"{_codes[True]} of {total} from disk" if total else ""
