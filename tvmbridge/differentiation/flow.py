"""How gradients flow while forward is rehearsed: where they stop, and by whose formulas."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, enable_reentrant_dispatch

from tvmbridge.core.custom_operator import refuse_numbers
from tvmbridge.core.torch_private import TorchDispatchMode, pytree
from tvmbridge.core.writes import written_by
from tvmbridge.differentiation.draws import eager_draw
from tvmbridge.gradients.operators import has_same_derivative
from tvmbridge.graph_capture.hoist import is_random
from tvmbridge.graph_capture.observe.effects import switches_gradients
from tvmbridge.graph_capture.trace.attention import attention

# They read no values of their operand, so that no gradient is expected of them.
_CREATES = frozenset(
    {
        "aten::empty_like",
        "aten::zeros_like",
        "aten::ones_like",
        "aten::full_like",
        "aten::rand_like",
        "aten::randn_like",
        "aten::randint_like",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::new_zeros",
        "aten::new_ones",
        "aten::new_full",
    }
)


class AutogradWatch(TorchFunctionMode):
    """Notes what forward installs that acts, in eager PyTorch, at each backward: ``found``.

    Among the ``reasons`` against another derivative than PyTorch's are noted

    - that it makes a tensor require a gradient: one may have been stopped that flows on in the
      captured graph;
    - attention with a floating mask, which may close a row with large finite numbers. The kernel
      exponentiates the scores anew in backward, by a logarithm that has lost its digits in such a
      row; TVM's Gradient gives the derivative of softmax. Masks of truth values close rows with
      infinities, where both agree, and with dropout PyTorch does not take the kernel.
    """

    _MASKED = "attention has a floating mask, with which PyTorch's kernel has its own derivative"
    _USES: Mapping[Any, str] = {
        torch.Tensor.register_hook: "Tensor.register_hook",
        torch.Tensor.register_post_accumulate_grad_hook: "a hook on a parameter",
        torch.Tensor.retain_grad: "Tensor.retain_grad",
        torch.Tensor.backward: "Tensor.backward",
    }
    _ATTENTION = inspect.signature(attention)

    def __init__(self, reasons: dict[str, None]) -> None:
        super().__init__()
        self.found: dict[str, None] = {}
        self._reasons = reasons

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in self._USES:
            self.found[self._USES[func]] = None
        if switches_gradients(func, args, named):
            self._reasons["forward makes a tensor require a gradient"] = None
        if func is torch.nn.functional.scaled_dot_product_attention:
            given = self._ATTENTION.bind(*args, **named).arguments
            mask = given.get("attn_mask")
            if mask is not None and mask.is_floating_point() and not given.get("dropout_p"):
                self._reasons[self._MASKED] = None
        return func(*args, **named)


class FlowWatch(TorchDispatchMode):
    """Notes where a gradient stops and where its formula is not that of the captured graph.

    A floating-point result of operands that require a gradient, that itself requires none, is
    *stopped*; it matters once another operator reads it, or an output is one. (PyTorch makes such
    tensors for its own use too, and reads them in backward only.)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reasons: dict[str, None] = {}
        self.draws: list[str] = []
        self._made_by: dict[int, tuple[torch.Tensor, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or func._schema.name in _CREATES:
            return self._drawing(func, args, kwargs)
        refuse_numbers(func)
        operands = _floating((args, kwargs))
        # A view whose base was written is made anew when its flags are read: with autograd.
        with enable_reentrant_dispatch():
            self.look_at(operands, str(func))
            self._look_at_writes(func, args, kwargs)
            active = any(_is_cut_off(t) or t.requires_grad for t in operands)
        result = self._drawing(func, args, kwargs)
        results = _floating(result)
        if not active or not results:
            return result
        dtypes = {str(t.dtype).removeprefix("torch.") for t in results}
        if not has_same_derivative(func._schema.name, dtypes):
            self.reasons[f"the derivative of {func} is not known to be PyTorch's"] = None
        # Kept alive, so that no other tensor gets the same id.
        self._made_by.update({id(t): (t, str(func)) for t in results})
        return result

    def _drawing(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if is_random(func, args, kwargs):
            self.draws.append(eager_draw(func, args, kwargs, result))
        return result

    def _look_at_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note what is written out of autograd's sight: gradients flow as if it were not."""
        if torch.is_grad_enabled():
            return
        written = _floating(written_by(func, args, kwargs))
        if any(_is_cut_off(t) or t.requires_grad for t in written):
            reason = f"forward writes by {func}, under no_grad, what a gradient flows to"
            self.reasons[reason] = None

    def look_at(self, tensors: Sequence[torch.Tensor], reader: str) -> None:
        """Note the stopped tensors among those that ``reader`` reads."""
        for tensor in tensors:
            if _is_cut_off(tensor):
                # Autograd makes such views anew, so that they are not found by their identity.
                reason = f"forward stops the gradient at a view, made under no_grad, for {reader}"
                self.reasons[reason] = None
                continue
            made = self._made_by.get(id(tensor))
            if made is not None and not tensor.requires_grad and tensor.is_floating_point():
                reason = f"forward stops the gradient at {made[1]}, whose result goes to {reader}"
                self.reasons[reason] = None


def _is_cut_off(tensor: torch.Tensor) -> bool:
    """Whether it is a view, made under no_grad, of a tensor that requires a gradient.

    Such a view says that it requires one too, but autograd takes it for a leaf.
    """
    base = tensor._base
    if base is None or not base.requires_grad:
        return False
    try:
        return tensor.grad_fn is None
    except RuntimeError:  # Its base was written since: autograd makes no history for it.
        return True


def _floating(value: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
