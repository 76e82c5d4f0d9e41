"""Samples: compilation for the sample arguments of ``add_tvm_dispatch``, before any call."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.reasons import Reason
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.runtime.background import UnderWayError
from tvmbridge.runtime.declared_sizes import DeclaredSizes
from tvmbridge.runtime.dispatcher import Dispatcher
from tvmbridge.runtime.guards.mode import Mode
from tvmbridge.runtime.guards.signature import Signature
from tvmbridge.runtime.specialization import Specialization


def compile_sample(
    dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Compile code for a sample, unless the dispatcher has code for it.

    Args:
        dispatcher: the dispatcher of the module.
        args: the positional arguments of the sample.
        kwargs: the keyword arguments of the sample.
    """
    dispatcher.drop_outdated()
    if isinstance(dispatcher.any_size, DeclaredSizes):
        _compile_declared(dispatcher, dispatcher.any_size, args, kwargs)
        return
    specialization, mode, arguments = _find_or_add(dispatcher, args, kwargs)
    if mode is not None:
        with contextlib.suppress(UnderWayError):  # later calls take the finished code
            dispatcher.compile(specialization, mode, *arguments)
    if specialization not in dispatcher.specializations:
        dispatcher.add(specialization)


def _compile_declared(
    dispatcher: Dispatcher, sizes: DeclaredSizes, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Compile code for a sample with the symbolic dimensions that the user has declared."""
    specialization = sizes.of_sample(args, kwargs)
    leaves = specialization.signature.flatten(args, kwargs) or []
    mode = _mode(dispatcher, specialization, leaves)
    while specialization.chosen(mode, leaves) is None:
        try:
            dispatcher.compile(specialization, mode, args, kwargs)
        except UnderWayError:
            return
        except BridgeError:
            failed, specialization = specialization, sizes.of_sample(args, kwargs)
            if specialization is failed:
                sizes.forget(failed)
                raise


def _find_or_add(
    dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Specialization, Mode | None, Arguments]:
    """Return the specialisation for a sample, the mode to compile, and the arguments.

    The mode is None if there is code. The arguments are in the call form of the specialisation:
    positional and keyword arguments as in its own sample.
    """
    for specialization in dispatcher.specializations:
        matched = specialization.signature.match(args, kwargs)
        if isinstance(matched, Reason):
            continue
        leaves, arguments = matched
        mode = _mode(dispatcher, specialization, leaves)
        entry = specialization.chosen(mode, leaves)
        if entry is None:
            return specialization, mode, arguments
        tensors = entry.state.tensors()
        if entry.mismatch(leaves, tensors) is None:
            return specialization, None, arguments
        # Any other difference means that the module has changed. This code stays for calls in the
        # earlier state, and the sample gets a specialisation of its own.
        if entry.differs_in_flags_alone(leaves, tensors):
            return specialization, mode, arguments
    specialization = Specialization(Signature(args, kwargs, dispatcher.original))
    leaves = specialization.signature.flatten(args, kwargs) or []
    return specialization, _mode(dispatcher, specialization, leaves), (args, kwargs)


def _mode(dispatcher: Dispatcher, specialization: Specialization, leaves: Sequence[Any]) -> Mode:
    training = dispatcher.module.training
    needs_grad = training and specialization.anything_requires_grad(dispatcher.module, leaves)
    return Mode.of_now(training, needs_grad)
