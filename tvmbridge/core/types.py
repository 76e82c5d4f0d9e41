"""The frozen data types that travel from capture to dispatch.

Words used here with one meaning: a *primal* is an input of the forward function, a *cotangent* the
gradient that arrives for an output, a *residual* a value that forward keeps for backward, *noise*
a random draw that PyTorch makes before the compiled code runs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.core.torch_private import pytree

# Stands, among the results of a traced forward, for one that the epilogue computes.
DEFERRED = "tvmbridge.deferred."


class InputKind(enum.Enum):
    """Where the value of a graph input comes from at a call."""

    USER = "user"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    CONSTANT = "constant"

    @property
    def is_of_module(self) -> bool:
        """Whether it is a tensor that the module holds by a name, looked up at each call."""
        return self in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.ATTRIBUTE)


class OutputKind(enum.Enum):
    """What becomes of a graph output after a call."""

    USER = "user"
    BUFFER_MUTATION = "buffer_mutation"
    INPUT_MUTATION = "input_mutation"


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides (in elements), dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a real or fake tensor with static shape."""
        return cls(
            tuple(int(s) for s in tensor.shape),
            tuple(int(s) for s in tensor.stride()),
            tensor.dtype,
            tensor.device,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor of this spec."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """A fresh tensor of this spec, with any values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class ComputedTensor:
    """A tensor whose values a draw reads: the node ``name`` of the captured graph computes it."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True)
class NoiseDescriptor:
    """One random draw, hoisted out of the graph and made by PyTorch before each call.

    ``op`` is the ATen overload that draws, called as ``op(*args, **kwargs)``; a ``TensorSpec``
    among the arguments stands for a fresh tensor of that spec, of which the operator reads
    nothing but its metadata, a ``ComputedTensor`` for one whose values it reads.
    ``drop_probability`` is set for dropout, whose draw is the mask of the elements that stay (one
    byte an element). ``result`` is the number of the draw among several results of ``op``.
    """

    name: str
    spec: TensorSpec
    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    drop_probability: float | None = None
    result: int | None = None

    @property
    def computed(self) -> tuple[ComputedTensor, ...]:
        """The tensors whose values the draw reads, in the order of the arguments."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return tuple(leaf for leaf in leaves if isinstance(leaf, ComputedTensor))


@dataclass(frozen=True)
class EagerPrologue:
    """The part of a captured graph that draws need, which PyTorch runs before the compiled code.

    ``module`` makes all draws in program order, each as eager PyTorch does, and what they read;
    it returns them as a tuple. ``reads`` are the names of the graph's inputs that it takes.
    """

    module: fx.GraphModule
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """How forward leaves a value in an attribute of a module at each call.

    into: where what it leaves goes: ``"place"`` of what was there, ``"end"`` of the list that is
        there, or its ``"content"``.
    count: what is added to the number that is there; None: it is no such number.
    """

    into: str = "place"
    count: int | None = None


@dataclass(frozen=True)
class Epilogue:
    """What runs eagerly after the compiled code.

    ``graph`` has one placeholder for each of the ``num_read`` tensors that are the last results of
    forward; ``functions`` counts its functions by name.
    """

    graph: fx.Graph
    num_read: int
    functions: Mapping[str, int]

    def resolve(self, flat: Sequence[Any]) -> list[Any]:
        """The leaves of what forward returns, from those of what the traced forward returns."""
        read = flat[len(flat) - self.num_read :]
        deferred = fx.Interpreter(nn.Module(), graph=self.graph).run(*read)
        return [
            deferred[int(leaf.removeprefix(DEFERRED))]
            if isinstance(leaf, str) and leaf.startswith(DEFERRED)
            else leaf
            for leaf in flat[: len(flat) - self.num_read]
        ]


@dataclass(frozen=True)
class InputDescriptor:
    """One input of the captured graph.

    ``target`` is the dotted name of the parameter, buffer or attribute; ``position`` the index of
    a user input among the flattened leaves of ``(args, kwargs)``.
    """

    name: str
    kind: InputKind
    spec: TensorSpec
    target: str | None = None
    position: int | None = None
    requires_grad: bool = False


@dataclass(frozen=True)
class ViewStep:
    """A view ``operator`` with its arguments behind the tensor; ``index``: of which result."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None


@dataclass(frozen=True)
class OutputAlias:
    """An output that shares memory with another tensor, its base.

    ``kind`` and ``key`` name the base: a user input by its position among the leaves, a tensor of
    the module (BUFFER, whatever it is) by its dotted name, or (None) another user output by its
    number. ``shape`` None says that the output is the base itself; otherwise it is the view with
    these strides, ``offset`` elements from where the base begins, of a base with the strides
    ``base_stride``. ``detached``: no gradient flows from it to the base. ``steps``, if there are
    any, make it where strides do not tell which elements of the base it has.
    """

    kind: InputKind | None
    key: int | str
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    base_stride: tuple[int, ...] = ()
    detached: bool = False
    steps: tuple[ViewStep, ...] = ()


@dataclass(frozen=True)
class IntermediateBase:
    """A tensor that is not returned, but of which outputs are views: that of ``output``, a number.

    ``order`` are its dimensions in the order of memory, from the outermost to the innermost.
    """

    output: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class OutputDescriptor:
    """One output of the captured graph.

    A user output that is not computed has ``spec`` None: it is the constant ``value`` (a number,
    a string, None). Any output may be made again as ``alias`` says. ``rebinds``: a buffer that gets
    another tensor, and is not written into.
    """

    kind: OutputKind
    name: str
    spec: TensorSpec | None
    target: str | None = None
    value: Any = None
    alias: OutputAlias | None = None
    rebinds: bool = False

    @property
    def is_computed(self) -> bool:
        """Whether compiled code returns it: it is neither a constant nor a view of a tensor."""
        return self.spec is not None and self.alias is None


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: how many candidates it rewrote, and which it ``declined`` and why."""

    name: str
    options: str
    seconds: float
    rewrites: int
    declined: tuple[str, ...]
    bindings_before: int
    bindings_after: int
    hash_before: int
    hash_after: int

    @property
    def changed(self) -> bool:
        """Whether the module differs structurally after the pass."""
        return self.hash_before != self.hash_after


@dataclass(frozen=True)
class ValueDescriptor:
    """A named tensor that crosses the border between forward and backward.

    ``made_by`` is the operator that computes it: its name in Relax, or the overload of an ATen
    call; ``draw`` for a random draw, ``input`` for a copy of an input.
    """

    name: str
    spec: TensorSpec
    made_by: str
