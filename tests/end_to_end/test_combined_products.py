"""A BertLayer with combined products equals eager's after any change of its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.end_to_end.steps import gradient_errors, relative_error, training_step
from tests.models import bert_layer
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch

BOUND = 1e-12
ALWAYS = {"combine_matmuls": "always"}
KEY = "attention.self.key.weight"


def layer(attention: str) -> nn.Module:
    torch.manual_seed(5)
    return bert_layer(attention, width=64, heads=4).double()


def own(module: nn.Module) -> nn.Module:
    duplicate = copy.deepcopy(module)
    return remove_tvm_dispatch(duplicate)


def passes(module: nn.Module, name: str) -> int:
    (report,) = dispatch_report(module).specializations
    return sum(record.rewrites for record in report.passes if record.name == name)


def _data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.copy_(parameter.data.flip(0))


def _in_place(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter(KEY).mul_(1.5)


def _load(module: nn.Module) -> None:
    module.load_state_dict({n: t * 0.75 for n, t in module.state_dict().items()})


def _assign(module: nn.Module) -> None:
    state = {n: t * 1.25 for n, t in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def _to(module: nn.Module) -> None:
    module.to(torch.float32).to(torch.float64)


CHANGES: list[Callable[[nn.Module], None]] = [_data, _in_place, _load, _assign, _to]


@pytest.mark.parametrize(("attention", "joint"), thinned([("eager", "relax"), ("sdpa", "aot")], 2))
def test_training(attention: str, joint: str) -> None:
    module, hidden = layer(attention).train(), torch.randn(2, 7, 64, dtype=torch.float64)
    sample = hidden.clone().requires_grad_()
    add_tvm_dispatch(module, sample, options={**ALWAYS, "joint": joint})
    assert passes(module, "CombineParallelBatchMatmul") == 3
    assert passes(module, "CombineGradientMatmul") == 2
    for change in (None, *CHANGES):
        if change is not None:
            change(module)
        step, reference = (training_step(m, hidden) for m in (module, own(module)))
        assert relative_error(step.outputs[0], reference.outputs[0]) < BOUND
        assert max(gradient_errors(step, reference).values()) < BOUND
    report = dispatch_report(module)
    assert report.tvm_calls == 1 + len(CHANGES)
    assert [(p.packed, p.concatenated) for p in report.packs] == [(3, {})]


def test_never_leaves_the_weights_where_they_are() -> None:
    module, hidden = layer("sdpa").eval(), torch.randn(2, 7, 64, dtype=torch.float64)
    before = [p.data_ptr() for p in module.parameters()]
    add_tvm_dispatch(module, hidden, options={"combine_matmuls": "never"})
    with torch.no_grad():
        module(hidden)
    assert [p.data_ptr() for p in module.parameters()] == before
    assert dispatch_report(module).packs == ()


def test_training_combines_by_measurement_only() -> None:
    module, hidden = layer("sdpa").train(), torch.randn(2, 7, 64, dtype=torch.float64)
    sample = hidden.requires_grad_()
    add_tvm_dispatch(module, sample, options={"measure_kernels": False})
    assert dispatch_report(module).packs == ()
    declined = [d for p in dispatch_report(module).specializations[0].passes for d in p.declined]
    assert any("not measured, since measure_kernels is off" in d for d in declined)
