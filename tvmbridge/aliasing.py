"""Aliasing: which outputs share memory with the module's tensors or with one another.

In eager PyTorch ``x.view(-1)`` is the memory of ``x``: who writes into one sees it in the other.
Compiled code returns memory of its own, so such outputs are made again from the tensor that they
share memory with, by their strides and offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tvmbridge.bases import bases_of, hidden_base, overlap
from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.types import HiddenBase, InputKind, OutputAlias
from tvmbridge.views import ViewWatch, root, shares_elements, viewed

_creation_meta = torch._C._autograd._get_creation_meta
_CreationMeta = torch._C._autograd.CreationMeta
# Views that autograd does not take for views of their base.
_OWN_HISTORY = {_CreationMeta.IN_CUSTOM_FUNCTION, _CreationMeta.NO_GRAD_MODE}
_OTHER_HISTORY = (
    "an output shares memory with another tensor, but is made under no_grad or by a custom autograd "
    "function: its gradient is not that of a view"
)

_Known = tuple[InputKind | None, int | str, torch.Tensor]


@dataclass(frozen=True)
class Sharing:
    """What each output shares memory with, and the hidden bases of some.

    The number of a hidden base, as the base of others, counts on behind the outputs.
    """

    aliases: tuple[OutputAlias | None, ...]
    bases: tuple[HiddenBase, ...] = ()


def aliases_of(
    outputs: Sequence[Any],
    inputs: Mapping[int, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    views: ViewWatch | None = None,
) -> Sharing:
    """What each output shares memory with.

    Args:
        outputs: the leaves of what forward returned.
        inputs: the tensors that it was given, by position; none of them shares memory.
        state: parameters, buffers and tensor attributes as they are after forward, by name.
        views: has seen how forward made its views; None: no gradient is asked for.

    Raises:
        UnsupportedOperatorError: outputs share memory in a way that cannot be made again.
    """
    known: list[_Known] = [
        *((InputKind.USER, position, tensor) for position, tensor in inputs.items()),
        *((InputKind.BUFFER, name, tensor) for name, tensor in state.items()),
    ]
    groups: dict[int, list[int]] = {}
    found: list[OutputAlias | None] = []
    for number, output in enumerate(outputs):
        found.append(None)
        if not isinstance(output, torch.Tensor) or output.layout is not torch.strided:
            continue
        first = next(n for n, earlier in enumerate(outputs) if earlier is output)
        if first < number:
            found[number] = OutputAlias(None, first)
            continue
        found[number] = _base_among(output, known, views)
        if found[number] is None:
            _refuse_leaf(output)
            if output.numel():
                groups.setdefault(_storage(output), []).append(number)
    bases: list[HiddenBase] = []
    for members in groups.values():
        hidden = _relate(members, outputs, found, len(outputs) + len(bases), views is not None)
        if hidden is not None:
            bases.append(hidden)
    return Sharing(tuple(found), tuple(bases))


def _refuse_leaf(output: torch.Tensor) -> None:
    if output.requires_grad and output.grad_fn is None:
        raise UnsupportedOperatorError(
            "an output requires a gradient of its own, as forward has made it a leaf or a view "
            "under no_grad, where compiled code would give it the history of its value"
        )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _base_among(
    output: torch.Tensor, known: Sequence[_Known], views: ViewWatch | None
) -> OutputAlias | None:
    for kind, key, tensor in known:
        if output is tensor:
            return OutputAlias(kind, key)
    for kind, key, tensor in known:
        if _storage(output) == _storage(tensor):
            alias = _view(kind, key, output, tensor)
            if views is not None:
                if _has_other_history(output, tensor):
                    raise UnsupportedOperatorError(_OTHER_HISTORY)
                if output.requires_grad and shares_elements(tensor):
                    return replace(alias, steps=views.steps(output, tensor))
            return alias
    return None


def _view(
    kind: InputKind | None, key: int | str, output: torch.Tensor, base: torch.Tensor
) -> OutputAlias:
    if (output.dtype, output.is_conj(), output.is_neg()) != (base.dtype, False, False):
        name = "another output" if kind is None else key
        raise UnsupportedOperatorError(
            f"an output shares memory with {name} but has another dtype or a conjugate bit"
        )
    return OutputAlias(
        kind,
        key,
        tuple(int(s) for s in output.shape),
        tuple(int(s) for s in output.stride()),
        int(output.storage_offset() - base.storage_offset()),
        tuple(int(s) for s in base.stride()),
        base.requires_grad and not output.requires_grad,
    )


def _relate(
    members: Sequence[int],
    outputs: Sequence[torch.Tensor],
    found: list[OutputAlias | None],
    hidden_number: int,
    differentiated: bool,
) -> HiddenBase | None:
    """Describe outputs of one storage by the one that is all of it, or by a hidden base.

    Outputs that are apart are not described: each may have memory of its own.
    """
    tensors = [outputs[n] for n in members]
    overlapping = overlap(tensors)
    if not overlapping and not any(map(shares_elements, tensors)):
        return None
    needs_grad = any(t.requires_grad for t in tensors)
    fit = [n for n in members if _is_whole(outputs[n]) and outputs[n].requires_grad == needs_grad]
    hidden = None if fit else hidden_base(members, outputs)
    if hidden is None and not fit:
        if not overlapping:
            return None
        raise UnsupportedOperatorError(
            f"outputs {', '.join(map(str, members))} are overlapping views of one tensor, which "
            "cannot be computed as one more output"
        )
    number = fit[0] if hidden is None else hidden_number
    base = outputs[number] if hidden is None else bases_of(outputs, [hidden])[0]
    if differentiated and any(_has_other_history(t, base) for t in tensors):
        if not overlapping:
            return None
        raise UnsupportedOperatorError(_OTHER_HISTORY)
    for member in members:
        if member != number:
            found[member] = _view(None, number, outputs[member], base)
    return hidden


def _has_other_history(output: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether gradients do not flow from ``output`` to ``base`` as from a view of it."""
    if not output.requires_grad:
        return False
    metas = {_creation_meta(t) for t in (output, base) if t._is_view()}
    return bool(metas & _OWN_HISTORY) or root(output) is not root(base)


def _is_whole(tensor: torch.Tensor) -> bool:
    bytes_held = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and bytes_held == tensor.untyped_storage().nbytes()


def made_again(alias: OutputAlias, base: torch.Tensor) -> torch.Tensor:
    """The output that ``alias`` describes, of the ``base`` of this call."""
    if alias.shape is None:
        return base
    if alias.steps:
        return viewed(base, alias.steps)
    source = base.detach() if alias.detached else base
    if (alias.shape, alias.stride, alias.offset) == (base.shape, base.stride(), 0):
        return source if alias.detached else base.view_as(base)
    return source.as_strided(alias.shape, alias.stride, base.storage_offset() + alias.offset)
