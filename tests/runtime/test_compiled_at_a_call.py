"""A call that triggers compilation behaves like others for hooks, generators and checkpoints."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.dispatch_helpers import eager, make_block, sample
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report


@pytest.mark.parametrize("reentrant", thinned([False, True], 2))
def test_a_call_in_a_checkpoint_is_compiled_for(reentrant: bool) -> None:
    plain = make_block().train()
    module = add_tvm_dispatch(make_block().train(), sample())
    for seed in range(2):
        found = []
        for called in (module, plain):
            torch.manual_seed(seed)
            called.zero_grad()
            x = sample().requires_grad_()
            output = checkpoint(called, x * 2, use_reentrant=reentrant)
            output.square().sum().backward()
            grads = [p.grad for p in called.parameters()]
            found.append([output.detach(), x.grad, *grads, torch.get_rng_state()])
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)
    assert dispatch_report(module).fallbacks == {}


def test_a_call_that_is_compiled_leaves_no_trace_in_the_training() -> None:
    module = add_tvm_dispatch(make_block().train(), sample())
    seen: list[str] = []
    module.inner.weight.register_hook(lambda g: seen.append("weight"))
    module.inner.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    source = sample().requires_grad_()
    x = source * 2
    x.register_hook(lambda g: seen.append("input"))
    kept = weakref.ref(x)
    torch.manual_seed(5)
    output = module(x)
    assert seen == []
    assert x._version == 0
    assert source.grad is None
    assert all(p.grad is None for p in module.parameters())
    state = torch.get_rng_state()
    torch.manual_seed(5)
    eager(module)(sample())
    assert torch.equal(state, torch.get_rng_state())
    output.sum().backward()
    assert sorted(seen) == ["accumulated", "input", "weight"]
    # The call's autograd graph is freed too.
    del x, output
    gc.collect()
    assert kept() is None
