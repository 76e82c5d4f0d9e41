"""The command ``python -m tests.conformance.strides``: compare strides of fake and real results.

Every operator of OpInfo runs on its samples, and on variants with more dimensions, in five memory
layouts. A trace sees strides and storage offsets of fake tensors: they must be the real ones.
With ``--gradients`` the inputs require a gradient, since some operators choose kernels by that.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.testing._internal import common_methods_invocations
from torch.utils import _pytree as pytree

from tests.conformance.case import Case
from tests.conformance.coverage import full_name
from tests.conformance.samples import cases_of_samples, choose
from tvmbridge.core.torch_private import FakeTensorMode, symbolic_shapes
from tvmbridge.graph_capture.trace.functions import functions_replaced
from tvmbridge.graph_capture.trace.kernel_strides import unanswered

# PyTorch's kernels access memory out of bounds for dimensions of stride 0.
_NOT_EXPANDED = frozenset({"masked.median", "median", "nanmedian"})


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats.get(x.dim(), torch.contiguous_format))


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else x


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand_as(x) if x.dim() and len(x) > 1 else x


def _sliced(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], -1)[..., 0]


LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "channels last": _channels_last,
    "transposed": _transposed,
    "expanded": _expanded,
    "sliced": _sliced,
}


# The strides and the storage offset of a result.
Placement: TypeAlias = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class Difference:
    """A call whose fake results have other strides than the real results.

    - ``case``: the label of the case.
    - ``operands``: shape and strides of each tensor of the call.
    - ``real``: strides and storage offset of each real result.
    - ``fake``: strides and storage offset of each fake result.
    """

    case: str
    operands: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    real: tuple[Placement, ...]
    fake: tuple[Placement, ...]


@dataclass(frozen=True)
class Tally:
    """The calls of an operator that ran in eager PyTorch.

    - ``equal``: the number of calls whose fake results have the strides of the real results.
    - ``refused``: the number of calls without fake results, or whose strides are not known: forward
      is refused by name if it asks for them.
    - ``differences``: the other calls.
    """

    equal: int
    refused: int
    differences: list[Difference]


def operators() -> dict[str, Any]:
    """Return all operators of OpInfo by full name."""
    return {full_name(op): op for op in common_methods_invocations.op_db}


def tally(
    op: Any, limit: int, dtype: torch.dtype = torch.float32, gradients: bool = False
) -> Tally:
    """Compare the calls of ``op``, of at most ``limit`` samples in all layouts.

    An operator that does not support float32 runs in another dtype that it supports. With
    ``gradients`` the floating-point inputs require a gradient.
    """
    dtypes = op.supported_dtypes("cpu")
    if dtype is torch.float32 and dtypes and dtype not in dtypes:
        dtype = min(dtypes, key=str)
    if dtype not in dtypes or (gradients and not op.supports_autograd):
        return Tally(0, 0, [])
    torch.manual_seed(0)
    samples = choose(cases_of_samples(op.sample_inputs("cpu", dtype)), limit)
    shaped = [case for sample in samples for case in (sample, *_with_more_dimensions(sample))]
    cases = [laid for case in shaped for laid in _laid_out(op.name, case)]
    equal, refused, differences = 0, 0, []
    for case in cases:
        real = _placements(op, case.leaves, case.spec, gradients)
        if real is None:
            continue
        fake = _fake_placements(op, case, gradients)
        if fake is None:
            refused += 1
        elif fake == real:
            equal += 1
        else:
            operands = tuple((tuple(t.shape), t.stride()) for t in case.tensors)
            differences.append(Difference(case.label, operands, real, fake))
    return Tally(equal, refused, differences)


def _with_more_dimensions(case: Case) -> Iterator[Case]:
    """Yield ``case`` with four dimensions: new dimensions first, then new dimensions last."""
    rank = max((t.dim() for t in case.tensors), default=0)
    if not 1 <= rank < 4 or not all(t.layout is torch.strided for t in case.tensors):
        return
    sizes = (2, 3, 2)[: 4 - rank]
    grown: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "in front": lambda t: t.expand(*sizes, *t.shape),
        "behind": lambda t: t[(..., *(None for _ in sizes))].expand(*t.shape, *sizes),
    }
    for name, grow in grown.items():
        leaves = [
            grow(v).contiguous() if isinstance(v, torch.Tensor) and v.dim() == rank else v
            for v in case.leaves
        ]
        yield replace(case, label=f"{case.label} grown {name}", leaves=tuple(leaves))


def _laid_out(name: str, case: Case) -> Iterator[Case]:
    """Yield ``case`` with all its tensors in each layout, then with its first tensor only.

    Cases with an empty tensor yield nothing.
    """
    if not all(t.numel() for t in case.tensors):
        return
    places = [
        i
        for i, leaf in enumerate(case.leaves)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    for layout, lay_out in LAYOUTS.items():
        if layout == "expanded" and name in _NOT_EXPANDED:
            continue
        for chosen in (places, places[:1]) if len(places) > 1 else (places,):
            leaves = [lay_out(v) if i in chosen else v for i, v in enumerate(case.leaves)]
            label = f"{case.label} {layout} {len(chosen)}"
            yield replace(case, label=label, leaves=tuple(leaves))


def _fake_placements(op: Any, case: Case, gradients: bool) -> tuple[Placement, ...] | None:
    symbols = symbolic_shapes().ShapeEnv()  # Of results whose shapes depend on values.
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols, static_shapes=True) as mode:
        fakes = pytree.tree_map(
            lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v, list(case.leaves)
        )
        with functions_replaced(nn.Module(), on_fakes=True):
            fake = _placements(op, fakes, case.spec, gradients)
            return None if unanswered() else fake


def _placements(op: Any, leaves: Any, spec: Any, gradients: bool) -> tuple[Placement, ...] | None:
    """Return the placements of the results; None if the operator raises, or a size is unknown."""
    args, kwargs = pytree.tree_unflatten(
        [_requiring(v, gradients) if isinstance(v, torch.Tensor) else v for v in leaves], spec
    )
    torch.manual_seed(0)
    try:
        with torch.set_grad_enabled(gradients):
            results = pytree.tree_leaves(op.op(*args, **kwargs))
    except Exception:
        return None
    strided = [r for r in results if isinstance(r, torch.Tensor) and r.layout is torch.strided]
    if any(isinstance(n, torch.SymInt) for r in strided for n in (*r.shape, *r.stride())):
        return None
    return tuple((r.stride(), int(r.storage_offset())) for r in strided)


def _requiring(tensor: torch.Tensor, gradients: bool) -> torch.Tensor:
    if not gradients or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().requires_grad_()


def main(arguments: list[str] | None = None) -> int:
    """Print the calls that differ; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.strides")
    parser.add_argument("names", nargs="*", help="operators; by default all of OpInfo")
    parser.add_argument("--samples", type=int, default=6, help="of each operator")
    parser.add_argument("--dtype", default="float32", help="of the samples")
    parser.add_argument("--gradients", action="store_true", help="inputs require a gradient")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # PyTorch logs each operator that has no fake kernel.
    known = operators()
    chosen = {n: op for n, op in known.items() if not options.names or n in options.names}
    dtype = getattr(torch, options.dtype)
    found = {n: tally(op, options.samples, dtype, options.gradients) for n, op in chosen.items()}
    different = {name: t.differences for name, t in found.items() if t.differences}
    for name, differences in different.items():
        for difference in differences[:3]:
            print(f"{name}: {difference}")
    equal, refused = sum(t.equal for t in found.values()), sum(t.refused for t in found.values())
    print(
        f"{equal} calls with eager's strides, {refused} refused, {len(different)} operators differ"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
