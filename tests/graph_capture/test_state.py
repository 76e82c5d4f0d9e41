"""A refused capture leaves PyTorch's state unchanged, in this thread and in others."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vmap
from torch.utils.checkpoint import checkpoint

from tests import process_state
from tests.thinned import thinned
from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report
from tvmbridge.core.torch_private import TorchDispatchMode

WEIGHT = torch.randn(3)


class Refused(nn.Module):
    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, self.norm(self.layer(x)))


def _raises(module: Refused, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("forward itself")


def _transform_left(module: Refused, x: torch.Tensor) -> torch.Tensor:
    torch._C._functorch._vmap_increment_nesting(x.shape[0], "error")
    return torch._C._functorch._add_batch_dim(x, 0, 5).undefined  # type: ignore[no-any-return]


def _level_left(module: Refused, x: torch.Tensor) -> torch.Tensor:
    forward_ad.enter_dual_level()
    return x.undefined  # type: ignore[attr-defined, no-any-return]


def _hooks_left(module: Refused, x: torch.Tensor) -> torch.Tensor:
    torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone).__enter__()
    return x.undefined  # type: ignore[attr-defined, no-any-return]


def _level_of_cpp_left(module: Refused, x: torch.Tensor) -> torch.Tensor:
    torch._C._enter_dual_level()
    return x.undefined  # type: ignore[attr-defined, no-any-return]


def _dual(module: Refused, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, x.exp()).sin()).tangent


def _interrupted(module: Refused, x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def _dropped(module: Refused, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda z: nn.functional.dropout(z), lambda z: z * 1, (x,))


def _item(module: Refused, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > 0 else x


def _settings(module: Refused, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(not torch.is_grad_enabled())
    torch.backends.cudnn.benchmark = True
    return x.undefined  # type: ignore[attr-defined, no-any-return]


class Entered(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError("in a mode")


def _mode(module: Refused, x: torch.Tensor) -> torch.Tensor:
    with Entered():
        return x + 1


compiled = torch.compile(lambda x: (x * 2).sin(), backend="eager", fullgraph=True)

REFUSED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "raises": _raises,
    "a transform left": _transform_left,
    "a forward-mode level left": _level_left,
    "hooks on saved tensors left": _hooks_left,
    "a forward-mode level in cpp": _level_of_cpp_left,
    "a dual tensor": _dual,
    "an interrupt": _interrupted,
    "a draw in a branch": _dropped,
    "a way by a value": _item,
    "settings": _settings,
    "a mode": _mode,
    "vmap of grad": lambda m, x: vmap(grad(lambda r: (r * WEIGHT).sin().sum()))(x),
    "jvp": lambda m, x: jvp(_item, (m, x), (m, x)),
    "backward": lambda m, x: x.requires_grad_().sum().backward(),
    "torch.compile": lambda m, x: compiled(x) * x.sum().item(),
    "checkpoint": lambda m, x: checkpoint(_raises, m, x, use_reentrant=False),
    "associative_scan": lambda m, x: torch._higher_order_ops.associative_scan(torch.add, x, 0),
    "a seed": lambda m, x: torch.manual_seed(0) and x,
    "inference mode": lambda m, x: torch.inference_mode(False).__enter__() or x,
    "an object": lambda m, x: object(),
}


@pytest.mark.parametrize("case", thinned(REFUSED, 3))
def test_a_refusal_leaves_the_process_as_it_was(case: str) -> None:
    module = Refused(REFUSED[case]).train(len(case) % 2 == 0)
    compiled(torch.ones(1))  # the first use of TorchDynamo imports modules and changes state
    x = torch.randn(4, 3)
    before = {**process_state.now(), **process_state.more()}
    with contextlib.suppress(BridgeError, KeyboardInterrupt):
        add_tvm_dispatch(module, x)
    after = {**process_state.now(), **process_state.more()}
    assert process_state.changed(before, after) == []


def test_no_stub_of_a_patched_function_is_kept() -> None:
    with pytest.raises(BridgeError):
        add_tvm_dispatch(Refused(_dropped).train(), torch.randn(4, 3))
    assert process_state.stubs_left() == []


def test_eager_pytorch_has_the_operators_that_were_refused() -> None:
    plain = Refused(_dropped).eval()
    eager, x = copy.deepcopy(plain), torch.randn(4, 3)
    with pytest.raises(BridgeError, match="draws random numbers"):
        add_tvm_dispatch(plain.train(), x)
    assert eager(x).shape == x.shape


def test_without_a_sample_what_is_refused_runs_in_eager_pytorch() -> None:
    module = add_tvm_dispatch(Refused(_dropped).train())
    x = torch.randn(4, 3)
    assert [module(x).shape for _ in range(2)] == [x.shape] * 2
    ((reason, count),) = dispatch_report(module).fallbacks.items()
    assert count == 2
    assert "draws random numbers" in reason


def test_what_torch_compile_has_wrapped_is_captured_after_a_dispatch() -> None:
    function = torch.compile(lambda x: (x + 1).cos(), backend="eager", fullgraph=True)
    module = add_tvm_dispatch(Refused(lambda m, x: function(x)).eval(), torch.randn(4, 3))
    x = torch.randn(4, 3)
    torch.testing.assert_close(module(x), function(module.norm(module.layer(x))))
    assert dispatch_report(module).fallbacks == {}


@pytest.mark.parametrize("function", [lambda f: vmap(grad(lambda r: f(r).sum())), jacfwd])
def test_the_first_call_through_torch_compile_is_right(function: Callable[..., Any]) -> None:
    transformed = function(lambda r: (r * WEIGHT).sin())
    x = torch.randn(3) if function is jacfwd else torch.randn(4, 3)
    expected = transformed(x)
    torch.testing.assert_close(torch.compile(transformed, backend="tvmbridge")(x), expected)
    torch.testing.assert_close(transformed(x), expected)


def test_a_tangent_of_forward_is_not_lost() -> None:
    module = add_tvm_dispatch(Refused(_dual).train())
    x = torch.randn(4, 3)
    assert isinstance(module(x), torch.Tensor)
    (reason,) = dispatch_report(module).fallbacks
    assert "call torch.func.jvp in its place" in reason


@pytest.mark.slow
def test_threads_compile_while_another_one_captures() -> None:
    """During a capture, other threads see neither replaced functions nor the trace."""
    # If several threads look up a backend for the first time, PyTorch fails in all but one.
    torch._dynamo.lookup_backend("tvmbridge")
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
            x = torch.full((4, 3), float(number))
            for door in ("eager", "tvmbridge"):
                found = torch.compile(layer, backend=door, fullgraph=True)(x)
                torch.testing.assert_close(found, layer(x))
            torch.testing.assert_close(add_tvm_dispatch(copy.deepcopy(layer), x)(x), layer(x))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
