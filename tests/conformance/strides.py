"""The command ``python -m tests.conformance.strides``: compare strides of fake and real results.

Every operator of OpInfo runs on its samples, and on variants with more dimensions, in five memory
layouts. A trace sees the strides of fake tensors, so fake and real strides must be equal.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.testing._internal import common_methods_invocations
from torch.utils import _pytree as pytree

from tests.conformance.case import Case
from tests.conformance.coverage import full_name
from tests.conformance.samples import cases_of_samples, choose
from tvmbridge.core.torch_private import FakeTensorMode, symbolic_shapes
from tvmbridge.graph_capture.trace.functions import functions_replaced

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


@dataclass(frozen=True)
class Difference:
    """A call whose fake results have other strides than the real results.

    - ``case``: the label of the case.
    - ``operands``: shape and strides of each tensor of the call.
    - ``real``: the strides of the real results.
    - ``fake``: the strides of the fake results.
    """

    case: str
    operands: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    real: tuple[tuple[int, ...], ...]
    fake: tuple[tuple[int, ...], ...]


def operators() -> dict[str, Any]:
    """Return all operators of OpInfo by full name."""
    return {full_name(op): op for op in common_methods_invocations.op_db}


def differences(op: Any, limit: int) -> list[Difference]:
    """Return the calls of ``op`` that differ, of at most ``limit`` samples in all layouts."""
    dtypes = op.supported_dtypes("cpu")
    if not dtypes:
        return []
    dtype = torch.float32 if torch.float32 in dtypes else min(dtypes, key=str)
    torch.manual_seed(0)
    samples = choose(cases_of_samples(op.sample_inputs("cpu", dtype)), limit)
    cases = [case for sample in samples for case in (sample, *_with_more_dimensions(sample))]
    found = [_difference(op, laid) for case in cases for laid in _laid_out(op.name, case)]
    return [difference for difference in found if difference is not None]


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


def _difference(op: Any, case: Case) -> Difference | None:
    real = _strides(op, case.leaves, case.spec)
    if real is None:
        return None
    symbols = symbolic_shapes().ShapeEnv()
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols) as mode:
        fakes = pytree.tree_map(
            lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v, list(case.leaves)
        )
        with functions_replaced(nn.Module(), on_fakes=True):
            fake = _strides(op, fakes, case.spec)
    if fake is None or fake == real:  # It is refused, or right.
        return None
    operands = tuple((tuple(t.shape), t.stride()) for t in case.tensors)
    return Difference(case.label, operands, real, fake)


def _strides(op: Any, leaves: Any, spec: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return the strides of the results; None if the operator raises, or a size is unknown."""
    args, kwargs = pytree.tree_unflatten(list(leaves), spec)
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            results = pytree.tree_leaves(op.op(*args, **kwargs))
    except Exception:
        return None
    strided = [r for r in results if isinstance(r, torch.Tensor) and r.layout is torch.strided]
    if any(isinstance(n, torch.SymInt) for r in strided for n in (*r.shape, *r.stride())):
        return None
    return tuple(r.stride() for r in strided)


def main(arguments: list[str] | None = None) -> int:
    """Print the calls that differ; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.strides")
    parser.add_argument("names", nargs="*", help="operators; by default all of OpInfo")
    parser.add_argument("--samples", type=int, default=6, help="of each operator")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # PyTorch logs each operator that has no fake kernel.
    known = operators()
    chosen = {n: op for n, op in known.items() if not options.names or n in options.names}
    count = 0
    for name, op in chosen.items():
        found = differences(op, options.samples)
        count += bool(found)
        for difference in found[:3]:
            print(f"{name}: {difference}", flush=True)
    print(f"{len(chosen)} operators, {count} with other strides")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
