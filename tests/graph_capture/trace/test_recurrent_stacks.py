"""Recurrent layers without gradients are one operator, with results equal to eager's to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import BridgeError, UnsupportedOperatorError
from tvmbridge.graph_capture.trace.function_table import FunctionTable

KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": partial(nn.RNN, nonlinearity="relu"),
}
FORMS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.4},
    {"proj_size": 3, "num_layers": 2, "dropout": 0.4},
]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STEPS, BATCH, FEATURES, SIZE = 4, 3, 5, 8


def _forms(kind: str) -> list[dict[str, Any]]:
    return [form for form in FORMS if kind == "lstm" or "proj_size" not in form]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _assert_the_same(ours: Any, eager: Any) -> None:
    """Assert equal values to the last bit, dtypes and strides, and separate memory."""
    found, expected = pytree.tree_leaves(ours), pytree.tree_leaves(eager)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
    storages = {t.untyped_storage().data_ptr() for t in found if t.numel()}
    assert len(storages) == sum(bool(t.numel()) for t in found)


def _has_halves(kind: str) -> bool:
    """Whether this processor has PyTorch's kernel of the layer in bfloat16; some have no LSTM."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            KINDS[kind](FEATURES, SIZE)(torch.randn(STEPS, BATCH, FEATURES))
        except RuntimeError:
            return False
    return True


def _skip_without_halves(kind: str) -> None:
    if not _has_halves(kind):
        pytest.skip(f"this processor has no {kind} in bfloat16, in eager PyTorch either")


def _run(mode: Any, module: nn.Module, x: torch.Tensor, autocast: bool) -> tuple[Any, torch.Tensor]:
    """Call the module inside ``mode``; return the results and the generator's state."""
    torch.manual_seed(1)
    with torch.no_grad(), torch.autocast("cpu", enabled=autocast), mode:
        return module(x), torch.random.get_rng_state()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_stacks_are_those_of_eager_pytorch(kind: str, train: bool, autocast: bool) -> None:
    if autocast:
        _skip_without_halves(kind)
    for form in _forms(kind):
        for dtype in DTYPES:
            torch.manual_seed(0)
            module = KINDS[kind](FEATURES, SIZE, **form).to(dtype).train(train)
            x = torch.randn(STEPS, BATCH, FEATURES, dtype=dtype)
            drawn = train and "dropout" in form
            for given in (x, x[:, :1], x[0]):
                if kind == "lstm" and drawn and autocast and dtype is torch.float16:
                    with pytest.raises(UnsupportedOperatorError, match="give it float32"):
                        _run(FunctionTable(), module, given, autocast)
                    continue
                results = [
                    _run(mode, module, given, autocast) for mode in (FunctionTable(), nullcontext())
                ]
                ours, eager = results
                if drawn:
                    # With dropout, layers run one by one, with other strides and rounding.
                    bounds = {} if dtype.itemsize > 2 else {"rtol": 2e-2, "atol": 2e-2}
                    torch.testing.assert_close(ours[0], eager[0], **bounds)
                else:
                    _assert_the_same(ours[0], eager[0])
                assert torch.equal(ours[1], eager[1])


def _arguments(kind: str, form: dict[str, Any], autocast: torch.dtype | None) -> list[Any]:
    module = KINDS[kind](FEATURES, SIZE, **form).requires_grad_(False)
    rows = module.num_layers * (2 if module.bidirectional else 1)
    sizes = (module.proj_size or SIZE, SIZE)[: 2 if kind == "lstm" else 1]
    batch = STEPS if module.batch_first else BATCH
    states = [torch.randn(rows, batch, size) for size in sizes]
    x = torch.randn(STEPS, BATCH, FEATURES)
    flags = (module.bias, module.num_layers, module.bidirectional, module.batch_first)
    return [x, states, list(module.parameters()), *flags, False, False, autocast]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_fake_kernels_are_those_of_the_operators(kind: str, autocast: torch.dtype | None) -> None:
    if autocast is not None:
        _skip_without_halves(kind)
    operator = getattr(torch.ops.tvmbridge, f"{kind}_stack").default
    backward = getattr(torch.ops.tvmbridge, f"{kind}_stack_backward").default
    for form in _forms(kind):
        args = _arguments(kind, form, autocast)
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))
        results = operator(*args)
        wanted = list(range(1 + len(args[1]) + len(args[2])))[::2]
        given = [None, *map(torch.ones_like, results[1:])], wanted, results[0], *args
        with FakeTensorMode() as mode:
            fakes = backward(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, given))
        found = backward(*given)
        assert [_layout(t) for t in found] == [_layout(t) for t in fakes]


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@pytest.mark.parametrize("form", [*FORMS, {"bidirectional": True}, {"proj_size": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str, form: dict[str, Any]) -> None:
    if "proj_size" in form and kind != "lstm":
        return
    torch.manual_seed(0)
    input, states, weights, *flags = _arguments(kind, form, None)
    tensors = [t.double().requires_grad_() for t in (input, *states, *weights)]

    def function(*tensors: torch.Tensor) -> Any:
        split = 1 + len(states)
        operator = getattr(torch.ops.tvmbridge, f"{kind}_stack").default
        return operator(tensors[0], list(tensors[1:split]), list(tensors[split:]), *flags)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


class _Chain(nn.Module):
    """Recurrent layers of all kinds, one of them under autocast and one with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 4, 2, bidirectional=True, batch_first=True)
        self.projected = nn.LSTM(8, 4, proj_size=3, batch_first=True)
        self.gru = nn.GRU(3, 3, 3, dropout=0.4, batch_first=True)
        self.rnn = nn.RNN(3, 3, batch_first=True)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        outputs, states = self.lstm(x)
        with torch.autocast("cpu", torch.bfloat16):
            halves = self.projected(outputs.contiguous())[0]
        return outputs, states, halves, self.rnn(self.gru(halves.float(), h)[0])


@pytest.mark.slow
def test_long_sequences_run_like_eager_in_a_call_a_stack() -> None:
    _skip_without_halves("lstm")
    torch.manual_seed(0)
    module, args = _Chain().requires_grad_(False), (torch.randn(2, 200, 5), torch.randn(3, 2, 3))
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, args)
    results = []
    for called in (module, other):
        torch.manual_seed(1)
        results.append((called(*args), torch.random.get_rng_state()))
    torch.testing.assert_close(*results)
    for ours, eager in zip(results[0][0][:3], results[1][0][:3], strict=True):
        _assert_the_same(ours, eager)
    report = dispatch_report(module)
    assert report.tvm_calls == 1
    calls = [name for name in report.aten_calls if name.startswith("tvmbridge.")]
    assert calls == [f"tvmbridge.{kind}_stack.default" for kind in ("gru", "lstm", "rnn_tanh")]
    assert sum(report.specializations[0].native_operators.values()) < 40


class _Autocast(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: torch.Tensor = self.layer(x)[0]
            return output


@pytest.mark.parametrize("kind", thinned(KINDS, len(KINDS)))
def test_training_under_autocast_is_that_of_eager(kind: str) -> None:
    _skip_without_halves(kind)
    torch.manual_seed(0)
    module, x = _Autocast(KINDS[kind](4, 4, 2, bidirectional=True)), torch.randn(3, 2, 4)
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    results = []
    for trained in (module, other):
        output = trained(x)
        output.square().sum().backward()
        results.append((output, [p.grad for p in trained.parameters()]))
    assert dispatch_report(module).tvm_calls == 1
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(*results, rtol=0, atol=0)


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 2])
        state: torch.Tensor = self.gru(packed)[1]
        return state


def test_packing_is_refused_by_name() -> None:
    with pytest.raises(BridgeError, match="packs a padded sequence"):
        add_tvm_dispatch(_Packed(), torch.randn(3, 2, 4), on_break="forward")


class _Transformed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.vmap(lambda each: self.gru(each)[0])(x)
        return found


class _ByOverload(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.gru, self.function = nn.GRU(4, 4, 2, dropout=0.5), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flags = (True, 2, 0.5, True, False, False)
        found: torch.Tensor = self.function(x, x.new_zeros(2, 2, 4), [*self.parameters()], *flags)[
            0
        ]
        return found


def test_layers_within_transforms_are_refused_by_name() -> None:
    with pytest.raises(BridgeError, match=r"transform of torch\.func"):
        add_tvm_dispatch(_Transformed(), torch.randn(2, 3, 2, 4), on_break="forward")


def test_layers_that_a_trace_does_not_see_are_refused_by_name() -> None:
    with pytest.raises(BridgeError, match="a way that a trace does not see"):
        add_tvm_dispatch(_ByOverload(torch.ops.aten.gru), torch.randn(3, 2, 4), on_break="forward")


def test_layers_called_as_operators_draw_as_in_eager() -> None:
    torch.manual_seed(0)
    module, x = _ByOverload(torch.ops.aten.gru.input), torch.randn(3, 2, 4)
    expected = []
    for called in (copy.deepcopy(module), module):
        if called is module:
            add_tvm_dispatch(module, x)
        torch.manual_seed(1)
        expected.append(called(x))
    torch.testing.assert_close(*expected)
    assert dispatch_report(module).tvm_calls == 1
