"""A captured graph: its program, how it is called, and what it takes for granted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram

from tvmbridge.core.assumptions import Answer, Check, OutsideValue, Question
from tvmbridge.core.autocast import Autocast
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import (
    EagerPrologue,
    Epilogue,
    InputDescriptor,
    IntermediateBase,
    Left,
    NoiseDescriptor,
    OutputDescriptor,
)


@dataclass(frozen=True)
class CallingConvention:
    """How a call's arguments become the graph's inputs, and its outputs what forward returns.

    ``in_spec`` and ``out_spec`` are the structures of ``(args, kwargs)`` and of what forward
    returns. ``changed_arguments`` are the places of the container arguments that forward changes:
    their content is among the outputs. ``assigned`` are the attributes that each call gives a
    value, by (submodule's name, attribute's name), with it. ``left`` are those in which each call
    leaves what it computes: with them the results are ``(results, left)``. ``bases`` are user
    outputs behind all that are returned, from which views among the outputs are made again. The
    last user outputs tell whether the ``checks`` have passed.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    changed_arguments: tuple[int | str, ...] = ()
    assigned: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    left: Mapping[tuple[str, str], Left] = field(default_factory=dict)
    bases: tuple[IntermediateBase, ...] = ()
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Assumptions:
    """What the graph was specialised on, and what guards compare at each call.

    ``training`` is the module's flag. ``constants`` holds the non-tensor leaves of
    ``(args, kwargs)`` by position. ``aliases`` gives for dotted names that share a tensor (tied
    weights) the first name of it. ``values`` are the attributes that forward read, by (submodule's
    name, attribute's name), ``outside`` what it read beside those. ``foreign`` are tensors that it
    read though nobody gave them to it; the graph has them as constants. ``asks``: what it asked of
    tensors beyond shapes and dtypes. ``normed`` names the attributes that hooks of PyTorch's
    (``weight_norm``, ``spectral_norm``) exchange at each call. ``answers``: what it read of the
    values of small buffers. ``is_compiling``: what ``torch.compiler.is_compiling()`` said.
    ``autocast`` is the state of autocast that forward was called under.
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


@dataclass(frozen=True)
class CapturedGraph:
    """A module's functional graph with a description of every input and output.

    ``noise`` are its random draws, which are inputs. ``constant_tensors`` are the tensors that the
    program holds itself. ``outside`` are the tensors that forward reads though the module has no
    name for them, by the names that the inputs have as their targets. ``prologue`` makes the draws
    where one of them reads values (None where none does), and ``epilogue`` is what runs eagerly
    after the compiled code, on the last of the outputs.
    """

    program: ExportedProgram
    inputs: tuple[InputDescriptor, ...]
    outputs: tuple[OutputDescriptor, ...]
    noise: tuple[NoiseDescriptor, ...]
    constant_tensors: Mapping[str, torch.Tensor]
    convention: CallingConvention
    assumptions: Assumptions
    outside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    prologue: EagerPrologue | None = None
    epilogue: Epilogue | None = None

    @property
    def device(self) -> torch.device:
        """The one device that all inputs of the graph live on."""
        for descriptor in self.inputs:
            return descriptor.spec.device
        return torch.device("cpu")
