"""Build one executable from the graphs at several points, or load it from the cache.

A point is one value for each symbol. The cache key consists of the graphs at all points, before
kernels are chosen, operators legalized and loops scheduled. Equal graphs give equal code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import tvm

from tvmbridge.cache.key import digest_of
from tvmbridge.compiler.build import Built, Code, Fused, Scheduled, compile_code, prepare, schedule
from tvmbridge.compiler.cached_build import CachedBuild
from tvmbridge.core.common_decisions import agreed, followed
from tvmbridge.core.decisions import (
    Decision,
    OtherFactError,
    Results,
    recorded_decisions,
    repeated_decisions,
)
from tvmbridge.core.errors import BuildError, UnsupportedOperatorError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.passes.relax.bundle_residuals import BundleResiduals
from tvmbridge.symbolic.callees import with_common_callees
from tvmbridge.symbolic.generalize import generalize
from tvmbridge.symbolic.least import least_sizes, lowest
from tvmbridge.symbolic.reaching import Reach
from tvmbridge.symbolic.sizes import DifferentCodeError, Sizes


def build_for_all(
    graphs: Sequence[tuple[tvm.IRModule, BundleResiduals | None]],
    sizes: Sizes,
    target: tvm.target.Target,
    options: CompileOptions,
    device: torch.device,
    records: list[PassRecord],
    reach: Reach,
) -> Built:
    """Build code for all sizes from ``graphs``, or load it from the cache.

    Args:
        graphs: for each point of ``sizes``, the module, and how its residuals are bundled.
        reach: finds the largest sizes that the code serves.

    Raises:
        DifferentCodeError: the code at the points differs in more than sizes.
        BuildError: TVM cannot compile it for the target.
    """

    def entries() -> dict[str, str]:
        return {
            "graph": digest_of("\n".join(tvm.ir.save_json(mod) for mod, _ in graphs)),
            "residuals": repr([bundle for _, bundle in graphs]),
            "sizes": repr(
                (sizes.points, sizes.least, sizes.traced, sorted(map(repr, sizes.known)))
            ),
            "reach": reach.source,
        }

    def compile_(mine: list[PassRecord]) -> Code:
        def prepare_one(mod: tvm.IRModule) -> Fused:
            return prepare(mod, target, mine, measure=options.measure_kernels)

        code = code_for_all(graphs, sizes, prepare_one, mine)
        return replace(code, most=reach.most(sizes))

    # A tuning record is for one size.
    build = CachedBuild(target, replace(options, tuning_records=False), device)
    return build.found_or_compiled(entries, compile_, records)


@contextmanager
def refused_as_different() -> Iterator[None]:
    """Raise DifferentCodeError for what is refused at a size; the first size was not refused.

    OtherFactError stays, because code without the fact may be had.
    """
    try:
        yield
    except OtherFactError:
        raise
    except (BuildError, UnsupportedOperatorError) as error:
        raise DifferentCodeError(str(error)) from error


def code_for_all(
    graphs: Sequence[tuple[tvm.IRModule, BundleResiduals | None]],
    sizes: Sizes,
    prepare_one: Callable[[tvm.IRModule], Fused],
    records: list[PassRecord],
) -> Code:
    """Compile code for all sizes from ``graphs``.

    Args:
        graphs: for each point of ``sizes``, the module, and how its residuals are bundled.
        prepare_one: chooses the kernels of a module, and fuses its functions.

    Raises:
        DifferentCodeError: the code at the points differs in more than sizes.
        BuildError: TVM cannot compile it for the target.
    """
    fused = _prepared([mod for mod, _ in graphs], prepare_one)
    scheduled, decisions = _scheduled(fused, [bundle for _, bundle in graphs], sizes)
    mod = generalize([each.mod for each in scheduled], sizes)
    code = compile_code(replace(scheduled[0], mod=mod), records)
    return replace(code, least=least_sizes(decisions, sizes))


def _prepared(
    mods: Sequence[tvm.IRModule], prepare_one: Callable[[tvm.IRModule], Fused]
) -> list[Fused]:
    """Return the modules with kernels, all with the choices that are made for the first."""
    with recorded_decisions() as decisions:
        fused = [prepare_one(mods[0])]
    for mod in mods[1:]:
        with refused_as_different(), repeated_decisions(decisions):
            fused.append(prepare_one(mod))
    first = fused[0]
    for other in fused[1:]:
        if (other.unaligned, other.shared) != (first.unaligned, first.shared):
            raise DifferentCodeError("at other sizes, results share memory otherwise")
    called = with_common_callees([each.mod for each in fused])
    return [replace(each, mod=mod) for each, mod in zip(fused, called, strict=True)]


def _scheduled(
    fused: Sequence[Fused], bundles: Sequence[BundleResiduals | None], sizes: Sizes
) -> tuple[list[Scheduled], list[Decision]]:
    """Return the modules with scheduled loops, and the decisions for all sizes."""

    def run(each: Fused, bundle: Any) -> Scheduled:
        return schedule(each, [], bundle=bundle)

    both = list(zip(fused, bundles, strict=True))
    for_all: list[Decision] = []
    agree = False
    # The sizes that decide for others come first: common, largest, smallest.
    order = [0, 1, len(both) - 1, *range(2, len(both) - 1)]
    while not agree:
        decided: dict[int, list[Decision]] = {}
        results: list[Results] = [{} for _ in both]
        found: dict[int, Scheduled] = {}
        for i in order:
            like = followed(list(decided.values()), for_all)
            with recorded_decisions(like, results[i]) as decided[i]:
                found[i] = run(*both[i])
        known = len(for_all)
        recorded = [decided[i] for i in range(len(both))]
        for_all, agree = agreed(recorded, sizes.content, for_all, partial(lowest, sizes))
        if not agree and len(for_all) == known:
            raise DifferentCodeError("for other sizes other things are decided by them")
    for i, ((each, bundle), made) in enumerate(zip(both, results, strict=True)):
        if decided[i] != for_all:
            with refused_as_different(), repeated_decisions(for_all, made):
                found[i] = run(each, bundle)
    return [found[i] for i in range(len(both))], for_all
