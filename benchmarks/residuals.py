"""Bytes saved from forward to backward: our policies, eager autograd, AOTAutograd's min cut.

Nothing is timed, and the figures are the same at each run. Inputs, parameters, buffers and outputs
never count, because they live anyway; dropout masks always count. A storage counts once.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from benchmarks.common import Row, parser, report
from benchmarks.modules import MODULES
from tvmbridge.coloring import POLICIES, color
from tvmbridge.compiler.split import SplitModule, split
from tvmbridge.core.options import CompileOptions
from tvmbridge.differentiation.joint import derive
from tvmbridge.graph_capture.capture import capture

MEGABYTE = 1e6
_VIEW_NAMES = (
    "alias as_strided detach expand permute select slice squeeze t transpose unsqueeze view "
    "_unsafe_view reshape split split_with_sizes"
)
_VIEWS = frozenset(_VIEW_NAMES.split())


def ours(module: nn.Module, x: torch.Tensor) -> dict[str, SplitModule]:
    """Return the forward and backward of the module, split by each policy."""
    captured = capture(module, (x,), needs_grad=True)
    joint = derive(module, (x,), {}, captured, CompileOptions(), []).joint
    return {policy: split(joint, color(joint, policy)) for policy in POLICIES}


def eager_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes of the storages that eager PyTorch saves in forward."""
    held = {t.untyped_storage().data_ptr() for t in (x, *module.parameters(), *module.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = module(x)
    held.add(_first(output).untyped_storage().data_ptr())
    return sum(s.nbytes() for pointer, s in saved.items() if pointer not in held)


def aot_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that AOTAutograd's min cut saves, with inductor's decompositions."""
    found: list[int] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        results = list(forward.graph.output_node().args[0])
        count = options["num_fwd_outputs"]
        free = {_storage(r) for r in results[:count] if isinstance(r, fx.Node)}
        kept = {_storage(r) for r in results[count:] if isinstance(r, fx.Node)}
        values = [n.meta["val"] for n in kept - free if n.op != "placeholder"]
        found.append(sum(v.numel() * v.element_size() for v in values))
        return forward, backward

    compiled = aot_module(
        module,
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    _first(compiled(x)).sum().backward()
    return found[-1]


def _storage(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of ``node``, which may be a view of it."""
    while node.op == "call_function":
        name = getattr(node.target, "_opname", "")
        source = node.args[0] if node.args else None
        item_of_view = node.target is operator.getitem and (
            getattr(source.target, "_opname", "") in _VIEWS  # type: ignore[union-attr]
        )
        if not isinstance(source, fx.Node) or (name not in _VIEWS and not item_of_view):
            break
        node = source
    return node


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def measure(name: str) -> list[Row]:
    """Return the figures of one module."""
    module, x = MODULES[name]()
    parts = ours(module, x)
    drawn = sum(v.spec.nbytes for v in parts["min_cut"].drawn)
    peer = aot_bytes(module, x) / MEGABYTE
    rows = [
        Row(f"{name}: eager autograd", eager_bytes(module, x) / MEGABYTE, "MB"),
        Row(f"{name}: AOTAutograd min cut", peer, "MB"),
    ]
    for policy, part in parts.items():
        bound = peer if policy == "min_cut" else None
        rows.append(Row(f"{name}: {policy}", part.residual_bytes / MEGABYTE, "MB", bound))
    rows.append(Row(f"{name}: of min_cut, dropout masks", drawn / MEGABYTE, "MB"))
    return rows


def main(argv: Sequence[str] = ()) -> int:
    """Print the figures of each module."""
    options = parser(__doc__)
    options.add_argument("--modules", nargs="+", default=list(MODULES), choices=list(MODULES))
    chosen = options.parse_args(list(argv))
    rows = [row for name in chosen.modules for row in measure(name)]
    return report("bytes kept for backward", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
