"""The frozen data types that all stages from capture to dispatch share.

Words with one meaning here: a *primal* is an input of the forward function. A *cotangent* is the
gradient that arrives for an output. A *residual* is a value that forward keeps for backward.
*Noise* is a random draw, which PyTorch makes before the compiled code runs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from tvmbridge.core.torch_private import pytree

# Prefix of a string that replaces, among a traced forward's results, one of the epilogue.
DEFERRED = "tvmbridge.deferred."


class InputKind(enum.Enum):
    """The source of a graph input's value at a call."""

    USER = "user"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    CONSTANT = "constant"

    @property
    def is_of_module(self) -> bool:
        """Whether each call looks the tensor up by its name in the module."""
        return self in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.ATTRIBUTE)


class OutputKind(enum.Enum):
    """The use of a graph output after a call: returned, or written into a buffer or an argument."""

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
        """Return the spec of a real or fake tensor with a static shape."""
        return cls(
            tuple(int(s) for s in tensor.shape),
            tuple(int(s) for s in tensor.stride()),
            tensor.dtype,
            tensor.device,
        )

    @property
    def nbytes(self) -> int:
        """The size in bytes of a contiguous tensor of this shape and dtype."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Return a new uninitialized tensor of this spec."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class ComputedTensor:
    """A tensor whose values a draw reads, computed by the node ``name`` of the captured graph."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True)
class NoiseDescriptor:
    """One random draw, which PyTorch makes before each call and passes to the compiled code.

    - ``name``: the name of the input for the draw.
    - ``spec``: the spec of the drawn tensor.
    - ``op``: the ATen overload that draws, called as ``op(*args, **kwargs)``.
    - ``args``, ``kwargs``: its arguments. A ``TensorSpec`` among them is replaced by a new tensor
      of that spec, since the operator reads only its metadata. A ``ComputedTensor`` is a tensor
      whose values the operator reads.
    - ``drop_probability``: set for dropout only; the draw is then the mask of the elements that are
      kept, with one byte an element.
    - ``result``: the number of the draw among several results of ``op``; None for a single one.
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
    """A part of a captured graph that PyTorch runs before the compiled code, to make the draws.

    - ``module``: makes all draws in program order, exactly as eager PyTorch, and computes the
      values that they read; it returns the draws as a tuple.
    - ``reads``: the names of the graph's inputs that ``module`` takes.
    """

    module: fx.GraphModule
    reads: tuple[str, ...]


# An attribute of a module: the submodule's name, the attribute's name.
Key: TypeAlias = tuple[str, str]
# The place of a number: the same, then the steps into a container (see number_places.py).
NumberKey: TypeAlias = tuple[Any, ...]


def attribute_key(dotted: str) -> Key:
    """Return the key of an attribute with this dotted name in the module."""
    path, _, attribute = dotted.rpartition(".")
    return path, attribute


@dataclass(frozen=True)
class Left:
    """How forward stores a value in an attribute of a module at each call.

    - ``into``: ``"place"`` assigns the attribute; ``"end"`` appends items to the list that it
      holds; ``"content"`` replaces the items of that list.
    - ``number``: for a number, returns the value that forward assigns, for the value that ``of``
      had before the call; otherwise None.
    - ``of``: the place of a number (see :mod:`tvmbridge.core.number_places`); None: the same place.
    """

    into: str = "place"
    number: Callable[[Any], Any] | None = None
    of: tuple[Any, ...] | None = None

    @property
    def is_added(self) -> bool:
        """Whether the value depends on what the call before has left."""
        return self.number is not None or self.into == "end"


@dataclass(frozen=True)
class Epilogue:
    """The end of forward, which runs eagerly after the compiled code.

    - ``graph``: the FX graph, with one placeholder for each tensor that it reads.
    - ``num_read``: the number of these tensors; they are the last results of the compiled forward.
    - ``functions``: the names of the functions that the graph calls, with the number of calls.
    """

    graph: fx.Graph
    num_read: int
    functions: Mapping[str, int]

    def resolve(self, flat: Sequence[Any]) -> list[Any]:
        """Run the graph, and return forward's result leaves.

        Args:
            flat: the leaves that the compiled code returns: forward's results, with a
                ``DEFERRED`` string for each result of this graph, then the ``num_read`` tensors.
        """
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

    - ``target``: the dotted name of the parameter, buffer, attribute or constant; None for a user
      input.
    - ``position``: for a user input, its index among the leaves of ``(args, kwargs)``; else None.
    """

    name: str
    kind: InputKind
    spec: TensorSpec
    target: str | None = None
    position: int | None = None
    requires_grad: bool = False


@dataclass(frozen=True)
class ViewStep:
    """One call of a view operator, ``operator(tensor, *args, **kwargs)``.

    - ``index``: the number of the view among several results; None for a single result.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None


@dataclass(frozen=True)
class OutputAlias:
    """How to create an output that shares memory with another tensor, its base.

    - ``kind``: the kind of base: USER for a user input, BUFFER for any tensor of the module, None
      for another user output.
    - ``key``: the base: the input's position among the leaves, the dotted name of the module's
      tensor, or the number of the output.
    - ``shape``: the shape of the view; None if the output is the base itself.
    - ``stride``, ``offset``: the strides of the view, and its offset in elements from the base.
    - ``base_stride``: the strides of the base that the view was taken of.
    - ``detached``: whether no gradient flows from the output to the base.
    - ``steps``: view operators that create the output, if strides alone do not describe it.
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
    """A tensor that forward does not return, but that some of forward's outputs are views of.

    - ``output``: the number of an output that is a view of it.
    - ``order``: the dimensions of the base in memory order, from the outermost to the innermost.
    """

    output: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class OutputDescriptor:
    """One output of the captured graph.

    - ``spec``: the spec of the tensor; None for a constant.
    - ``target``: the name of the buffer or argument that the output is written to; None for a user
      output.
    - ``value``: the constant, if ``spec`` is None: a number, a string or None.
    - ``alias``: how to create the output from a tensor that it shares memory with; None if it
      shares none.
    - ``rebinds``: whether the buffer's name gets a new tensor, instead of a write into the old one.
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
        """Whether compiled code returns the output: it is neither a constant nor an alias."""
        return self.spec is not None and self.alias is None


@dataclass(frozen=True)
class PassRecord:
    """The record of one run of a pass.

    - ``name``, ``options``: the pass and its options as text.
    - ``seconds``: how long it took.
    - ``rewrites``: how many candidates it rewrote.
    - ``declined``: one sentence for each candidate that it left unchanged, with the reason.
    - ``bindings_before``, ``bindings_after``: the number of bindings in the module.
    - ``changed``: whether the module differs structurally after the pass.
    """

    name: str
    options: str
    seconds: float
    rewrites: int
    declined: tuple[str, ...]
    bindings_before: int
    bindings_after: int
    changed: bool


@dataclass(frozen=True)
class ValueDescriptor:
    """A named tensor that forward passes to backward.

    - ``made_by``: the operator that computes it, by its name in Relax or the overload of an ATen
      call; ``draw`` for a random draw, ``input`` for a copy of an input.
    """

    name: str
    spec: TensorSpec
    made_by: str
