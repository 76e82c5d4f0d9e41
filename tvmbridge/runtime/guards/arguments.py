"""A guard on arguments alone, for calls that the module's own forward serves after its trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tvmbridge.core.generated import Scope
from tvmbridge.core.torch_private import GlobalStateGuard, saved_tensors_hooks_in_force
from tvmbridge.runtime.guards.fast import FastGuard, generated_guard
from tvmbridge.runtime.guards.signature import Signature


class ArgumentsGuard(FastGuard):
    """Accepts calls with the same kind of arguments and the same PyTorch modes as one call.

    It does not compare the module's tensors and attributes, because the module's own forward is
    right for any of them.

    Args:
        module: the module, whose train or eval mode is compared.
        signature: the signature of the arguments.
        leaves: the leaves of the call's arguments.
        records: whether autograd records the call; then calls inside a checkpoint are refused.
    """

    def __init__(
        self, module: nn.Module, signature: Signature, leaves: Sequence[Any], records: bool
    ) -> None:
        self._lines: list[str] = []
        self._scope = Scope(
            {
                "attributes": module.__dict__,
                "flatten": signature.leaves_of,
                "same_state": GlobalStateGuard().check,
                "saved_hooks": saved_tensors_hooks_in_force,
            }
        )
        self._refuse_if(f"attributes['training'] is not {module.training}")
        self._emit_arguments(signature)
        self._emit_constants(signature.constants)
        self._emit_numbers(signature)
        self._emit_tensors(signature, leaves)
        self._refuse_if("not same_state()")
        if records:
            self._refuse_if("saved_hooks(True) is not None")
        self.source, self.check = generated_guard(self._lines, self._scope)
        self.check_under_dynamo = self.check
