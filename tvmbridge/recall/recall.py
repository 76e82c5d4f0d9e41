"""Keep the plan of compiled code beside it, and serve later processes by plan and code."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvmbridge.cache import CacheKey, Kept, Store
from tvmbridge.compiler.bound import bound_entry
from tvmbridge.compiler.compiled import CompiledModule, with_call_options
from tvmbridge.core.errors import BridgeError, first_line
from tvmbridge.core.plain_json import parse_json
from tvmbridge.core.profiling import region
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.observe.leaks import collections_put_off
from tvmbridge.recall.binding import captured_of, compiled_of
from tvmbridge.recall.caller import Caller
from tvmbridge.recall.describe import Describer, UndescribableError
from tvmbridge.recall.facts import Facts, observed, verified
from tvmbridge.recall.plan import CodePlan, plan_of
from tvmbridge.recall.shared import refuse_packs, structures_of

logger = logging.getLogger(__name__)

RECALLED = "from disk, without capture"
_MOST_VALUES = 2**21


def recalled(caller: Caller) -> tuple[CompiledModule | None, str, CacheKey | None]:
    """Return code that an earlier process compiled for such a call, without capture.

    Returns:
        The compiled module, or None. Why there is none; empty if the option is off. The key under
        which a plan may be kept, or None. Never raises.
    """
    key: CacheKey | None = None
    try:
        reason = caller.unused()
        if reason is not None:
            return None, reason, None
        # A collection after the imports of a model takes as long as all of this.
        with collections_put_off():
            describer = Describer(caller.module)
            key = caller.key(describer)
            with region("compile: read the plan"):
                found = Store.of_now().read(key)
            if not isinstance(found, Kept):
                return None, found, key
            return _bound(caller, found, describer), "", key
    except UndescribableError as error:
        logger.info("%s: no plan is used: %s", type(caller.module).__name__, error)
        return None, str(error), key
    except Exception as error:  # a plan that cannot be used must not stop the compilation
        logger.warning("a plan of compiled code is not used: %s", first_line(error))
        logger.debug("the plan", exc_info=True)
        return None, f"the plan cannot be used: {first_line(error)}", key


def _bound(caller: Caller, kept: Kept, describer: Describer) -> CompiledModule:
    """Compare the facts of a plan with the module, and load the code for it."""
    content = kept.description
    plan, facts = CodePlan.parse(content.get("plan")), Facts.parse(content.get("facts"))
    structures = structures_of(plan.convention, describer)
    if content.get("structures") != structures:
        raise UndescribableError("the functions that flatten arguments or results are others")
    values, outside = verified(caller.module, facts, describer)
    refuse_packs(caller, plan.packs)
    leaves = pytree.tree_leaves((caller.args, dict(caller.kwargs)))
    captured = captured_of(plan, caller.module, leaves, values, outside)
    records: list[Any] = []
    structure = plan.convention.out_spec
    bound = bound_entry(plan.inputs, plan.outputs, structure, plan)
    build = replace(caller.build(), bound=bound)
    built = build.recalled(plan.source, records)
    if isinstance(built, str):
        raise UndescribableError(f"code that is not kept: {built}")
    compiled = compiled_of(plan, captured, built, build, records, kept.library)
    compiled = with_call_options(compiled, caller.options)
    if caller.offer is not None:
        caller.offer(compiled, facts, structures)
    return compiled


def keep(caller: Caller, key: CacheKey | None, compiled: CompiledModule) -> str | None:
    """Keep the plan of code that was compiled just now; return None, or why not. Never raise."""
    if key is None:
        return None
    if compiled.captured.convention.held:
        return "numbers in attributes among the inputs of the code"
    try:
        plan, graph = plan_of(compiled)
        describer = Describer(caller.module)
        changed = key.differing(caller.key(describer).entries)
        if changed:
            raise UndescribableError(f"{', '.join(changed)}, which changed during the compilation")
        facts = observed(caller.module, compiled.captured.assumptions, describer)
        structures = structures_of(plan.convention, describer)
        description = {"plan": plan.content(), "facts": facts.content(), "structures": structures}
        _refuse_unreadable(description, plan)
        return Store.of_now().write(key, Kept(description, graph))
    except UndescribableError as error:
        logger.info("%s: no plan is kept: %s", compiled.origin, error)
        return str(error)
    except Exception as error:
        logger.warning("no plan is kept: %s", first_line(error))
        logger.debug("the plan", exc_info=True)
        return f"no plan can be made: {first_line(error)}"


def _refuse_unreadable(description: Mapping[str, Any], plan: CodePlan) -> None:
    """Raise UndescribableError unless the text of a plan leads to an equal plan."""
    try:
        read = parse_json(json.dumps({"description": description}).encode(), _MOST_VALUES)
        Facts.parse(read["description"]["facts"])
        same = CodePlan.parse(read["description"]["plan"])
    except (ValueError, BridgeError) as error:
        raise UndescribableError(f"a plan that cannot be read back: {error}") from None
    if same != plan:
        raise UndescribableError("a plan that is read back as another")
