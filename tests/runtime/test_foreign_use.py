"""Other parts of PyTorch work with a dispatched module as in eager, or refuse with a reason.

Each row of the table is a use of the module, with the expected report: served by compiled code, or
the reason why the module's own forward ran. The dispatched and the eager module run the same use,
and must return or raise the same.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.dispatch_helpers import sample
from tests.thinned import thinned
from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report

SERVED = ""
TRANSFORM = "a function transform is active"
MODE = "a dispatch mode is active"
NOT_PLAIN = "an argument is not a plain tensor"
LAYOUT = "the layout of an input differs"
COPY = "it was made through a shallow copy or a replica of the module"
ADDED = "a submodule, parameter or buffer was added or removed"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)
        self.register_buffer("mask", torch.ones(24))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.tanh(self.inner(x))) * self.mask * self.scale


class Sub(torch.Tensor):
    pass


def _make() -> Layer:
    torch.manual_seed(0)
    return Layer().double()


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    module = add_tvm_dispatch(_make().train(), sample().requires_grad_())
    return add_tvm_dispatch(module, sample())


def _step(m: nn.Module, x: torch.Tensor | None = None) -> Any:
    x = sample().requires_grad_() if x is None else x
    m.zero_grad()
    output = m(x)
    output.square().sum().backward()
    return output.detach(), x.grad, [p.grad for p in m.parameters()]


def _of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return sample()


def _cotangent(make: Callable[[], torch.Tensor]) -> Callable[[nn.Module], Any]:
    def use(m: nn.Module) -> Any:
        x = sample().requires_grad_()
        return torch.autograd.grad(m(x), x, make())

    return use


def _with(change: Callable[[Any], Any]) -> Callable[[nn.Module], Any]:
    def use(m: nn.Module) -> Any:
        change(m)
        return _step(m)

    return use


def _inference_buffer(m: Any) -> None:
    with torch.inference_mode():
        m.mask = torch.ones(24).double()


def _saved(m: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    m.load_state_dict({n: 2 * t for n, t in torch.load(file).items()}, assign=True)
    return _step(m)


def _swapped(m: Any) -> Any:
    torch.utils.swap_tensors(m.inner.weight, nn.Parameter(m.inner.weight.detach() * 2))
    return _step(m)


def _functional(m: nn.Module) -> Any:
    values = {n: (2 * p).detach().requires_grad_() for n, p in m.named_parameters()}
    output = torch.func.functional_call(m, values, (sample(),))
    return output, torch.autograd.grad(output.sum(), list(values.values()))


def _ensemble(m: nn.Module) -> Any:
    parameters, buffers = torch.func.stack_module_state([m, m])  # type: ignore[list-item]

    def one(p: Any, b: Any) -> Any:
        return torch.func.functional_call(m, (p, b), (sample_here,))

    return torch.func.vmap(one)(parameters, buffers)


def _checkpointed(m: nn.Module, **options: Any) -> Any:
    x = sample().requires_grad_()
    checkpoint(m, x, **options).sum().backward()
    return x.grad, [p.grad for p in m.parameters()]


def _selective(m: nn.Module) -> Any:
    operators = [torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, operators)
    return _checkpointed(m, use_reentrant=False, context_fn=contexts)


def _hooked(m: Any) -> Any:
    m.inner.register_full_backward_hook(lambda module, gradients, _: (gradients[0] * 2,))
    return _step(m)


def _in_backward(m: nn.Module) -> Any:
    def update(p: torch.Tensor) -> None:
        p.data.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
        p.grad = None

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        m(sample()).sum().backward()
    return [p.detach() for p in m.parameters()]


def _in_a_thread(m: nn.Module) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_step(m)))
    thread.start()
    thread.join()
    return found


def _shallow(m: nn.Module) -> Any:
    other = copy.copy(m)
    other.scale = 3.0
    return other(sample())


def _replica(m: Any) -> Any:
    """Call a replica as DataParallel creates it, with other parameter tensors."""
    replica = m._replicate_for_data_parallel()
    for name, child in m._modules.items():
        setattr(replica, name, child._replicate_for_data_parallel())
        for key, p in child._parameters.items():
            setattr(getattr(replica, name), key, p * 2)
    replica.mask = m.mask
    return replica(sample())


def _sparse_weight(m: Any) -> Any:
    m.inner.weight = nn.Parameter(m.inner.weight.detach().to_sparse_csr())
    with torch.no_grad():
        return m(sample())


def _left_a_transform(*shape: int) -> torch.Tensor:
    """Return the wrapper tensor of a ``torch.func.grad`` that has ended."""
    kept: list[torch.Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(sample(*shape))
    return kept[0]


def _anomaly(m: nn.Module) -> Any:
    with torch.autograd.detect_anomaly(check_nan=False):
        return _step(m)


sample_here = sample()

USES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "parameter as input": (lambda m: _step(m, nn.Parameter(sample())), SERVED),
    "inference tensor as input": (lambda m: m(_of_inference()).sum().backward(), SERVED),
    "inference tensor as buffer": (_with(_inference_buffer), SERVED),
    "nn.Buffer": (_with(lambda m: setattr(m, "mask", nn.Buffer(2 * m.mask))), SERVED),
    "meta": (lambda m: m(sample().to("meta")), "the device of an input differs"),
    "sparse": (lambda m: m(sample().to_sparse()), LAYOUT),
    "nested": (lambda m: m(torch.nested.nested_tensor([sample()])), LAYOUT),
    "jagged": (
        lambda m: m(torch.nested.nested_tensor([sample()], layout=torch.jagged)).values(),
        NOT_PLAIN,
    ),
    "quantized": (
        lambda m: m(torch.quantize_per_tensor(sample().float(), 0.1, 0, torch.qint8)),
        "the dtype of an input differs",
    ),
    "subclass": (lambda m: m(sample().as_subclass(Sub)), NOT_PLAIN),
    "sparse weight": (_sparse_weight, SERVED),
    "sparse cotangent": (_cotangent(lambda: sample().to_sparse()), SERVED),
    "zero cotangent": (
        _cotangent(lambda: torch._efficientzerotensor((6, 24), dtype=torch.float64)),  # type: ignore[attr-defined]
        SERVED,
    ),
    "subclass cotangent": (_cotangent(lambda: sample().as_subclass(Sub)), SERVED),
    "functionalize": (lambda m: torch.func.functionalize(m)(sample()), TRANSFORM),
    "func.grad": (lambda m: torch.func.grad(lambda x: m(x).sum())(sample()), TRANSFORM),
    "left func.grad": (lambda m: m(_left_a_transform()), "an argument has left a function"),
    "buffer that left func.grad": (
        lambda m: (setattr(m, "mask", _left_a_transform(24)), _step(m))[1],
        "a parameter or buffer has left a function transform",
    ),
    "functional_call": (_functional, SERVED),
    "ensemble": (_ensemble, TRANSFORM),
    "compile": (lambda m: _step(cast(nn.Module, torch.compile(m, backend="aot_eager"))), SERVED),
    "Module.compile": (lambda m: (m.compile(backend="eager"), _step(m))[1], SERVED),
    "fx": (lambda m: torch.fx.symbolic_trace(m)(sample()), SERVED),
    "pickle": (lambda m: _step(pickle.loads(pickle.dumps(m))), SERVED),
    "saved and assigned": (_saved, SERVED),
    "to and back": (_with(lambda m: m.float().double()), SERVED),
    "to": (lambda m: m.float()(sample().float()), "the dtype of an input differs"),
    "share_memory": (_with(lambda m: m.share_memory()), SERVED),
    "swap_tensors": (_swapped, SERVED),
    "weight_norm": (
        _with(lambda m: nn.utils.parametrizations.weight_norm(m.inner)),
        ADDED,
    ),
    "checkpoint": (lambda m: _checkpointed(m, use_reentrant=False), SERVED),
    "reentrant checkpoint": (lambda m: _checkpointed(m, use_reentrant=True), SERVED),
    "selective checkpoint": (_selective, MODE),
    "backward hook": (_hooked, "a submodule has hooks"),
    "optimizer in backward": (_in_backward, SERVED),
    "anomaly": (_anomaly, SERVED),
    "thread": (_in_a_thread, SERVED),
    "shallow copy": (_shallow, COPY),
    "replica": (_replica, COPY),
}
# Uses in which eager PyTorch raises another error or none; our error contains this advice.
RAISE = {"sparse cotangent": "to_dense"}


def _outcome(use: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    torch.manual_seed(3)
    try:
        return tree_leaves(use(module))
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", thinned(USES, 2))
def test_it_is_as_in_eager_or_says_why(trained: nn.Module, kind: str) -> None:
    use, reason = USES[kind]
    module = copy.deepcopy(trained)
    ours, theirs = _outcome(use, module), _outcome(use, _make())
    if kind in RAISE:
        assert isinstance(ours, BridgeError)
        assert RAISE[kind] in str(ours)
    elif isinstance(theirs, Exception):
        assert type(ours) is type(theirs), ours
    else:
        assert not isinstance(ours, Exception), ours
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    fallbacks = list(dispatch_report(module).fallbacks)
    assert len(fallbacks) == bool(reason), fallbacks
    assert not reason or fallbacks[0].startswith(reason), fallbacks
