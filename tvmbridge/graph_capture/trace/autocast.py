"""Autocast in a trace: each cast that PyTorch's dispatcher makes is an operator of the program.

``torch.export`` records operators before autocast applies, and keeps autocast regions as they are.
A later decomposition loses casts there: ``cross_entropy`` under CUDA's autocast casts to float32
within its parts. So during a trace PyTorch's autocast kernels run first, and no region is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.autocast import without_autocast
from tvmbridge.core.errors import CaptureError, UnsupportedOperatorError
from tvmbridge.core.torch_private import (
    DispatchKey,
    OpOverload,
    enter_autocast,
    exit_autocast,
    has_kernel,
    proxy_tensor,
    pytree,
)
from tvmbridge.graph_capture.trace.autocast_lists import KEYS, devices_in_force, is_listed
from tvmbridge.graph_capture.trace.promotion import dtypes_of_zeros

# The dispatcher's own kernel: a decomposition in Python may call other operators.
_COMPOSITE = DispatchKey.CompositeImplicitAutograd


# If such an operator runs without being recorded, PyTorch cannot find the symbol of its result.
_OF_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _AutocastReachedError(Exception):
    """A composite operator calls an operator that autocast casts for."""


@dataclass(eq=False)
class _Casts:
    """Records autocast's casts in one trace, and the calls that autocast does not cast for.

    - ``calls``: calls of operators that are not in autocast's lists, each with the device and dtype
      of autocast and the dtypes of the results
    - ``probing``: whether an operator runs only to find out if autocast casts within it
    """

    calls: dict[Any, tuple[Any, ...]] = field(default_factory=dict)
    probing: bool = False

    def call(
        self,
        genuine: Callable[..., Any],
        mode: Any,
        op: Any,
        pre_dispatch: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record an operator as autocast would run it; replaces PyTorch's ``proxy_call``."""
        traced = pre_dispatch and isinstance(op, OpOverload)
        devices = devices_in_force(args, kwargs) if traced else []
        listed = [d for d in devices if is_listed(op.name(), d)]
        if self.probing and traced:
            return self._probed(mode, op, bool(listed), args, kwargs)
        if listed:
            with mode:
                return op._op_dk(KEYS[listed[0]], *args, **kwargs)
        if devices and self._reaches(mode, op, args, kwargs):
            with mode:
                return op._op_dk(_COMPOSITE, *args, **kwargs)
        if not devices:
            return genuine(mode, op, pre_dispatch, args, kwargs)
        with without_autocast():
            result = genuine(mode, op, pre_dispatch, args, kwargs)
        for device in devices:
            self._note(op, args, kwargs, device, result)
        return result

    def _reaches(self, mode: Any, op: OpOverload, args: Any, kwargs: Any) -> bool:
        """Whether the composite operator ``op`` calls operators that autocast casts for."""
        random = torch.Tag.nondeterministic_seeded in op.tags
        if random or op._schema.is_mutable or not _is_composite(op):
            return False
        self.probing = True
        try:
            with mode:
                op._op_dk(_COMPOSITE, *args, **kwargs)
        except _AutocastReachedError:
            return True
        except Exception:
            return False  # The recording that follows raises the same error.
        finally:
            self.probing = False
        return False

    def _probed(self, mode: Any, op: Any, listed: bool, args: Any, kwargs: Any) -> Any:
        if listed:
            raise _AutocastReachedError
        if any(tag in op.tags for tag in _OF_DATA):
            raise UnsupportedOperatorError("its parts cannot be looked at without recording them")
        if _is_composite(op):
            with mode:
                return op._op_dk(_COMPOSITE, *args, **kwargs)
        return op(*args, **kwargs)

    def _note(self, op: OpOverload, args: Any, kwargs: Any, device: str, result: Any) -> None:
        results = result if isinstance(result, tuple | list) else [result]
        dtypes = [r.dtype if isinstance(r, torch.Tensor) else None for r in results]
        found = (op, args, kwargs, device, torch.get_autocast_dtype(device), dtypes)
        self.calls.setdefault(str(pytree.tree_map_only(torch.Tensor, _described, found)), found)

    def refuse_other_dtypes(self) -> None:
        """Raise CaptureError if a kernel's result under autocast has another dtype than the trace.

        Autocast also applies to operators that a kernel calls: ``affine_grid`` calls a matrix
        product, for example.
        """
        for op, args, kwargs, device, dtype, traced in self.calls.values():
            with torch.autocast(device, dtype):
                found = dtypes_of_zeros(op, args, kwargs, device)
            if found is not None and found != traced:
                raise CaptureError(
                    f"{op} under autocast gives {_names(found)} in eager PyTorch, and "
                    f"{_names(traced)} in a trace; call it outside of autocast"
                )


@contextmanager
def casts_recorded() -> Iterator[None]:
    """Record autocast's casts as operators within the context, and no autocast regions.

    Raises:
        CaptureError: autocast casts within an operator's kernel, so that the trace has another
            dtype than eager PyTorch.
    """
    casts = _Casts()
    with ExitStack() as stack:
        module = proxy_tensor()
        stack.enter_context(patched_here(module, "proxy_call", casts.call))
        recorder = module.PreDispatchTorchFunctionMode
        stack.enter_context(patched_here(recorder, "__torch_function__", _without_regions))
        yield
    casts.refuse_other_dtypes()


def _without_regions(
    genuine: Callable[..., Any], mode: Any, func: Any, *rest: Any, **named: Any
) -> Any:
    """Call ``genuine``, but ignore functions that enter or leave an autocast region."""
    if func in (enter_autocast, exit_autocast):
        return None
    return genuine(mode, func, *rest, **named)


def _is_composite(op: OpOverload) -> bool:
    return bool(has_kernel(op.name(), _COMPOSITE.name))


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _names(dtypes: Sequence[torch.dtype | None]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes if d is not None)
