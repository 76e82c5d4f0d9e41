"""A captured graph: its program, its calling convention, and its assumptions."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram

from tvmbridge.core.assumptions import Answer, Check, OutsideValue, Question
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.carried import CarriedPlace
from tvmbridge.core.number_inputs import NumberRange
from tvmbridge.core.reached import reached
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import (
    EagerPrologue,
    Epilogue,
    InputDescriptor,
    InputKind,
    IntermediateBase,
    Left,
    NoiseDescriptor,
    NumberKey,
    OutputDescriptor,
    OutputKind,
)

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_BATCH_NORMS = (_BATCH_NORM, torch.ops.aten._batch_norm_with_update_functional.default)
# The positions of a batch norm's running statistics among its arguments, and of its training flag.
_RUNNING, _TRAINING = (3, 4), 5


@dataclass(frozen=True)
class CallingConvention:
    """How arguments become inputs of the graph, and how its outputs become forward's results.

    Attributes of modules are keyed by (submodule's name, attribute's name).

    - ``in_spec``: the pytree structure of ``(args, kwargs)``.
    - ``out_spec``: the pytree structure of forward's results.
    - ``changed_arguments``: the positions or keywords of container arguments that forward changes;
      the graph returns their new contents too.
    - ``assigned``: the attributes that each call sets to the same value, with this value.
    - ``left``: the attributes in which each call stores a computed value. If there are any, the
      traced forward returns ``(results, left)``.
    - ``bases``: tensors that forward does not return, but that some of its results are views of;
      the graph returns them as additional user outputs.
    - ``checks``: the checks of data; the last user outputs say whether each of them passed.
    - ``numbers``: by the position of a leaf of the arguments, the values of a Python number for
      which the graph holds; the graph reads it as a tensor.
    - ``held``: by the name of an input, the attribute whose number is this input, and the values
      for which the graph holds.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    changed_arguments: tuple[int | str, ...] = ()
    assigned: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    left: Mapping[NumberKey, Left] = field(default_factory=dict)
    bases: tuple[IntermediateBase, ...] = ()
    checks: tuple[Check, ...] = ()
    numbers: Mapping[int, NumberRange] = field(default_factory=dict)
    held: Mapping[str, tuple[NumberKey, NumberRange]] = field(default_factory=dict)


@dataclass(frozen=True)
class Assumptions:
    """The facts that the graph was specialised on; guards compare them at each call.

    - ``training``: the module's training flag.
    - ``constants``: the leaves of ``(args, kwargs)`` that are no tensors, by position.
    - ``aliases``: for dotted names that share a tensor (tied weights), the first such name.
    - ``values``: the attributes that forward read, by (submodule's name, attribute's name).
    - ``outside``: other values that forward read, such as globals.
    - ``foreign``: tensors that forward read but that are no arguments, parameters or buffers; they
      are constants of the graph.
    - ``asks``: the properties of tensors, beyond shapes and dtypes, that forward asked for.
    - ``normed``: the attributes that PyTorch's ``weight_norm`` and ``spectral_norm`` hooks replace
      at each call.
    - ``answers``: the values that forward computed from small buffers.
    - ``is_compiling``: the result of ``torch.compiler.is_compiling()`` in the trace.
    - ``autocast``: the autocast state that forward was called under.
    - ``executed``: the code of the user's functions that forward ran.
    """

    training: bool
    constants: Mapping[int, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    outside: tuple[OutsideValue, ...] = ()
    foreign: tuple[torch.Tensor, ...] = ()
    asks: frozenset[Question] = frozenset()
    normed: tuple[str, ...] = ()
    answers: tuple[Answer, ...] = ()
    is_compiling: bool = True
    autocast: Autocast = ()
    executed: tuple[CodeType, ...] = ()


@dataclass(frozen=True)
class CapturedGraph:
    """A module's functional graph, with a description of every input and output.

    - ``program``: the exported program.
    - ``inputs``, ``outputs``: one descriptor for each input and output of the program.
    - ``noise``: the random draws, which are inputs of the compiled code.
    - ``constant_tensors``: the tensors that the program itself holds, by name.
    - ``convention``: how the graph is called.
    - ``assumptions``: the facts that the graph was specialised on.
    - ``outside``: tensors that forward reads but that no name in the module reaches, by the
      ``target`` of their input.
    - ``carried``: the places of tensors in containers that the previous call has left in
      attributes, by the ``target`` of their input.
    - ``prologue``: a graph that makes the draws if one of them reads computed values; else None.
    - ``epilogue``: a graph that runs eagerly after the compiled code, on its last outputs, or None.
    - ``read``: the result of :meth:`read_by_results` if there is no program; otherwise None.
    """

    program: ExportedProgram
    inputs: tuple[InputDescriptor, ...]
    outputs: tuple[OutputDescriptor, ...]
    noise: tuple[NoiseDescriptor, ...]
    constant_tensors: Mapping[str, torch.Tensor]
    convention: CallingConvention
    assumptions: Assumptions
    outside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    carried: Mapping[str, CarriedPlace] = field(default_factory=dict)
    prologue: EagerPrologue | None = None
    epilogue: Epilogue | None = None
    read: frozenset[str] | None = None

    @property
    def device(self) -> torch.device:
        """The device of all inputs of the graph, or of its outputs if it has no inputs."""
        specs = (d.spec for described in (self.inputs, self.outputs) for d in described)
        return next((spec.device for spec in specs if spec is not None), torch.device("cpu"))

    @property
    def primals(self) -> list[InputDescriptor]:
        """The inputs that each call provides: all but the tensors that the program holds."""
        return [d for d in self.inputs if d.kind is not InputKind.CONSTANT]

    def read_by_results(self) -> frozenset[str]:
        """Return the names of the inputs that results of forward depend on."""
        if self.read is not None:
            return self.read
        ends: Any = self.program.graph.output_node().args[0]
        pairs = zip(ends, self.outputs, strict=True)
        users = [n for n, o in pairs if isinstance(n, fx.Node) and o.kind is OutputKind.USER]
        read = reached(users, _operands)
        return frozenset(node.name for node in read if node.op == "placeholder")


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that the value of ``node`` depends on.

    A batch norm in training computes only the new running statistics from the old ones.
    """
    norm, number = node.args if node.target is operator.getitem else (None, 0)
    if not isinstance(norm, fx.Node) or norm.target not in _BATCH_NORMS:
        return node.all_input_nodes
    if norm.target is _BATCH_NORM and norm.args[_TRAINING] is not True:
        return node.all_input_nodes
    if norm.target._schema.returns[cast(int, number)].name.startswith("running"):
        return node.all_input_nodes
    read = [a for i, a in enumerate(norm.args) if i not in _RUNNING]
    return [a for a in read if isinstance(a, fx.Node)]
