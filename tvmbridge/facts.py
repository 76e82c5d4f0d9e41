"""What eager PyTorch does when a module is differentiated, and what the captured graph lost of it.

The captured graph is forward alone. TVM's Gradient differentiates it, and would be silently wrong
wherever PyTorch does not differentiate forward as it is written: at ``detach`` and under
``no_grad``, in custom autograd functions, at operators whose decomposition has another derivative
than PyTorch's formula (at kinks, where one side is infinite). A rehearsal of forward finds these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, enable_reentrant_dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tvmbridge.custom_functions import AppliedFunction, FunctionWatch
from tvmbridge.custom_operator import refuse_numbers
from tvmbridge.draws import captured_draw, eager_draw
from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.gradients.operators import has_same_derivative
from tvmbridge.hoist import is_random
from tvmbridge.layouts import Layout
from tvmbridge.noise import OTHER_DRAWS
from tvmbridge.reached import reached_by_gradients
from tvmbridge.rehearsal import Rehearsal
from tvmbridge.types import OutputKind

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


class NothingToDifferentiateError(UnsupportedOperatorError):
    """No output of a module requires a gradient: it runs forward alone."""


@dataclass(frozen=True)
class GradientFacts:
    """How eager PyTorch differentiates a module.

    ``lost`` are the reasons why the captured graph alone must not be differentiated.
    ``cotangent_of`` are the numbers of the outputs that require a gradient, ``wanted`` the names
    of the primals that get one, and ``gradient_reads`` says for each of these from which
    cotangents (numbers among ``cotangent_of``): without any of them its gradient is None.
    ``layouts`` are those of the gradients, by number, for cotangents that lie as their outputs.
    ``draws`` counts the random draws of forward. ``custom``: custom autograd functions take part,
    whose backward may be anything; ``functions`` are those that have several outputs.
    """

    lost: tuple[str, ...]
    cotangent_of: tuple[int, ...]
    wanted: tuple[str, ...]
    gradient_reads: tuple[frozenset[int], ...]
    layouts: Mapping[int, Layout]
    draws: int
    custom: bool = False
    functions: tuple[AppliedFunction, ...] = ()


def gradient_facts(rehearsal: Rehearsal) -> GradientFacts:
    """Rehearse forward once on fake tensors and look at its gradient.

    Raises:
        NothingToDifferentiateError: no computed output requires a gradient.
        UnsupportedOperatorError: forward does with autograd what compiled code cannot repeat at
            each call (hooks, gradients left in buffers).
    """
    with rehearsal.mode:
        leaves = rehearsal.leaves_of(rehearsal.fakes())
        watch, uses = _FlowWatch(), _AutogradWatch()
        functions = FunctionWatch(watch.reasons)
        with functions.noticing(), watch, uses:
            outputs = rehearsal(leaves)
        watch.look_at(outputs, "an output")
        _refuse(rehearsal, outputs, uses)
        differentiable = [i for i, o in enumerate(outputs) if o.requires_grad]
        if not differentiable:
            raise NothingToDifferentiateError("no computed output requires a gradient")
        layouts: dict[int, Layout | None] = {}
        reached = reached_by_gradients(
            rehearsal, leaves, [outputs[i] for i in differentiable], layouts
        )
        applied = functions.applied([outputs[i] for i in differentiable])
    if not _draws_alike(watch, rehearsal):
        watch.reasons[OTHER_DRAWS] = None
    flowing = [i for i, reads in reached.items() if reads]
    return GradientFacts(
        lost=tuple(watch.reasons),
        cotangent_of=tuple(differentiable),
        wanted=tuple(rehearsal.inputs[i].name for i in flowing),
        gradient_reads=tuple(reached[i] for i in flowing),
        layouts={n: v for n, i in enumerate(flowing) if (v := layouts[i]) is not None},
        draws=len(watch.draws),
        custom=functions.custom,
        functions=applied,
    )


def refuse_other_draws(rehearsal: Rehearsal) -> None:
    """Rehearse forward without gradients and compare the random numbers that are drawn.

    Raises:
        UnsupportedOperatorError: the captured graph does not draw what eager PyTorch draws.
    """
    watch = _FlowWatch()
    with rehearsal.mode, watch:
        rehearsal([f.detach() for f in rehearsal.fakes()])
    if not _draws_alike(watch, rehearsal):
        raise UnsupportedOperatorError(OTHER_DRAWS)


def _draws_alike(watch: _FlowWatch, rehearsal: Rehearsal) -> bool:
    return watch.draws == [captured_draw(n) for n in rehearsal.captured.noise]


def _refuse(rehearsal: Rehearsal, outputs: Sequence[torch.Tensor], uses: _AutogradWatch) -> None:
    """Raise for what neither source of the joint function can repeat."""
    if uses.found:
        raise UnsupportedOperatorError(
            f"forward uses {', '.join(uses.found)}, which compiled code would not call again"
        )
    for output, described in zip(outputs, rehearsal.outputs, strict=True):
        if described.kind is not OutputKind.USER and output.requires_grad:
            raise UnsupportedOperatorError(
                f"forward writes a value that requires a gradient into {described.target}"
            )
    held = list(rehearsal.captured.constant_tensors.items())
    held += [
        (d.name, t)
        for d, t in zip(rehearsal.inputs, rehearsal.originals, strict=True)
        if not d.requires_grad
    ]
    for name, tensor in held:
        if tensor.requires_grad:
            raise UnsupportedOperatorError(
                f"{name} requires a gradient, but is neither a parameter nor an input"
            )


class _AutogradWatch(TorchFunctionMode):
    """Notes what forward installs that acts, in eager PyTorch, at each backward."""

    _USES: Mapping[Any, str] = {
        torch.Tensor.register_hook: "Tensor.register_hook",
        torch.Tensor.register_post_accumulate_grad_hook: "a hook on a parameter",
        torch.Tensor.retain_grad: "Tensor.retain_grad",
        torch.Tensor.backward: "Tensor.backward",
    }

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._USES:
            self.found[self._USES[func]] = None
        return func(*args, **(kwargs or {}))


class _FlowWatch(TorchDispatchMode):
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
            self._look_at_writes(func, args)
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

    def _look_at_writes(self, func: Any, args: Sequence[Any]) -> None:
        """Note what is written out of autograd's sight: gradients flow as if it were not."""
        if torch.is_grad_enabled():
            return
        arguments = zip(func._schema.arguments, args, strict=False)
        written = [v for a, v in arguments if a.alias_info is not None and a.alias_info.is_write]
        if any(_is_cut_off(t) or t.requires_grad for t in _floating(written)):
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
