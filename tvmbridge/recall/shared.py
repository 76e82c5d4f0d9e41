"""Share code between equal modules of one process, such as the layers of a model, without capture.

The code of one module serves another if all facts that capture has observed hold for both. Modules
that hold the same objects are compared by these (:mod:`~tvmbridge.recall.alike`). Otherwise the
facts are compared as those of another process's code are, but nothing is written to disk.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from tvmbridge.cache.key import digest_of
from tvmbridge.compiler.compiled import CompiledModule
from tvmbridge.core.captured_graph import CallingConvention
from tvmbridge.core.errors import first_line
from tvmbridge.core.locks import Lock
from tvmbridge.core.structure import children
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.observe.descriptors import find_aliases
from tvmbridge.graph_capture.observe.leaks import collections_put_off
from tvmbridge.recall.alike import (
    ByIdentity,
    ModuleForm,
    NoFormError,
    form_of,
    is_as_observed,
    may_be_shared,
)
from tvmbridge.recall.caller import Caller
from tvmbridge.recall.describe import Describer, UndescribableError
from tvmbridge.recall.facts import ChangedError, Facts, observed, verified
from tvmbridge.recall.key import FunctionsNow
from tvmbridge.recall.plan import refused_features
from tvmbridge.recall.walk import flattening

logger = logging.getLogger(__name__)

SHARED = "by the code of an equal module, without capture"
# The most codes for modules that differ in facts alone, such as attributes of layers.
_MOST_ALIKE = 8


@dataclass(frozen=True)
class _SharedPlan:
    """Code, the facts that it assumes, and :func:`structures_of` of its arguments and results."""

    compiled: CompiledModule
    facts: Facts
    structures: str


@dataclass(frozen=True)
class _AlikePlan:
    """Code, the form of a module that it serves, and what its key names by identity."""

    compiled: CompiledModule
    form: ModuleForm
    structures: str
    kinds: tuple[type, ...]


class SharedPlans:
    """The codes that equal modules share, with the facts that each of them assumes."""

    def __init__(self) -> None:
        self._plans: dict[str, list[_SharedPlan]] = {}
        self._alike: dict[str, list[_AlikePlan]] = {}
        self._functions = FunctionsNow()
        self._changing = Lock()

    def find(self, caller: Caller) -> tuple[CompiledModule | None, str, str]:
        """Return code that was compiled for an equal module, bound to the module of ``caller``.

        Returns:
            The code, or None; why there is none; and the digest to keep code under, or "". Never
            raises.
        """
        digest = ""
        try:
            reason = caller.refused()
            if reason is not None:
                return None, reason, ""
            with collections_put_off():
                alike = self._found_alike(caller)
                if alike is not None:
                    return alike, "", ""
                describer = Describer(caller.module)
                digest = self._digest(caller, describer)
                why = "no equal module has code yet"
                for plan in list(self._plans.get(digest, ())):
                    try:
                        bound = _bound(plan, caller, describer)
                        self._note_alike(caller, bound)
                        return bound, "", digest
                    except ChangedError as error:
                        why = str(error)
                return None, why, digest
        except UndescribableError as error:
            return None, str(error), digest
        except Exception as error:  # the module is compiled by itself
            logger.warning("code is not shared: %s", first_line(error))
            logger.debug("sharing code", exc_info=True)
            return None, f"code cannot be shared: {first_line(error)}", ""

    def keep(self, caller: Caller, digest: str, compiled: CompiledModule) -> str | None:
        """Keep code that was compiled for ``caller`` just now; return None, or why not.

        ``digest`` is what :meth:`find` returned before the compilation. Never raises.
        """
        try:
            feature = next(iter(refused_features(compiled)), None)
            if feature is not None:
                return feature
            if compiled.captured.convention.held:
                return "numbers in attributes among the inputs of the code"
            describer = Describer(caller.module)
            if self._digest(caller, describer) != digest:
                return "the module or a setting has changed during the compilation"
            facts = observed(caller.module, compiled.captured.assumptions, describer)
            structures = structures_of(compiled.captured.convention, describer)
            self.add(digest, compiled, facts, structures)
            self._note_alike(caller, compiled)
        except UndescribableError as error:
            return str(error)
        except Exception as error:
            logger.warning("code is not shared: %s", first_line(error))
            logger.debug("sharing code", exc_info=True)
            return f"code cannot be shared: {first_line(error)}"
        return None

    def _found_alike(self, caller: Caller) -> CompiledModule | None:
        """Return the code of a module that holds the same objects, bound to that of ``caller``."""
        if not self._alike:
            return None
        describer = ByIdentity(caller.module)
        plans = self._alike.get(self._digest(caller, describer), ())
        if not plans:
            return None
        try:
            form = form_of(caller.module)
            for plan in list(plans):
                captured = plan.compiled.captured
                if (
                    plan.form.tokens == form.tokens
                    and is_as_observed(caller.module, captured.assumptions)
                    and structures_of(captured.convention, describer) == plan.structures
                ):
                    refuse_packs(caller, plan.compiled.packs)
                    return _rebound(plan.compiled, caller)
        except (NoFormError, UndescribableError):
            pass  # the facts are compared, which names the reason
        return None

    def _note_alike(self, caller: Caller, compiled: CompiledModule) -> None:
        """Note that ``compiled`` serves the module of ``caller``, for modules of its form."""
        describer = ByIdentity(caller.module)
        try:
            form = form_of(caller.module)
        except NoFormError:
            return
        if not may_be_shared(caller.module, form, compiled.captured.assumptions):
            return
        digest = self._digest(caller, describer)
        structures = structures_of(compiled.captured.convention, describer)
        plan = _AlikePlan(compiled, form, structures, tuple(describer.kinds))
        with self._changing:
            self._alike[digest] = [plan, *self._alike.get(digest, ())][:_MOST_ALIKE]

    def _digest(self, caller: Caller, describer: Describer) -> str:
        entries = caller.entries(describer, None)
        return digest_of(json.dumps({**entries, **self._functions.entry()}))

    def add(self, digest: str, compiled: CompiledModule, facts: Facts, structures: str) -> None:
        """Keep code whose facts are known; the oldest one of eight that differ is dropped."""
        with self._changing:
            plans = [_SharedPlan(compiled, facts, structures), *self._plans.get(digest, ())]
            self._plans[digest] = plans[:_MOST_ALIKE]


def _bound(plan: _SharedPlan, caller: Caller, describer: Describer) -> CompiledModule:
    """Compare the facts of ``plan`` with the module of ``caller``, and bind its code to it."""
    captured = plan.compiled.captured
    if structures_of(captured.convention, describer) != plan.structures:
        raise ChangedError("the functions that flatten arguments or results are others")
    values, outside = verified(caller.module, plan.facts, describer)
    refuse_packs(caller, plan.compiled.packs)
    return _rebound(plan.compiled, caller, values=values, outside=outside)


def _rebound(compiled: CompiledModule, caller: Caller, **changes: Any) -> CompiledModule:
    """Return ``compiled`` with assumptions about the module and the arguments of ``caller``."""
    captured = compiled.captured
    leaves = pytree.tree_leaves((caller.args, dict(caller.kwargs)))
    assumptions = replace(
        captured.assumptions,
        constants={i: v for i, v in enumerate(leaves) if not isinstance(v, torch.Tensor)},
        aliases=find_aliases(caller.module),
        **changes,
    )
    return replace(compiled, captured=replace(captured, assumptions=assumptions), seconds={})


def refuse_packs(caller: Caller, packs: tuple[tuple[str, ...], ...]) -> None:
    """Raise UndescribableError if weights that code has as one tensor cannot be moved together."""
    packing = caller.packing
    for names in packs:
        refusals = [packing.weight_refusal(name) for name in names]
        refusal = next(filter(None, refusals), None) or packing.group_refusal(names)
        if refusal is not None:
            raise UndescribableError(refusal)


def structures_of(convention: CallingConvention, describer: Describer) -> str:
    """Return a digest of the users' functions that flatten and rebuild arguments and results."""
    waiting: list[Any] = [convention.in_spec, convention.out_spec]
    lines: set[str] = set()
    while waiting:
        spec = waiting.pop()
        waiting += [] if spec.is_leaf() else children(spec)
        node = pytree.SUPPORTED_NODES.get(spec.type)
        if node is not None:
            lines |= {describer.of(each) for each in flattening(node)}
    return digest_of("\n".join(sorted(lines)))
