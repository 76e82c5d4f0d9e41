"""Watch an eager replay of forward: where gradients stop, and which derivatives are PyTorch's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, enable_reentrant_dispatch

from tvmbridge.core.custom_operator import refuse_numbers
from tvmbridge.core.torch_private import METADATA_OF_FAKES, FakeTensor, TorchDispatchMode, pytree
from tvmbridge.core.writes import written_by
from tvmbridge.differentiation.draws import eager_draw
from tvmbridge.gradients.operators import has_same_derivative
from tvmbridge.graph_capture.hoist import is_random
from tvmbridge.graph_capture.observe.effects import switches_gradients
from tvmbridge.graph_capture.trace.attention import attention

_DEVICE = torch.ops.prim.device.default
# Operators that read no values of their operand: a result without a gradient is no stop.
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
    """Records uses of autograd in forward: hooks, and reasons against TVM's Gradient.

    ``found`` receives hooks and calls of ``backward``, which compiled code would not repeat. The
    ``reasons`` against TVM's Gradient receive two uses:

    - Forward makes a tensor require a gradient. Forward may have stopped a gradient before, which
      flows on in the captured graph.
    - Attention has a floating-point mask, which may mask a whole row with large finite numbers.
      PyTorch's kernel recomputes the probabilities in backward from a logarithm that has lost
      precision in such a row; TVM's Gradient uses the derivative of softmax. Boolean masks use
      infinities, where both agree. With dropout PyTorch does not use this kernel.
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
    """Records where a gradient stops, and which operators' derivatives may differ from PyTorch's.

    A floating-point result is *stopped* if it requires no gradient although an operand does. It is
    a reason against TVM's Gradient only if another operator reads it, or if it is an output:
    PyTorch also creates such tensors for its own use in backward.

    - ``reasons``: the reasons against TVM's Gradient, in order.
    - ``draws``: descriptions of the random draws, as :func:`eager_draw` returns them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reasons: dict[str, None] = {}
        self.draws: list[str] = []
        self._made_by: dict[int, tuple[torch.Tensor, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return METADATA_OF_FAKES[func](args)
        if func.namespace == "prim" or func._schema.name in _CREATES:
            return self._drawing(func, args, kwargs)
        refuse_numbers(func)
        operands = _floating((args, kwargs))
        # Reading the flags of a view whose base was written makes autograd compute the view again.
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
        # The tensors are kept alive, so that no other tensor gets the same id.
        self._made_by.update({id(t): (t, str(func)) for t in results})
        return result

    def _drawing(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if is_random(func, args, kwargs):
            self.draws.append(eager_draw(func, args, kwargs, result))
        return result

    def _look_at_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record writes under no_grad into tensors with a gradient: autograd does not see them."""
        if torch.is_grad_enabled():
            return
        written = _floating(written_by(func, args, kwargs))
        if any(_is_cut_off(t) or t.requires_grad for t in written):
            reason = f"forward writes by {func}, under no_grad, what a gradient flows to"
            self.reasons[reason] = None

    def look_at(self, tensors: Sequence[torch.Tensor], reader: str) -> None:
        """Record which of ``tensors``, the operands of ``reader``, are stopped."""
        for tensor in tensors:
            if _is_cut_off(tensor):
                # Autograd creates such views again, so that their ids are not in _made_by.
                reason = f"forward stops the gradient at a view, made under no_grad, for {reader}"
                self.reasons[reason] = None
                continue
            made = self._made_by.get(id(tensor))
            if made is not None and not tensor.requires_grad and tensor.is_floating_point():
                reason = f"forward stops the gradient at {made[1]}, whose result goes to {reader}"
                self.reasons[reason] = None


def _is_cut_off(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a view, created under no_grad, of a tensor that requires a gradient.

    The ``requires_grad`` of such a view is True, but autograd treats it as a leaf.
    """
    base = tensor._base
    if base is None or not base.requires_grad:
        return False
    try:
        return tensor.grad_fn is None
    except RuntimeError:  # The base was written since, and autograd has no history for the view.
        return True


def _floating(value: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
