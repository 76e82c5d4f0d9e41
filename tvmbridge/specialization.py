"""A specialisation: one input signature, with the code compiled for it in each mode."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tvmbridge.arguments import Arguments, rebuild
from tvmbridge.autograd import TrainingCall
from tvmbridge.compiled import CompiledModule
from tvmbridge.noise import draw_noise, memory_order
from tvmbridge.packing import Packing
from tvmbridge.state import ModuleState
from tvmbridge.types import InputKind, OutputKind

_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True)
class Mode:
    """What the same signature is compiled for separately.

    ``training`` is the module's flag; ``needs_grad`` whether autograd records the call.
    """

    training: bool
    needs_grad: bool

    def __str__(self) -> str:
        return ("train" if self.training else "eval") + (" with gradients" * self.needs_grad)


class Signature:
    """Structure, shapes, dtypes, devices and constants of the arguments of a call."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves, self.spec = pytree.tree_flatten((args, dict(kwargs)))
        self.keywords = tuple(kwargs)
        self.num_args = len(args)
        # Arguments that are leaves themselves need no flattening at a call.
        arguments = [*args, *kwargs.values()]
        self.flat = len(leaves) == len(arguments) and all(map(operator.is_, leaves, arguments))
        self.tensors = [
            (i, leaf.shape, leaf.dtype, leaf.device)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        ]
        self.constants = [
            (i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)
        ]

    @property
    def device_type(self) -> str:
        """The device type of the tensors among the arguments."""
        return self.tensors[0][3].type if self.tensors else "cpu"

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The leaves of a call in the order of the signature; None: another structure."""
        if len(args) != self.num_args or kwargs.keys() != set(self.keywords):
            return None
        if self.flat:
            return [*args, *(kwargs[k] for k in self.keywords)]
        leaves, spec = pytree.tree_flatten((args, {k: kwargs[k] for k in self.keywords}))
        return leaves if spec == self.spec else None

    def mismatch(self, leaves: Sequence[Any]) -> str | None:
        """Why ``leaves`` do not fit the signature; None when they do."""
        for i, shape, dtype, device in self.tensors:
            leaf = leaves[i]
            if type(leaf) not in _PLAIN:
                return "an argument is not a plain tensor"
            if leaf.shape != shape:
                return "the shape of an input differs"
            if leaf.dtype is not dtype:
                return "the dtype of an input differs"
            if leaf.device != device:
                return "the device of an input differs"
            if leaf.layout is not torch.strided:
                return "the layout of an input differs"
        for i, value in self.constants:
            leaf = leaves[i]
            if leaf is not value and (type(leaf) is not type(value) or leaf != value):
                return "an argument that is not a tensor differs"
        return None

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
            for _, shape, dtype, _ in self.tensors
        )
        return f"({shapes})"


class Variant:
    """The code of one specialisation for one mode, ready to be called.

    Args:
        state: the dispatched module's state, which is read at each call.
        compiled: the code.
        packing: the module's packed weights.
    """

    def __init__(self, state: ModuleState, compiled: CompiledModule, packing: Packing) -> None:
        captured = compiled.captured
        self.state = state
        self.compiled = compiled
        self.calls = 0
        self._process = os.getpid()
        users = [d for d in captured.inputs if d.kind is InputKind.USER]
        self._positions = [d.position or 0 for d in users]
        self._input_grads = [(d.position or 0, d.requires_grad) for d in users]
        noise = captured.noise
        self._noise_order = [i for i, n in enumerate(noise) if n.drop_probability is None]
        self._noise_order += [i for i, n in enumerate(noise) if n.drop_probability is not None]
        # Random numbers stand in the order of memory, which follows that of the inputs.
        held = [d for d in captured.inputs if d.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
        self._orders = [(d.position or 0, memory_order(d.spec)) for d in users if noise]
        self._held_orders = [memory_order(d.spec) for d in held] if noise else []
        self._packing = packing
        self._packs = [
            (names, [state.names.index(name) for name in names]) for names in compiled.packs
        ]
        self._training = TrainingCall(compiled, packing) if compiled.split is not None else None

    def mismatch(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]) -> str | None:
        """Why the code cannot serve this call; None when it can."""
        if os.getpid() != self._process:
            return "the process was forked after compilation"
        reason = self.state.changed(tensors, check_grad=self._training is not None)
        if reason is None and self._training is not None:
            for position, requires_grad in self._input_grads:
                if leaves[position].requires_grad is not requires_grad:
                    return "requires_grad of an input differs"
        return reason or self._other_order(leaves, tensors)

    def _other_order(
        self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor | None]
    ) -> str | None:
        for position, order in self._orders:
            if memory_order(leaves[position]) != order:
                return "an input is laid out otherwise, so that random numbers would differ"
        for tensor, order in zip(tensors, self._held_orders, strict=False):
            if tensor is not None and memory_order(tensor) != order:
                return "a parameter is laid out otherwise, so that random numbers would differ"
        return None

    def try_out(self, leaves: Sequence[Any]) -> None:
        """Run forward and backward once and throw the results away.

        What cannot run must show itself now, when the module still has its own forward, and not
        in the middle of a training step. State, arguments and random state stay as they are.
        """
        with torch.random.fork_rng(devices=[]):
            tensors: Sequence[Any] = self.state.tensors()
            primals = [p.detach() for p in self._primals(leaves, tensors)]
            # Nothing is moved before the code is known to run.
            primals += [self._packing.copied([tensors[i] for i in s]) for _, s in self._packs]
            if self._training is None:
                self._run_inference(primals)
                return
            for position in self._training.gradient_of:
                primals[position].requires_grad_()
            with torch.enable_grad():
                outputs = [o for o in self._training(primals) if o.requires_grad]
            wanted = [primals[position] for position in self._training.gradient_of]
            cotangents = [torch.zeros_like(o) for o in outputs]
            torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)

    def _primals(self, leaves: Sequence[Any], tensors: Sequence[Any]) -> list[torch.Tensor]:
        """User inputs, state, draws and masks, in the order of the compiled code."""
        noise = draw_noise(self.compiled.captured.noise)
        primals = [leaves[p] for p in self._positions]
        primals += tensors
        primals += [noise[i] for i in self._noise_order]
        return primals

    def run(self, leaves: Sequence[Any], tensors: Sequence[Any], arguments: Arguments) -> Any:
        """Draw the noise, run the code, write mutations back, and rebuild the outputs."""
        primals = self._primals(leaves, tensors)
        for names, slots in self._packs:
            primals.append(self._packing.tensor(names, [tensors[i] for i in slots]))
        if self._training is not None:
            results: Sequence[torch.Tensor] = self._training(primals)
        else:
            results = self._run_inference(primals)
        self.calls += 1
        return self._assemble(results, leaves, tensors, arguments)

    def _run_inference(self, primals: list[torch.Tensor]) -> list[torch.Tensor]:
        loaded = self.compiled.loaded
        results = loaded.call("forward", loaded.prepare("forward", primals))
        for i in self.compiled.copied_outputs:
            results[i] = results[i].clone()
        return results

    def _assemble(
        self,
        results: Sequence[torch.Tensor],
        leaves: Sequence[Any],
        tensors: Sequence[Any],
        arguments: Arguments,
    ) -> Any:
        captured = self.compiled.captured
        computed = iter(results)
        flat: list[Any] = []
        for output in captured.outputs:
            if output.spec is None:
                value = output.value
            elif output.alias_of is not None:
                value = leaves[output.alias_of]
            else:
                value = next(computed)
            if output.kind is OutputKind.USER:
                flat.append(value)
            else:
                self._write_back(output.kind, output.target or "", value, leaves, tensors)
        return rebuild(flat, captured.out_spec, captured.changed_arguments, arguments)

    def _write_back(
        self,
        kind: OutputKind,
        target: str,
        value: torch.Tensor,
        leaves: Sequence[Any],
        tensors: Sequence[Any],
    ) -> None:
        if kind is OutputKind.BUFFER_MUTATION:
            written = tensors[self.state.names.index(target)]
        else:
            users = {d.name: d.position for d in self.compiled.captured.inputs}
            written = leaves[users[target] or 0]
        with torch.no_grad():
            written.copy_(value)


class Specialization:
    """One signature and its variants by mode; a mode whose compilation failed holds the reason."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.variants: dict[Mode, Variant] = {}
        self.failures: dict[Mode, str] = {}

    def rebound(self, memo: Mapping[int, Any], packing: Packing) -> Specialization:
        """The same code for a deep copy of the module, with counters at zero.

        Code that no longer fits the module is not copied: the copy could not tell.
        """
        copy = Specialization(self.signature)
        copy.variants = {
            mode: Variant(v.state.rebound(memo), v.compiled, packing)
            for mode, v in self.variants.items()
            if not v.state.replaced()
        }
        copy.failures = dict(self.failures)
        return copy
