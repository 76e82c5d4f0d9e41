"""Aliasing: which outputs share memory with the module's tensors or with one another.

In eager PyTorch ``x.view(-1)`` is the memory of ``x``: who writes into one sees it in the other.
Compiled code returns memory of its own, so such outputs are made again from the tensor that they
share memory with, by their strides and offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from tvmbridge.errors import UnsupportedOperatorError
from tvmbridge.types import InputKind, OutputAlias
from tvmbridge.views import ViewWatch, shares_elements, viewed

_LARGEST_COMPARED = 1 << 22


def aliases_of(
    outputs: Sequence[Any],
    inputs: Mapping[int, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    views: ViewWatch | None = None,
) -> tuple[OutputAlias | None, ...]:
    """What each output shares memory with.

    Args:
        outputs: the leaves of what forward returned.
        inputs: the tensors that it was given, by position; none of them shares memory.
        state: parameters, buffers and tensor attributes as they are after forward, by name.
        views: has seen how forward made its views; None: no gradient is asked for.

    Raises:
        UnsupportedOperatorError: outputs share memory in a way that cannot be made again.
    """
    known: list[tuple[InputKind | None, int | str, torch.Tensor]] = [
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
        base = _base_among(output, known, views)
        if base is not None and base.shape is not None and first < number:
            found[number] = OutputAlias(None, first)
        elif base is not None:
            found[number] = base
        elif output.numel():
            groups.setdefault(_storage(output), []).append(number)
    for members in groups.values():
        if len(members) > 1:
            _relate(members, outputs, found)
    return tuple(found)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _base_among(
    output: torch.Tensor,
    known: Sequence[tuple[InputKind | None, int | str, torch.Tensor]],
    views: ViewWatch | None,
) -> OutputAlias | None:
    for kind, key, tensor in known:
        if output is tensor:
            return OutputAlias(kind, key)
    for kind, key, tensor in known:
        if _storage(output) == _storage(tensor):
            alias = _view(kind, key, output, tensor)
            if views is not None and output.requires_grad and output.grad_fn is None:
                raise UnsupportedOperatorError(
                    f"an output is a view of {key} that is made under no_grad: it requires a "
                    "gradient of its own, which compiled code would hand to its base"
                )
            if views is not None and output.requires_grad and shares_elements(tensor):
                return replace(alias, steps=views.steps(output, tensor))
            return alias
    return None


def _view(
    kind: InputKind | None, key: int | str, output: torch.Tensor, base: torch.Tensor
) -> OutputAlias:
    if (output.dtype, output.is_conj(), output.is_neg()) != (base.dtype, False, False):
        raise UnsupportedOperatorError(
            f"an output shares memory with {key} but has another dtype or a conjugate bit"
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
    members: Sequence[int], outputs: Sequence[torch.Tensor], found: list[OutputAlias | None]
) -> None:
    """Describe outputs of one storage by the one that is all of it, or see that they are apart."""
    whole = next((n for n in members if _is_whole(outputs[n])), None)
    for number in members:
        first = next(n for n in members if outputs[n] is outputs[number])
        if first != number:
            found[number] = OutputAlias(None, first)
        elif whole is not None and number != whole:
            found[number] = _view(None, whole, outputs[number], outputs[whole])
    if whole is None and _overlap([outputs[n] for n in members if found[n] is None]):
        raise UnsupportedOperatorError(
            f"outputs {', '.join(map(str, members))} are overlapping views of one tensor, "
            "which is not among the outputs"
        )


def _is_whole(tensor: torch.Tensor) -> bool:
    bytes_held = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and bytes_held == tensor.untyped_storage().nbytes()


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of them have an element in common."""
    if len(tensors) < 2:
        return False
    spans = sorted((t.storage_offset(), t.storage_offset() + _extent(t)) for t in tensors)
    if all(end <= start for (_, end), (start, _) in pairwise(spans)):
        return False
    size = max(end for _, end in spans)
    if size > _LARGEST_COMPARED or len({t.dtype for t in tensors}) > 1:
        return True
    with torch.utils._python_dispatch._disable_current_modes():
        used = torch.zeros(size, dtype=torch.bool)
        for tensor in tensors:
            mine = used.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if bool(mine.any()):
                return True
            mine.fill_(True)
    return False


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


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
