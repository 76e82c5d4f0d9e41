"""How code is bound to a module: a digest that is part of the key of the code.

A process without the graph knows the binding from a file. A binding that somebody has changed there
has another digest, and no code is found for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tvmbridge.cache.key import digest_of
from tvmbridge.core.types import InputDescriptor, OutputDescriptor


class Split(Protocol):
    """The names and numbers of a :class:`SplitModule` that say which gradient is whose."""

    @property
    def primals(self) -> tuple[str, ...] | None: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def kept_outputs(self) -> tuple[tuple[int, tuple[int, ...]], ...]: ...
    @property
    def cotangent_of(self) -> tuple[int, ...]: ...
    @property
    def wanted(self) -> tuple[str, ...]: ...


def bound_entry(
    inputs: Sequence[InputDescriptor],
    outputs: Sequence[OutputDescriptor],
    convention: object,
    split: Split | None,
) -> str:
    """Return a digest of which tensors are the inputs, outputs and gradients of code.

    Args:
        convention: the pytree structure of forward's results.
    """
    lines = [_text(each) for each in (*inputs, *outputs, convention)]
    if split is not None and split.primals is not None:
        lines.append(repr(tuple(map(str, split.primals))))
        lines.append(repr((tuple(map(str, split.reads)), split.kept_outputs)))
        lines.append(repr((split.cotangent_of, tuple(map(str, split.wanted)))))
    return digest_of("\n".join(lines))


def _text(value: object) -> str:
    """Return the text of a value; empty for one that two processes do not have in common."""
    text = repr(value)
    return "" if " at 0x" in text else text
