"""Aliasing: find outputs that share memory with inputs, the module's tensors or one another.

In eager PyTorch ``x.view(-1)`` aliases ``x``: a mutation of one is seen in the other. Compiled code
returns new memory. So the bridge recreates an aliasing output as a view of the tensor that it
aliases, with the same strides and offset.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from tvmbridge.calls.bases import bases_of, covers, intermediate_base, overlap
from tvmbridge.calls.views import ViewWatch, has_other_history, shares_elements, viewed
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import storage_key
from tvmbridge.core.types import InputKind, IntermediateBase, OutputAlias

_OTHER_HISTORY = (
    "an output shares memory with another tensor, but is made under no_grad or by a custom "
    "autograd function: its gradient is not that of a view"
)

_Known = tuple[InputKind | None, int | str, torch.Tensor]


@dataclass(frozen=True)
class Sharing:
    """The memory that outputs and rebound tensors of the module share with other tensors.

    - ``aliases``: for each output, the tensor that it is a view of; None if it has its own memory.
    - ``bases``: intermediate view bases, which become further outputs. As a base of an alias, base
      ``i`` has the number ``len(aliases) + i``.
    - ``exchanged``: by name, the tensors of the module that forward rebound to shared memory. It is
      the memory of an output, an input, or another tensor of the module.

    Example: after ``self.cache = y[:1]; return y`` the buffer ``cache`` is in ``exchanged``, as a
    view of the output.
    """

    aliases: tuple[OutputAlias | None, ...]
    bases: tuple[IntermediateBase, ...]
    exchanged: Mapping[str, OutputAlias]


def aliases_of(
    outputs: Sequence[Any],
    inputs: Mapping[int, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    views: ViewWatch | None = None,
) -> Sharing:
    """Return the memory that the outputs share with inputs, the module's state and one another.

    Args:
        inputs: the tensor arguments of forward, by position; no two of them share memory.
        state: parameters, buffers and tensor attributes after forward, by name.
        views: the record of the view operators that ran; None if no gradient is needed.

    Raises:
        UnsupportedOperatorError: outputs share memory in a way that cannot be reproduced.
    """
    exchanged = {
        name: tensor
        for name, tensor in state.items()
        if any(_is_strided(o) and _is_more(o, tensor) for o in outputs)
    }
    known: list[_Known] = [
        *((InputKind.USER, position, tensor) for position, tensor in inputs.items()),
        *((InputKind.BUFFER, name, t) for name, t in state.items() if name not in exchanged),
    ]
    tensors = [*outputs, *exchanged.values()]
    groups: dict[int, list[int]] = {}
    found: list[OutputAlias | None] = []
    for number, output in enumerate(tensors):
        found.append(None)
        if not _is_strided(output):
            continue
        first = next(n for n, earlier in enumerate(tensors) if earlier is output)
        if first < number:
            found[number] = OutputAlias(None, first)
            continue
        found[number] = _base_among(output, known, views)
        if found[number] is None:
            _refuse_leaf(output)
            if output.numel():
                groups.setdefault(storage_key(output), []).append(number)
    bases: list[IntermediateBase] = []
    for members in groups.values():
        returned = [n for n in members if n < len(outputs)]
        number = len(outputs) + len(bases)
        intermediate = _relate(members, returned, tensors, found, number, views is not None)
        if intermediate is not None:
            bases.append(intermediate)
    made: dict[str, OutputAlias] = {}
    for name, alias in zip(exchanged, found[len(outputs) :], strict=True):
        if alias is not None and alias.shape is None and int(alias.key) >= len(outputs):
            alias = found[int(alias.key)]  # Two names have the same tensor.
        if alias is not None:
            made[name] = alias
    return Sharing(tuple(found[: len(outputs)]), tuple(bases), made)


def _is_more(output: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether ``output`` shares memory with ``held``, but has more elements or alone a gradient."""
    if not _is_strided(held) or not output.numel() or storage_key(output) != storage_key(held):
        return False
    return (output.requires_grad and not held.requires_grad) or not covers(held, output)


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def with_exchanged(
    sharing: Sharing,
    names: Collection[str],
    inputs: Mapping[int, torch.Tensor],
    state: Mapping[str, torch.Tensor],
) -> Sharing:
    """Return ``sharing`` with the rebound buffers that share memory with an input or state.

    Raises:
        UnsupportedOperatorError: forward rebound two buffers to tensors that share memory.
    """
    known: list[_Known] = [
        *((InputKind.USER, position, tensor) for position, tensor in inputs.items()),
        *((InputKind.BUFFER, name, t) for name, t in state.items() if name not in names),
    ]
    made = dict(sharing.exchanged)
    apart: dict[int, str] = {}
    for name in names:
        tensor = state.get(name)
        if name in made or tensor is None or not _is_strided(tensor) or not tensor.numel():
            continue
        alias = _base_among(tensor, known, None)
        if alias is not None:
            made[name] = alias
        elif apart.setdefault(storage_key(tensor), name) != name:
            raise UnsupportedOperatorError(
                f"forward exchanges {apart[storage_key(tensor)]} and {name} for tensors that share "
                "memory"
            )
    return replace(sharing, exchanged=made)


def refuse_exchanged(
    before: Mapping[str, torch.Tensor], outputs: Sequence[Any], sharing: Sharing
) -> None:
    """Refuse outputs that share memory with rebound buffers in a way that cannot be reproduced.

    torch.export treats the rebinding of a buffer as a write into it, so it does not distinguish the
    buffer's former tensor from the new one.

    Args:
        before: the former tensors of the rebound buffers, by name.

    Raises:
        UnsupportedOperatorError: an output shares memory with a buffer's former tensor, or a tensor
            that forward did not rebind is a part of an output.
    """
    for name in sharing.exchanged.keys() - before.keys():
        raise UnsupportedOperatorError(
            f"an output is made of the memory of {name}, but is not a view of it"
        )
    names = {storage_key(tensor): name for name, tensor in before.items()}
    for output, alias in zip(outputs, sharing.aliases, strict=True):
        if alias is None and _is_strided(output) and storage_key(output) in names:
            raise UnsupportedOperatorError(
                f"an output shares memory with what {names[storage_key(output)]} was before "
                "forward exchanged it"
            )


def _refuse_leaf(output: torch.Tensor) -> None:
    if output.requires_grad and output.grad_fn is None:
        raise UnsupportedOperatorError(
            "an output requires a gradient of its own, as forward has made it a leaf or a view "
            "under no_grad, where compiled code would give it the history of its value"
        )


def _base_among(
    output: torch.Tensor, known: Sequence[_Known], views: ViewWatch | None
) -> OutputAlias | None:
    for kind, key, tensor in known:
        if output is tensor:
            return OutputAlias(kind, key)
    for kind, key, tensor in known:
        if storage_key(output) == storage_key(tensor):
            alias = _view(kind, key, output, tensor)
            if views is not None:
                if has_other_history(output, tensor):
                    if not output.numel():  # An output without elements shares no memory.
                        return None
                    raise UnsupportedOperatorError(_OTHER_HISTORY)
                if output.requires_grad and shares_elements(tensor):
                    return replace(alias, steps=views.steps(output, tensor))
                if output.requires_grad and shares_elements(output):
                    # The backward of as_strided would sum the gradient of an expanded output
                    # element by element, in half precision if that is the dtype.
                    with suppress(UnsupportedOperatorError):
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
    returned: Sequence[int],
    outputs: Sequence[torch.Tensor],
    found: list[OutputAlias | None],
    new_number: int,
    differentiated: bool,
) -> IntermediateBase | None:
    """Describe outputs with one storage as views of one output, or of an intermediate base.

    The base is a returned output that fills the storage, if there is one, otherwise an intermediate
    base, which is returned. Outputs without common elements are not described: each of them may
    have its own memory.

    Args:
        found: gets the aliases of the members, by number.
        new_number: the number of an intermediate base.

    Raises:
        UnsupportedOperatorError: members overlap, but no tensor can be their base.
    """
    tensors = [outputs[n] for n in members]
    overlapping = overlap(tensors)
    if not overlapping and not any(map(shares_elements, tensors)):
        return None
    needs_grad = any(t.requires_grad for t in tensors)
    fit = [n for n in returned if _is_whole(outputs[n]) and outputs[n].requires_grad == needs_grad]
    intermediate = None if fit else intermediate_base(members, returned, outputs)
    if intermediate is None and not fit:
        if not overlapping:
            return None
        raise UnsupportedOperatorError(
            f"outputs {', '.join(map(str, members))} are overlapping views of one tensor, which "
            "cannot be computed as one more output"
        )
    number = fit[0] if intermediate is None else new_number
    base = outputs[number] if intermediate is None else bases_of(outputs, [intermediate])[0]
    if differentiated and any(has_other_history(t, base) for t in tensors):
        if not overlapping:
            return None
        raise UnsupportedOperatorError(_OTHER_HISTORY)
    for member in members:
        if intermediate is not None or member != number:
            found[member] = _view(None, number, outputs[member], base)
    return intermediate


def _is_whole(tensor: torch.Tensor) -> bool:
    bytes_held = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and bytes_held == tensor.untyped_storage().nbytes()


def made_again(alias: OutputAlias, base: torch.Tensor) -> torch.Tensor:
    """Return the output that ``alias`` describes, recreated from ``base``."""
    if alias.shape is None:
        return base
    if alias.steps:
        return viewed(base, alias.steps)
    source = base.detach() if alias.detached else base
    if (alias.shape, alias.stride, alias.offset) == (base.shape, base.stride(), 0):
        return source if alias.detached else base.view_as(base)
    return source.as_strided(alias.shape, alias.stride, base.storage_offset() + alias.offset)
