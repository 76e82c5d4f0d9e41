"""Building with the cache: code that another process compiled of the same graph is loaded.

The key of code is the graph as it is handed to the build, whole, and all that decides what the
build makes of it. What is compiled now is exported, kept, and loaded as what is found is: a first
process and a second one run the same instructions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import tvm

from tvmbridge.backends import backend_for
from tvmbridge.cache import CacheKey, Kept, Store
from tvmbridge.cache.key import digest_of
from tvmbridge.cache.surroundings import records_entry, surroundings, unusable
from tvmbridge.cache.tally import count_code, disk_text
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
from tvmbridge.core.types import PassRecord
from tvmbridge.kernels.keys import adopt
from tvmbridge.passes.relax.bundle_residuals import BundleResiduals
from tvmbridge.pipeline import passes_are_observed
from tvmbridge.records import Library
from tvmbridge.records.library import EMPTY, named_log_dir

logger = logging.getLogger(__name__)

HIT = "hit"


@dataclass(frozen=True)
class CachedBuild:
    """Builds modules for one target, with these options, for tensors on this device."""

    target: tvm.target.Target
    options: CompileOptions
    device: torch.device

    def __call__(
        self, mod: tvm.IRModule, records: list[PassRecord], bundle: BundleResiduals | None = None
    ) -> Built:
        """Load code for ``mod`` from the cache, or compile it; what passes did is in ``records``.

        Raises:
            BuildError: TVM cannot compile it for the target.
        """

        def graph() -> dict[str, str]:
            # Names of variables and the values of constants are in it, other than in TVM's
            # hashes, of which two graphs may have the same.
            return {"graph": digest_of(tvm.ir.save_json(mod)), "residuals": repr(bundle)}

        return self.found_or_compiled(graph, partial(self._compiled, mod, bundle), records)

    def found_or_compiled(
        self,
        entries: Callable[[], Mapping[str, str]],
        compile_: Callable[[list[PassRecord]], Code],
        records: list[PassRecord],
    ) -> Built:
        """Load from the cache what ``compile_`` would return, or have it compiled.

        Args:
            entries: the entries of the key that say what is compiled.
            compile_: called with the list that its passes are recorded in.
            records: what passes did, now or when the code was compiled.

        Raises:
            BuildError: TVM cannot compile it for the target.
        """
        make_ready(self.target)
        off = self.unused()
        if off is not None:
            code = compile_(records)
            module = code.executable
            return load_code(code, module, self.target, self.device, f"off: {off}")
        store, compiled_of = Store.of_now(), entries()
        key = self.key(compiled_of)
        with region("compile: read the cache"):
            found = store.read(key)
        if isinstance(found, Kept):
            built = self._loaded(found, records)
            if isinstance(built, Built):
                count_code(from_disk=True)
                logger.info("compiled code: %s; %s", built.cache, disk_text())
                return replace(built, key=key.digest)
            found = built
        mine: list[PassRecord] = []
        code = compile_(mine)
        records += mine
        count_code(from_disk=False)
        logger.info("compiled code: miss: %s; %s", found, disk_text())
        # What has changed while it was compiled may have changed the code, or not.
        unchanged = self.key(compiled_of) == key
        return self._keep(store, key if unchanged else None, code, mine, f"miss: {found}")

    def unused(self) -> str | None:
        """Why the cache takes no part; None: it does."""
        if passes_are_observed():
            return "passes are observed"
        return unusable(self.options.cache)

    def key(self, compiled_of: Mapping[str, str]) -> CacheKey:
        """All that code depends on; ``compiled_of`` are the entries that say what it is for."""
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
        """The code, or why it cannot be loaded here."""
        try:
            code, passes = described(kept.description, kept.library)
            if not adopt(dict(code.keys)):
                return "kernels of this process have the keys of others of the code's"
            module = module_of(kept.library)
            built = load_code(code, module, self.target, self.device, HIT)
        except Exception as error:  # whatever is wrong with it: it is compiled again
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
        """Load ``code`` from its exported form where that can be had, and keep this.

        ``key``: None where what it is made of has changed meanwhile.
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
                # Tasks are large, and asked for where they are noted alone.
                noted = named_log_dir(self.options.tuning_logs) is not None
                missing = code.missing if noted else {}
                description = description_of(code, missing, passes, library)
                refusal = store.write(key, Kept(description, library))
                digest = key.digest if refusal is None else ""
            else:
                refusal = "settings have changed meanwhile"
            why += "" if refusal is None else f"; {refusal}"
        return replace(load_code(code, module, self.target, self.device, why), key=digest)


def _exported_and_loaded(executable: Any) -> tuple[bytes, Any]:
    """The executable as bytes, and the module that is loaded from them.

    A library where it can be linked and loaded; bitcode where there is no linker, or where nothing
    may run from the folder of temporary files.
    """
    try:
        library = exported(executable, linked=True)
        return library, module_of(library)
    except Exception as error:  # a linker fails in as many ways as there are linkers
        logger.info("compiled code is kept as bitcode: %s", first_line(error))
    bitcode = exported(executable, linked=False)
    return bitcode, module_of(bitcode)
