"""Each module of torch.nn on PyTorch's own samples of it, in float64, in training and inference.

``pytest -m slow tests/end_to_end/test_every_module.py`` takes about ten minutes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils import _pytree as pytree

from tests.architectures.compare import TOLERANCES, difference
from tests.dynamo.__main__ import Caller
from tvmbridge import add_tvm_dispatch, compile_report, dispatch_report
from tvmbridge.core.errors import BridgeError
from tvmbridge.dynamo import tvmbridge as backend

# PyTorch's fake kernel of these gives a wrong result, so the compiled code cannot be tried out.
REFUSED = {("nn.MultiLabelMarginLoss", "1d_reduction_none")}
# Lazy modules have no weights before their first call.
INFOS = [i for i in module_db if torch.float64 in i.dtypes and "Lazy" not in i.name]
MOST_SAMPLES = 24


def _samples(info: ModuleInfo, training: bool) -> Iterator[ModuleInput]:
    options: Any = {"device": "cpu", "dtype": torch.float64, "requires_grad": True}
    found = list(info.module_inputs_func(info, training=training, **options))
    for sample in found[:: max(1, len(found) // MOST_SAMPLES)]:
        if sample.forward_input is not None:
            yield sample


def _step(module: nn.Module, sample: ModuleInput, seed: int) -> dict[str, Any]:
    """Run a step; return results, gradients of weights and inputs, buffers, and the generator."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    given = sample.forward_input
    args, kwargs = pytree.tree_map(leaf, (given.args, given.kwargs))
    module.zero_grad()
    torch.manual_seed(seed)
    tensors = [t for t in pytree.tree_leaves(module(*args, **kwargs)) if t is not None]
    recorded = [t for t in tensors if t.requires_grad]
    generator = torch.Generator().manual_seed(5)
    cotangents = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in recorded
    ]
    if recorded:
        torch.autograd.backward(recorded, cotangents)
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return {
        "results": [t.detach() for t in tensors],
        "gradients": [p.grad for p in module.parameters()] + [t.grad for t in leaves],
        "buffers": [b.clone() for b in module.buffers()],
        "generator": torch.get_rng_state(),
    }


def _runs(module: nn.Module, sample: ModuleInput) -> bool:
    try:
        _step(copy.deepcopy(module), sample, 0)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError):
        return False
    return True


def _dispatched(module: nn.Module, sample: ModuleInput) -> nn.Module:
    ours, given = copy.deepcopy(module), sample.forward_input
    return add_tvm_dispatch(ours, given.args, sample_kwargs=given.kwargs)


def _compiled(module: nn.Module, sample: ModuleInput) -> nn.Module:
    torch.compiler.reset()
    ours = copy.deepcopy(module)
    ours.compile(backend=backend, options={"smallest_graph": 1})
    return ours


def _left(module: nn.Module, door: Any) -> list[str]:
    """Return why calls were left to PyTorch."""
    if door is _dispatched:
        return list(dispatch_report(module).fallbacks)
    # If Dynamo captured no graph, the report must have the reason.
    assert compile_report().graphs or compile_report().breaks
    return [reason for graph in compile_report().graphs for reason in graph.eager_calls]


@pytest.mark.slow
@pytest.mark.parametrize("door", [_dispatched, _compiled])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
def test_module(info: ModuleInfo, training: bool, door: Any) -> None:
    served = 0
    for sample in _samples(info, training):
        torch.manual_seed(1)
        made = sample.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).double()
        module = (Caller(module) if door is _compiled else module).train(training)
        if not _runs(module, sample):
            continue
        known = (info.name, sample.desc) in REFUSED
        try:
            ours = door(module, sample)
        except BridgeError:
            assert known
            continue
        for seed in (0, 3):
            found, expected = _step(ours, sample, seed), _step(module, sample, seed)
            for what, values in expected.items():
                departure = difference(found[what], values, TOLERANCES[torch.float64])
                assert departure is None, f"{sample.desc}: {what}{departure}"
        assert known or not _left(ours, door), sample.desc
        served += 1
    assert served
