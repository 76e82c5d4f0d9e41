"""Samples: compilation for the sample arguments of ``add_tvm_dispatch``, before any call."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.reasons import Reason
from tvmbridge.runtime.any_size import AnySize
from tvmbridge.runtime.background import UnderWayError
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.runtime.guards.signature import Matched, Signature
from tvmbridge.runtime.policy import Policy, Wanted
from tvmbridge.runtime.specialization import Specialization


def compile_sample(policy: Policy, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Compile code for a sample, unless there is code for it."""
    if policy.options.freeze:
        policy.kept.drop_outdated()
    if policy.sizes is not None and policy.sizes.spec is not None:
        _compile_declared(policy, policy.sizes, args, kwargs)
        return
    wanted, is_compiled = _find_or_add(policy, args, kwargs)
    if not is_compiled:
        with contextlib.suppress(UnderWayError):  # later calls take the finished code
            policy.compile(wanted)
    if wanted.specialization not in policy.kept.known:
        policy.kept.add(wanted.specialization)


def _compile_declared(
    policy: Policy, sizes: AnySize, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Compile code for a sample with the symbolic dimensions that the user has declared."""
    wanted = _wanted(policy, sizes.of_sample(args, kwargs), args, kwargs)
    specialization, mode, (leaves, _) = wanted
    while specialization.chosen(mode, leaves) is None:
        try:
            policy.compile(Wanted(specialization, mode, wanted.matched))
        except UnderWayError:
            return
        except BridgeError:
            failed, specialization = specialization, sizes.of_sample(args, kwargs)
            if specialization is failed:
                sizes.forget(failed)
                raise


def _find_or_add(
    policy: Policy, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Wanted, bool]:
    """Return the code that a sample wants, and whether it is compiled."""
    for specialization in policy.kept.known:
        matched = specialization.signature.match(args, kwargs)
        if isinstance(matched, Reason):
            continue
        leaves, arguments = matched
        wanted = _wanted(policy, specialization, *arguments)
        entry = specialization.chosen(wanted.mode, leaves)
        if entry is None:
            return wanted, False
        tensors = entry.state.tensors()
        if entry.mismatch(leaves, tensors) is None:
            return wanted, True
        # Any other difference means that the module has changed. This code stays for calls in the
        # earlier state, and the sample gets a specialisation of its own.
        if entry.is_other_variant(leaves, tensors):
            return wanted, False
    specialization = Specialization(Signature(args, kwargs, policy.compiler.original))
    return _wanted(policy, specialization, args, kwargs), False


def _wanted(
    policy: Policy, specialization: Specialization, args: Any, kwargs: Mapping[str, Any]
) -> Wanted:
    leaves = specialization.signature.flatten(args, kwargs) or []
    training = policy.module.training
    needs_grad = training and specialization.anything_requires_grad(policy.module, leaves)
    mode = Mode.of_now(training, needs_grad)
    return Wanted(specialization, mode, Matched(leaves, (args, kwargs)))
