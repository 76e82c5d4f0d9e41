"""PyTorch modes around a call: compiled code supports a mode, or the module's own forward runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

from tests.dispatch_helpers import eager, make_block, sample
from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report


@pytest.fixture(scope="module")
def served() -> nn.Module:
    return add_tvm_dispatch(make_block().eval().requires_grad_(False), sample())


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return add_tvm_dispatch(make_block(dropout=0.0).train(), sample().requires_grad_())


def _dual(m: nn.Module) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(m(forward_ad.make_dual(sample(), sample() + 1))))


def _global_hook(m: nn.Module) -> Any:
    handle = nn_module.register_module_forward_hook(lambda *called: called[2] * 2)
    try:
        return m(sample())
    finally:
        handle.remove()


def _on_meta(m: nn.Module) -> Any:
    with torch.device("meta"):
        return m(sample_here)


class _Watch(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.layer_norm else result


def _function_mode(m: nn.Module) -> Any:
    with _Watch():
        return m(sample_here)


sample_here = sample()

OTHERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "forward mode": (_dual, "forward-mode differentiation is active"),
    "jvp": (
        lambda m: torch.func.jvp(m, (sample(),), (sample() + 1,)),
        "a function transform is active",
    ),
    "vmap": (
        lambda m: torch.func.vmap(m)(sample().expand(2, 6, 24)),
        "a function transform is active",
    ),
    "global hook": (_global_hook, "a submodule has hooks"),
    "default device": (_on_meta, "another default device is set"),
    "function mode": (_function_mode, "a function mode is active"),
    "zero tensor": (
        lambda m: m(torch._efficientzerotensor((6, 24), dtype=torch.float64)),  # type: ignore[attr-defined]
        "the layout of an input differs",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_surroundings_go_to_the_own_forward(served: nn.Module, kind: str) -> None:
    call, reason = OTHERS[kind]
    module = copy.deepcopy(served)
    torch.testing.assert_close(call(module), call(eager(module)))
    assert list(dispatch_report(module).fallbacks) == [reason]
    assert dispatch_report(module).tvm_calls == 0


def test_a_context_of_the_same_device_is_served(served: nn.Module) -> None:
    module = copy.deepcopy(served)
    with torch.device("cpu"):
        module(sample())
    assert dispatch_report(module).tvm_calls == 1


def test_inference_mode_and_what_comes_after(trained: nn.Module) -> None:
    module = copy.deepcopy(trained)
    with torch.inference_mode():
        inside = module(sample())
        made_inside = sample()
    assert inside.is_inference()
    with torch.no_grad():
        torch.testing.assert_close(module(made_inside), eager(module)(sample()))
    assert dispatch_report(module).tvm_calls == 2
    x = sample().requires_grad_()
    module(x).sum().backward()
    assert not module.inner.weight.grad.is_inference()  # type: ignore[union-attr]
    assert dispatch_report(module).tvm_calls == 3
    assert not dispatch_report(module).fallbacks


def test_deterministic_algorithms_are_a_mode_of_their_own(served: nn.Module) -> None:
    module = copy.deepcopy(served)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(module(sample()), eager(module)(sample()))
    finally:
        torch.use_deterministic_algorithms(False)
    modes = [s.mode for s in dispatch_report(module).specializations]
    assert modes == ["eval", "eval, deterministic"]


def test_the_default_dtype_is_seen() -> None:
    class Makes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.ones(6)

    x = torch.ones(3, 6)
    module = add_tvm_dispatch(Makes().eval(), x)
    torch.set_default_dtype(torch.float64)
    try:
        assert module(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert module(x).dtype is torch.float32
    assert dispatch_report(module).tvm_calls == 2


def test_tracers_trace_the_own_forward(served: nn.Module) -> None:
    module = copy.deepcopy(served)
    expected = eager(module)(sample())
    exported = torch.export.export(module, (sample(),)).module()
    torch.testing.assert_close(exported(sample()), expected)
    assert dispatch_report(module).tvm_calls == 0
    # torch.jit.trace also calls the module outside the trace, to check the result.
    torch.testing.assert_close(torch.jit.trace(module, sample())(sample()), expected)
    assert list(dispatch_report(module).fallbacks) == ["the module is being traced"]


@pytest.mark.parametrize(
    ("first", "second"), [(0.0, -0.0), (1, True), (1, 1.0), (2.0, 3.0), ("a", "b")]
)
def test_arguments_that_are_no_tensors_are_told_apart(first: Any, second: Any) -> None:
    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, value: Any) -> torch.Tensor:
            return x + len(repr(value)) + (ord(value) if isinstance(value, str) else value)

    module = add_tvm_dispatch(Takes().eval(), (sample(), first))
    for value in (first, second):
        torch.testing.assert_close(module(sample(), value), Takes()(sample(), value))
    words = "an argument that is not a tensor differs", "a string, a bool or None differs"
    assert dispatch_report(module).fallbacks == {words[type(second) is str]: 1}


def test_nan_is_the_same_argument() -> None:
    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, value: float) -> torch.Tensor:
            return x * value

    module = add_tvm_dispatch(Takes().eval(), (sample(), float("nan")))
    module(sample(), float("nan"))
    assert dispatch_report(module).tvm_calls == 1


def test_a_batch_of_cotangents_is_refused_by_name(trained: nn.Module) -> None:
    x = sample().requires_grad_()
    with pytest.raises(BridgeError, match="batch of cotangents"):
        torch.autograd.grad(trained(x), x, torch.ones(2, 6, 24).double(), is_grads_batched=True)


def test_hooks_of_parameters_and_parts_of_the_inputs(trained: nn.Module) -> None:
    found = []
    for module in (copy.deepcopy(trained), eager(trained)):
        seen: list[Any] = []
        weight = module.inner.weight  # type: ignore[union-attr]
        weight.register_hook(lambda g: g * 2)  # type: ignore[union-attr, operator]
        weight.register_post_accumulate_grad_hook(lambda p, s=seen: s.append(p.grad.clone()))  # type: ignore[union-attr, operator]
        x = sample().requires_grad_()
        module(x).square().sum().backward()
        module(x).sum().backward(inputs=[weight])  # type: ignore[list-item]
        only = torch.autograd.grad(module(x).sum(), x)
        found.append((seen, only, weight.grad, x.grad))  # type: ignore[union-attr]
    torch.testing.assert_close(*found)


def test_batch_norm_alone_trains_on_an_input_without_gradient() -> None:
    module = add_tvm_dispatch(nn.BatchNorm1d(6).train(), torch.randn(4, 6))
    x = torch.randn(4, 6)
    gradients = []
    for each in (eager(module), module):
        each(x).square().sum().backward()
        gradients.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(*gradients)
    assert dispatch_report(module).tvm_calls == 1


class Inner(nn.Module):
    """Enters a mode in forward, and returns results from inside and after the mode."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.mode = (mode,)
        self.scale = nn.Parameter(torch.linspace(-1, 1, 24, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.mode[0]():
            inside = (x * 2).tanh()
        return inside, inside + 1, x * self.scale


def _traits(outputs: tuple[torch.Tensor, ...]) -> list[Any]:
    return [(t.is_inference(), t.requires_grad, t.grad_fn is None, t.is_leaf) for t in outputs]


@pytest.mark.parametrize("kind", ["no_grad", "inference_mode"])
def test_modes_within_forward_are_those_of_eager(kind: str) -> None:
    mode = getattr(torch, kind)
    ours, theirs = Inner(mode).train(), Inner(mode).train()
    add_tvm_dispatch(ours, sample())
    for outer in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with torch.inference_mode(outer is torch.inference_mode):
            x = sample()
        with outer():
            found, expected = ours(x), theirs(x)
        assert _traits(found) == _traits(expected)
    fallbacks = dispatch_report(ours).fallbacks
    if kind == "no_grad":
        assert not fallbacks
    else:
        assert fallbacks == {"forward returns tensors that it makes in inference mode": 2}


def test_forward_that_turns_a_mode_off_is_refused() -> None:
    module = Inner(torch.enable_grad).eval().requires_grad_(False)
    with pytest.raises(BridgeError, match="turns gradients on"), torch.no_grad():
        add_tvm_dispatch(module, sample().requires_grad_())
    plain = copy.deepcopy(module)
    add_tvm_dispatch(module, sample())
    with torch.no_grad():
        for x in (sample(), sample().requires_grad_()):
            assert _traits(module(x)) == _traits(plain(x))
    report = dispatch_report(module)
    assert report.tvm_calls == 1
    ((reason, count),) = report.fallbacks.items()
    assert ("turns gradients on" in reason, count) == (True, 1)
    with pytest.raises(BridgeError, match="leaves inference mode"):
        add_tvm_dispatch(Inner(lambda: torch.inference_mode(False)), sample())


def test_a_checkpoint_repeats_what_eager_repeats_of_the_statistics() -> None:
    plain = nn.BatchNorm1d(3).double().train()
    module = copy.deepcopy(plain)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    add_tvm_dispatch(module, x)
    for reentrant in (True, False):
        for called in (module, plain):
            checkpoint(called, x, use_reentrant=reentrant).sum().backward()
        torch.testing.assert_close(list(module.buffers()), list(plain.buffers()))
    assert plain.num_batches_tracked == 4
    (reason,) = dispatch_report(module).fallbacks
    assert reason.startswith("forward writes buffers, arguments or counters, and a checkpoint")


def test_recording_asked_for_in_inference_mode_records_nothing() -> None:
    module = nn.Linear(2, 2).eval()
    add_tvm_dispatch(module, torch.ones(1, 2))
    with torch.inference_mode(), torch.enable_grad():
        assert module(torch.ones(1, 2)).is_inference()
    assert dispatch_report(module).tvm_calls == 1


def test_gradients_within_inference_mode_and_outside_of_it() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    add_tvm_dispatch(module, x)
    for _ in range(2):
        with torch.inference_mode(), torch.enable_grad():
            inferred = module(x)
        with torch.inference_mode(), torch.inference_mode(False):
            left = module(x)
        assert (inferred.requires_grad, inferred.is_inference()) == (False, True)
        assert (left.requires_grad, left.is_inference()) == (True, False)
        assert module(x).requires_grad


def test_a_strided_nested_tensor_runs_the_modules_own_forward() -> None:
    module = add_tvm_dispatch(nn.Linear(2, 2), on_fallback="silent")
    module(torch.ones(3, 2))
    rows = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)])
    for given, plain in zip(module(rows).unbind(), rows.unbind(), strict=True):
        torch.testing.assert_close(given, eager(module)(plain))
    assert dispatch_report(module).tvm_calls == 1
