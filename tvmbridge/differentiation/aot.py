"""Record the joint function from PyTorch's autograd, with PyTorch's own derivative formulas.

The module's forward and its gradient run on fake tensors under PyTorch's autograd, and every ATen
operator of both is recorded. The recorded graph is the joint function exactly as eager PyTorch
computes it: PyTorch itself has applied ``detach``, ``no_grad``, custom autograd functions and the
conventions of each derivative. Then the random draws become inputs, writes become functional, and
the frontend converts the graph to Relax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tvmbridge.backends import is_on_host
from tvmbridge.core.errors import BridgeError, CaptureError, UnsupportedOperatorError, first_line
from tvmbridge.core.torch_private import storage_key
from tvmbridge.core.types import NoiseDescriptor, PassRecord, TensorSpec
from tvmbridge.differentiation.custom_functions import AppliedFunction, FunctionWatch
from tvmbridge.differentiation.differentiate import JointModule
from tvmbridge.differentiation.facts import GradientFacts
from tvmbridge.differentiation.rehearsal import Rehearsal
from tvmbridge.frontend.importer import GraphInput, ImportedModule, import_fx_graph
from tvmbridge.graph_capture.hoist import hoist_draws
from tvmbridge.graph_capture.host_constants import move_in_module
from tvmbridge.graph_capture.open_masks import drop_open_masks
from tvmbridge.graph_capture.trace.conversions import checks_of_numbers
from tvmbridge.graph_capture.trace.decompositions import joint_decomposition_table, sort_as_eager
from tvmbridge.graph_capture.trace.linear_export import sources_put_off
from tvmbridge.graph_capture.trace.reshapes import give_memory
from tvmbridge.passes.base import free_prefix
from tvmbridge.passes.relax.append_cotangents import COTANGENT_PREFIX
from tvmbridge.pipeline import recorded_passes, run_passes, zapp_passes

aten = torch.ops.aten


@dataclass(frozen=True)
class TracedJoint:
    """A joint function, the random draws that it takes, and the graph that it was imported from.

    The placeholders of ``graph`` are the primals, the cotangents and the draws, in this order.
    """

    joint: JointModule
    noise: tuple[NoiseDescriptor, ...]
    imported: ImportedModule
    graph: fx.GraphModule


def trace_joint(
    rehearsal: Rehearsal, facts: GradientFacts, records: list[PassRecord]
) -> TracedJoint:
    """Record the joint function of a module, with PyTorch's derivatives.

    Raises:
        UnsupportedOperatorError: an operator of forward or backward cannot be compiled.
    """
    traced, functions = _record(rehearsal, facts)
    drop_open_masks(traced.graph)
    _give_memory(traced)
    given_names = [d.name for d in rehearsal.inputs]
    noise = hoist_draws(
        traced.graph,
        rehearsal.mode,
        rehearsal.captured.noise,
        facts.draws,
        free_prefix("noise_", given_names),
    )
    functional = _functionalize(traced, rehearsal)
    prefix = free_prefix(COTANGENT_PREFIX, given_names)
    cotangents = tuple(f"{prefix}{number}" for number in facts.cotangent_of)
    names = [*given_names, *cotangents, *(n.name for n in noise)]
    placeholders = functional.graph.find_nodes(op="placeholder")
    inputs = [
        GraphInput(name, TensorSpec.of(node.meta["val"]), node)
        for name, node in zip(names, placeholders, strict=True)
    ]
    count = len(rehearsal.inputs)
    given, arriving = inputs[:count], inputs[count : count + len(cotangents)]
    drawn = _in_calling_order(inputs[count + len(cotangents) :], noise)
    imported = import_fx_graph(functional, [*given, *drawn, *arriving], "joint")
    passes = [*recorded_passes(), *zapp_passes(cotangents)]
    return TracedJoint(
        joint=JointModule(
            mod=run_passes(imported.mod, passes, records),
            primals=tuple(i.name for i in [*given, *drawn]),
            cotangents=cotangents,
            cotangent_of=facts.cotangent_of,
            num_outputs=len(rehearsal.outputs),
            wanted=facts.wanted,
            gradient_reads=facts.gradient_reads,
            drawn=tuple(i.name for i in drawn),
            functions=functions,
            saved=facts.saved,
        ),
        noise=noise,
        imported=imported,
        graph=functional,
    )


def _in_calling_order(
    inputs: Sequence[GraphInput], noise: Sequence[NoiseDescriptor]
) -> list[GraphInput]:
    """Return the inputs for the random draws in the order of the call: dropout masks come last."""
    pairs = list(zip(inputs, noise, strict=True))
    plain = [i for i, n in pairs if n.drop_probability is None]
    return plain + [i for i, n in pairs if n.drop_probability is not None]


def _record(
    rehearsal: Rehearsal, facts: GradientFacts
) -> tuple[fx.GraphModule, tuple[AppliedFunction, ...]]:
    """Record the operators of forward and gradient: ``(primals..., cotangents...) -> results``.

    Also return the custom autograd functions, in the order in which their boundaries are numbered.
    """
    count = len(rehearsal.inputs)
    position = {d.name: i for i, d in enumerate(rehearsal.inputs)}
    wanted = [position[name] for name in facts.wanted]
    if not wanted:
        raise UnsupportedOperatorError(
            "the outputs require a gradient, but none of it reaches an input or a parameter"
        )

    functions: list[AppliedFunction] = []

    def joint(*values: torch.Tensor) -> list[torch.Tensor]:
        leaves = rehearsal.leaves_of(values[:count])
        watch = FunctionWatch({})
        with watch.noticing():
            outputs = rehearsal(leaves)
        differentiated = [outputs[number] for number in facts.cotangent_of]
        bordered = watch.bordered(differentiated)
        with rehearsal.backward():
            gradients = torch.autograd.grad(
                differentiated, [leaves[i] for i in wanted], values[count:]
            )
        functions[:] = bordered.functions()
        return [*(o.detach() for o in outputs), *gradients]

    with rehearsal.mode:
        fakes = rehearsal.fakes()
        specs = [rehearsal.outputs[number].spec for number in facts.cotangent_of]
        fakes += [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in specs if s]
        # Strides are known only up to here: the later steps assume dense inputs.
        table: dict[Any, Callable[..., Any]] = {
            aten.native_batch_norm.default: _batch_norm,
            aten.sort.default: sort_as_eager,
        }
        traced = _traced(joint, fakes, table)
    if functions:
        _refuse_unsaved(traced, rehearsal)
    return traced, tuple(functions)


def _refuse_unsaved(traced: fx.GraphModule, rehearsal: Rehearsal) -> None:
    """Refuse tensors that a custom function's backward reads but its forward did not save."""
    known = {storage_key(t) for t in rehearsal.captured.constant_tensors.values()}
    for node in traced.graph.find_nodes(op="get_attr"):
        tensor = getattr(traced, str(node.target), None)
        if not isinstance(tensor, torch.Tensor) or storage_key(tensor) in known:
            continue
        # PyTorch lifts tensors that backward itself creates from numbers, which is fine.
        if not all(str(user.target).startswith("aten.lift_fresh") for user in node.users):
            raise UnsupportedOperatorError(
                "the backward of a custom autograd function reads a tensor of shape "
                f"{tuple(tensor.shape)} that is neither saved by its forward nor made by it: pass "
                "the tensor to apply(), and save it by ctx.save_for_backward"
            )


def _traced(
    function: Callable[..., Any],
    fakes: Sequence[torch.Tensor],
    table: dict[Any, Callable[..., Any]],
) -> fx.GraphModule:
    try:
        with checks_of_numbers(), sources_put_off():
            traced = make_fx(function, table, _allow_non_fake_inputs=True)(*fakes)
    except BridgeError:
        raise
    except Exception as error:
        raise UnsupportedOperatorError(
            f"PyTorch cannot trace the gradient: {first_line(error)}"
        ) from error
    assert isinstance(traced, fx.GraphModule)
    return traced


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Run batch norm by an overload whose schema declares which running statistics it writes."""
    if not training:
        norm = aten._native_batch_norm_legit_no_training.default
        return norm(x, weight, bias, mean, variance, momentum, eps)
    if mean is None or variance is None:
        norm = aten._native_batch_norm_legit.no_stats
        return norm(x, weight, bias, training, momentum, eps)
    norm = aten._native_batch_norm_legit.default
    return norm(x, weight, bias, mean, variance, training, momentum, eps)


def _functionalize(traced: fx.GraphModule, rehearsal: Rehearsal) -> fx.GraphModule:
    """Trace ``traced`` again without writes, decomposed by tvmbridge's table, for dense inputs."""
    given = [n.meta["val"] for n in traced.graph.find_nodes(op="placeholder")]
    run = torch.func.functionalize(_SameDtypes(traced).run, remove="mutations")
    with rehearsal.mode, torch.no_grad():
        # Compiled code gets dense inputs, and the shapes of some results depend on that.
        fakes = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in given]
        functional = _traced(run, fakes, joint_decomposition_table())
    functional.graph.eliminate_dead_code()
    device = rehearsal.captured.device
    if not is_on_host(device):
        move_in_module(functional, device)
    return functional


class _SameDtypes(fx.Interpreter):
    """Runs a graph so that results keep their dtypes, even if a decomposition has others."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a copy of a tensor that the graph holds, which operators may write into."""
        held = super().get_attr(target, args, kwargs)
        return aten.lift_fresh_copy.default(held) if isinstance(held, torch.Tensor) else held

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        recorded = node.meta.get("val")
        if isinstance(result, torch.Tensor) and isinstance(recorded, torch.Tensor):
            return result.to(recorded.dtype)
        return result


def _give_memory(traced: fx.GraphModule) -> None:
    """Let ``as_strided`` read memory in the order that it has in eager PyTorch."""
    try:
        give_memory([traced.graph])
    except CaptureError as error:
        raise UnsupportedOperatorError(str(error)) from None
