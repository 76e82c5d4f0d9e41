"""Attention that a model writes as products and a softmax runs by PyTorch's fused GPU kernels.

The pattern is ``dropout(softmax(query @ key.transpose(-2, -1) * scale + mask)) @ value``. The
dropout, the scale and the mask may be absent. The heads must be in half precision on a GPU. A trace
notes for each tensor of the pattern how it was computed. It then replaces the last product by fused
attention. Nothing reads the other operators, unless forward uses the scores elsewhere.

The fused kernel keeps the scores in float32 instead of rounding them to half precision.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tvmbridge.core.autocast import without_autocast
from tvmbridge.core.torch_private import pytree, transform_depth
from tvmbridge.core.writes import version_of
from tvmbridge.graph_capture.trace.attention import attention_on_gpus, autocast_for_attention
from tvmbridge.graph_capture.trace.conversions import dropout_arguments
from tvmbridge.graph_capture.trace.fused_attention import fused_kernel

_HALVES = (torch.float16, torch.bfloat16)
# A number that fills masked scores is added to them instead, where that rounds to the number.
_LEAST_FILL = -1e30
# Modules that use the weights of attention after dropout for something other than the product.
_KEEPERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


# Weights after a dropout whose mask the kernel draws: for any other function it would be missing.
_UNDROPPED: Any = WeakIdKeyDictionary()

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _WeightsKept(Exception):
    """Forward uses weights after dropout for something other than the product."""


def weights_drawn_if_kept(trace: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let ``trace`` run again if forward uses weights after dropout beside the product.

    Attention of its module is then not fused with dropout, in no trace.
    """

    @wraps(trace)
    def twice(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return trace(*args, **kwargs)
        except _WeightsKept:
            return trace(*args, **kwargs)

    return twice


def refuse_weights(module: nn.Module, values: Any) -> None:
    """Raise if one of ``values`` is weights after a dropout whose mask the kernel draws.

    Attention in the forward of ``module`` is not fused with dropout from then on.
    """
    if len(_UNDROPPED) and any(v in _UNDROPPED for v in _tensors(values)):
        _KEEPERS.add(module)
        raise _WeightsKept


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor))


def written_attention_fused(module: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which attention that ``module`` writes as products is fused on GPUs."""
    return WrittenAttention(module) if torch.cuda.is_available() else nullcontext()


@dataclass(frozen=True, eq=False)
class _Scores:
    """How a tensor was computed: ``query @ key * scale + mask``, and what follows.

    - ``query``, ``key``: of shapes (batch, heads, tokens, size) and (batch, heads, size, tokens)
    - ``is_weights``: whether the softmax follows
    - ``dropout_p``: the rate of the dropout that follows the softmax
    - ``versions``: the write counters that the tensors and the result had
    """

    query: torch.Tensor
    key: torch.Tensor
    scale: float = 1.0
    mask: torch.Tensor | None = None
    is_weights: bool = False
    dropout_p: float = 0.0
    versions: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores: (batch, heads, tokens, tokens)."""
        return (*self.query.shape[:3], self.key.shape[-1])

    def written(self, result: torch.Tensor) -> tuple[int, ...]:
        """Return the write counters that the tensors and the result have now."""
        tensors = (self.query, self.key, self.mask, result)
        return tuple(version_of(t) for t in tensors if t is not None)

    def with_mask(self, mask: torch.Tensor) -> _Scores:
        """Return these scores with ``mask`` added."""
        return replace(self, mask=mask if self.mask is None else self.mask + mask)

    def reshaped(self, shape: tuple[int, ...]) -> _Scores | None:
        """Return these scores as those of a tensor of ``shape``; None if it is none of them."""
        batch, heads, *rest = self.shape
        if shape in (self.shape, (batch * heads, *rest)):
            return self
        if self.mask is not None or len(shape) != 4 or (shape[0] * shape[1], 1) != (batch, heads):
            return None
        if shape[2:] != self.shape[2:]:
            return None
        query, key = (t.reshape(*shape[:2], *t.shape[2:]) for t in (self.query, self.key))
        return replace(self, query=query, key=key)


class WrittenAttention(TorchFunctionMode):
    """The mode that replaces attention written as products within the forward of ``module``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        # By id. The tensors are held, so that no other tensor gets their ids.
        self._noted: dict[int, tuple[torch.Tensor, _Scores]] = {}
        self._masks: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, step = kwargs or {}, _STEPS.get(func)
        if step is None or not step.takes(args, named):
            if func not in _SHAPE_READS:
                refuse_weights(self._module, (args, named))
            return func(*args, **named)
        if step is not _PRODUCT:
            refuse_weights(self._module, (args, named))
        return step.run(self, func, args, named)

    def _note(self, result: torch.Tensor, scores: _Scores) -> None:
        self._noted[id(result)] = result, replace(scores, versions=scores.written(result))

    def _noted_for(self, tensor: Any) -> _Scores | None:
        """Return what is noted for ``tensor``, if nothing was written into its operands since."""
        _, scores = self._noted.get(id(tensor), (None, None))
        return scores if scores and scores.versions == scores.written(tensor) else None

    def _scores(self, tensor: Any) -> _Scores | None:
        """Return what is noted for ``tensor`` if it is scores, before the softmax."""
        scores = self._noted_for(tensor)
        return None if scores is None or scores.is_weights else scores

    def _weights(self, tensor: Any) -> _Scores | None:
        """Return what is noted for ``tensor`` if it is weights, after the softmax."""
        scores = self._noted_for(tensor)
        return scores if scores is not None and scores.is_weights else None

    def _product(self, func: Any, args: Any, named: Any) -> Any:
        result = func(*args)
        left, right = args
        fits = left.dim() == right.dim() and left.dim() in (3, 4) and is_on_gpu(result)
        weights = self._weights(left) if fits else None
        if weights is not None and (found := self._attention(weights, right, result)) is not None:
            refuse_weights(self._module, right)
            return found
        refuse_weights(self._module, args)
        if fits and weights is None:
            query, key = (t if t.dim() == 4 else t.unsqueeze(1) for t in args)
            if query.shape[:2] == key.shape[:2]:
                self._note(result, _Scores(query, key))
        return result

    def _scaled(self, func: Any, args: Any, named: Any) -> Any:
        scores, factor = self._scores(args[0]), args[1]
        result = func(*args)
        if scores is not None and scores.mask is None and type(factor) in (int, float) and factor:
            factor = factor if func in _MULTIPLICATIONS else 1 / factor
            self._note(result, replace(scores, scale=scores.scale * factor))
        return result

    def _added(self, func: Any, args: Any, named: Any) -> Any:
        first, second = args
        scores, mask = self._scores(first), second
        if scores is None:
            scores, mask = self._scores(second), first
        result = func(*args)
        fits = isinstance(mask, torch.Tensor) and mask.is_floating_point() and mask.dim() <= 4
        if fits and scores is not None and scores.shape == result.shape:
            self._note(result, scores.with_mask(mask))
        return result

    def _filled(self, func: Any, args: Any, named: Any) -> Any:
        scores, (_, where, fill) = self._scores(args[0]), args
        result = func(*args)
        fits = type(fill) in (int, float) and fill <= _LEAST_FILL
        if fits and scores is not None and scores.shape == result.shape:
            zero = torch.zeros((), dtype=result.dtype, device=result.device)
            self._note(result, scores.with_mask(torch.where(where, fill, zero)))
        return result

    def _normalized(self, func: Any, args: Any, named: Any) -> Any:
        scores, result = self._scores(args[0]), func(*args, **named)
        dim = args[1] if len(args) > 1 else named.get("dim")
        if scores is not None and dim in (-1, result.dim() - 1):
            self._note(result, replace(scores, is_weights=True))
        return result

    def _dropped(self, func: Any, args: Any, named: Any) -> Any:
        tensor, p, trains, in_place = dropout_arguments(args, named)
        weights = self._weights(tensor)
        draws = trains is True and type(p) is float and 0.0 < p < 1.0 and not in_place
        if not draws or weights is None or weights.dropout_p or self._module in _KEEPERS:
            return func(*args, **named)
        # The kernel draws the mask. Whoever else takes this tensor would get another one.
        result = tensor.view_as(tensor)
        self._note(result, replace(weights, dropout_p=p))
        _UNDROPPED[result] = True
        return result

    def _converted(self, func: Any, args: Any, named: Any) -> Any:
        scores, result = self._noted_for(args[0]), func(*args)
        if scores is not None and result is not args[0] and result.is_floating_point():
            self._note(result, scores)
        return result

    def _reshaped(self, func: Any, args: Any, named: Any) -> Any:
        scores, result = self._noted_for(args[0]), func(*args)
        found = None if scores is None else scores.reshaped(tuple(result.shape))
        if found is not None:
            self._note(result, found)
        return result

    def _attention(self, scores: _Scores, value: Any, result: torch.Tensor) -> Any:
        """Return fused attention in place of ``result``; None if no kernel computes it."""
        if value.dim() == 3:
            value = value.reshape(*scores.shape[:2], *value.shape[1:])
        tensors: list[Any] = [scores.query, scores.key.transpose(-2, -1), value]
        if torch.is_autocast_enabled("cuda"):
            tensors = [autocast_for_attention(t) for t in tensors]
        dtype = tensors[0].dtype
        if dtype not in _HALVES or any(t.dtype != dtype for t in (*tensors, result)):
            return None
        # The kernel adds a mask in float32, in which the least float16 does not hide a score.
        if scores.mask is not None and dtype is torch.float16:
            return None
        with without_autocast():
            q, k, v = tensors
            mask, closed = (None, None) if scores.mask is None else self._mask(scores.mask, dtype)
            if not fused_kernel(q, k, v, mask, scores.dropout_p, is_causal=False):
                return None
            found = attention_on_gpus(q, k, v, mask, scores.dropout_p, scale=scores.scale)
            if closed is not None:
                found = found.masked_fill(closed, torch.nan)
            # The product has this shape, and its elements in this order in memory.
            return found.contiguous().view(result.shape)

    def _mask(self, mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mask for the kernel, and the rows whose softmax is NaN: all columns are -inf.

        The kernel gives zeros for such rows.
        """
        key = id(mask), version_of(mask), dtype
        if key not in self._masks:
            closed = mask.detach().amax(-1, keepdim=True) == -torch.inf
            # In half precision, the least number of float32 is -inf.
            bias = mask.clamp(min=torch.finfo(dtype).min).to(dtype)
            self._masks[key] = mask, bias[(None,) * (4 - mask.dim())], closed
        return self._masks[key][1:]


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU that has fused attention."""
    return tensor.is_cuda


class _Step(NamedTuple):
    """What the mode does for some functions.

    - ``run``: handles a call, as a method of the mode.
    - ``operands``: the number of positional arguments of the calls that it handles; None: any.
    - ``by_name``: whether it handles calls with keyword arguments.
    """

    run: Callable[[WrittenAttention, Any, Any, Any], Any]
    operands: int | None = None
    by_name: bool = False

    def takes(self, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether the step handles a call with these arguments."""
        if not args or (named and not self.by_name) or self.operands not in (None, len(args)):
            return False
        # Transforms of functions (vmap) have no rules for the operators of fused attention.
        return not transform_depth()


_T = torch.Tensor
_MULTIPLICATIONS = (torch.mul, _T.mul, _T.mul_)
_PRODUCT = _Step(WrittenAttention._product, operands=2)
_STEPS: dict[Any, _Step] = {
    function: step
    for step, functions in (
        (_PRODUCT, (torch.matmul, _T.matmul, torch.bmm, _T.bmm)),
        (
            _Step(WrittenAttention._scaled, operands=2),
            (*_MULTIPLICATIONS, torch.div, _T.div, _T.div_),
        ),
        (_Step(WrittenAttention._added, operands=2), (torch.add, _T.add, _T.add_)),
        (
            _Step(WrittenAttention._filled, operands=3),
            (torch.masked_fill, _T.masked_fill, _T.masked_fill_),
        ),
        (
            _Step(WrittenAttention._normalized, by_name=True),
            (functional.softmax, torch.softmax, _T.softmax),
        ),
        (_Step(WrittenAttention._dropped, by_name=True), (functional.dropout, torch.dropout)),
        (_Step(WrittenAttention._converted), (_T.to, _T.float, _T.type_as, _T.bfloat16)),
        (_Step(WrittenAttention._reshaped), (_T.view, _T.reshape, torch.reshape)),
    )
    for function in functions
}
# Functions that read a tensor's shape, dtype or device, and none of its elements.
_SHAPE_READS = frozenset(
    (_T.size, _T.dim, *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device")))
)
