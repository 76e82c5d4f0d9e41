"""For every operator in autocast's lists, an exported program casts as PyTorch's dispatcher does.

CUDA's lists are tested on fake tensors, which need no GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda import autocast_allowed, fake, fakes_on_cuda
from tvmbridge.differentiation.rehearsal import Rehearsal
from tvmbridge.graph_capture.capture import capture
from tvmbridge.graph_capture.trace import autocast
from tvmbridge.graph_capture.trace.autocast import casts_recorded

aten = torch.ops.aten
Call = tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]

# Operators that an exported program has additionally, or in other overloads.
_LEFT_OUT = ("prim.device", "aten._assert_tensor_metadata", "aten.detach", "aten.lift_fresh")
# Calls of the operators that no sample in PyTorch's operator database reaches.
_FURTHER: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "_convolution": (
        lambda x, w: aten._convolution(
            x, w, None, [1], [0], [1], False, [0], 1, False, True, True, True
        ),
        [(2, 3, 8), (4, 3, 3)],
    ),
    "_convolution.deprecated": (
        lambda x, w: aten._convolution(x, w, None, [1], [0], [1], False, [0], 1, False, True, True),
        [(2, 3, 8), (4, 3, 3)],
    ),
    "conv_tbc": (torch.conv_tbc, [(8, 2, 3), (3, 3, 4), (4,)]),
    "chain_matmul": (torch.chain_matmul, [(2, 3), (3, 4), (4, 5)]),
    "lstm_cell": (
        lambda x, h, c, *weights: torch.lstm_cell(x, [h, c], *weights),
        [(2, 3), (2, 4), (2, 4), (16, 3), (16, 4), (16,), (16,)],
    ),
    "rnn_tanh_cell": (torch.rnn_tanh_cell, [(2, 3), (2, 4), (4, 3), (4, 4)]),
    "rnn_relu_cell": (torch.rnn_relu_cell, [(2, 3), (2, 4), (4, 3), (4, 4)]),
    "norm.Scalar": (lambda x: aten.norm.Scalar(x, 2), [(3, 4)]),
    "norm.ScalarOpt_dim": (lambda x: aten.norm.ScalarOpt_dim(x, 2, [1]), [(3, 4)]),
    "frobenius_norm.dim": (lambda x: torch.frobenius_norm(x, [1]), [(3, 4)]),
    "nuclear_norm": (torch.nuclear_norm, [(3, 4)]),
    "nuclear_norm.dim": (lambda x: torch.nuclear_norm(x, [0, 1]), [(3, 4)]),
    "pow.Tensor_Scalar": (lambda x: x**3, [(3,)]),
    "pow.Scalar": (lambda x: 2.0**x, [(3,)]),
    "pdist": (torch.pdist, [(3, 4)]),
    "cdist": (torch.cdist, [(3, 4), (5, 4)]),
    "_upsample_bilinear2d_aa": (
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear", antialias=True),
        [(1, 2, 4, 4)],
    ),
    "_upsample_bicubic2d_aa": (
        lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic", antialias=True),
        [(1, 2, 4, 4)],
    ),
    "upsample_nearest2d": (
        lambda x: functional.interpolate(x, scale_factor=2),
        [(1, 2, 4, 4)],
    ),
    "_upsample_nearest_exact2d": (
        lambda x: functional.interpolate(x, scale_factor=2, mode="nearest-exact"),
        [(1, 2, 4, 4)],
    ),
    "nll_loss2d": (
        lambda x: functional.nll_loss(x, x.argmax(1)),
        [(2, 3, 4, 4)],
    ),
    "grid_sampler": (functional.grid_sample, [(1, 2, 4, 4), (1, 3, 3, 2)]),
    "cross_entropy": (
        lambda x, w: functional.cross_entropy(x @ w, x.argmax(-1), label_smoothing=0.1),
        [(3, 4), (4, 4)],
    ),
}
# Operators that autocast refuses, that only cuDNN has, or whose kernels require a GPU.
_UNREACHED_ON_CUDA = {
    "binary_cross_entropy",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_cudnn_rnn",
    "grid_sampler",
    "gru_cell",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
}
if torch.version.cuda and not torch.cuda.is_available():
    # It asks for cuDNN, and so for a driver, where PyTorch is built for GPUs.
    _UNREACHED_ON_CUDA |= {"_convolution", "_convolution.deprecated"}


class _Log(TorchDispatchMode):
    """A mode that records the called operators, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        dtypes = [
            leaf.dtype if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor | torch.dtype)
        ]
        if not str(func).startswith(_LEFT_OUT):
            self.calls.append((str(func), dtypes))
        return func(*args, **(kwargs or {}))


def _listed(device: str) -> set[str]:
    key = f"Autocast{device.upper()}"
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    # Overloads for named tensors, which PyTorch 2.11 still has.
    unnamed = (name for name in names if "imname" not in name and ".names_" not in name)
    return {name.removeprefix("aten::") for name in unnamed}


def samples(device: str, dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of the operators that autocast lists, as functions of tensors.

    Operators in PyTorch's operator database have two calls each; calls of the other operators are
    in ``_FURTHER``.
    """
    bases = {name.partition(".")[0].removeprefix("_") for name in _listed(device)}
    for info in op_db:
        known = {info.name.replace(".", "_"), info.name.rpartition(".")[2], info.aten_name}
        # Masked reductions create constants on the device, which are not fake.
        if info.name.startswith("masked.") or dtype not in info.dtypes:
            continue
        if "interpolate" not in info.name and not known & bases:
            continue
        found = list(info.sample_inputs_func(info, "cpu", dtype, False))
        for sample in (found[0], found[-1]):
            leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

            def call(
                *tensors: torch.Tensor,
                info: Any = info,
                leaves: Any = leaves,
                spec: Any = spec,
                places: Any = places,
            ) -> Any:
                given = list(leaves)
                for place, tensor in zip(places, tensors, strict=True):
                    given[place] = tensor
                args, kwargs = pytree.tree_unflatten(given, spec)
                return info.op(*args, **kwargs)

            yield info.name, call, tuple(leaves[place] for place in places)
    for name, (function, shapes) in _FURTHER.items():
        yield name, function, tuple(torch.rand(shape).to(dtype) for shape in shapes)


class Calls(nn.Module):
    """A module that makes each call in an autocast region."""

    def __init__(self, calls: Sequence[Call], device: str) -> None:
        super().__init__()
        self.calls, self.device = calls, device

    def one(self, number: int, tensors: Any) -> Any:
        with torch.autocast(self.device, torch.bfloat16):
            return self.calls[number][1](*tensors)

    def forward(self, *given: Any) -> Any:
        return [self.one(number, tensors) for number, tensors in enumerate(given)]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.float32, marks=pytest.mark.slow),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_every_listed_operator_casts_as_in_eager(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: set[str] = set()

    def noting(name: str, device: str) -> bool:
        found = genuine(name, device)
        reached.update([name.removeprefix("aten::")] if found else [])
        return found

    genuine = autocast.is_listed
    monkeypatch.setattr(autocast, "is_listed", noting)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with autocast_allowed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls, given, expected = _of_eager(mode, device, dtype)
        module = Calls(calls, device)
        with casts_recorded(), torch.no_grad():
            program = torch.export.export(module, given, strict=False)
        with mode, torch.no_grad(), _Log() as log:
            program.module()(*given)
    flat = [(name, call) for name, logged in expected for call in logged]
    for (name, call), found in zip(flat, log.calls, strict=False):
        assert found == call, name
    assert len(log.calls) == len(flat)
    if device == "cuda" and dtype is torch.float32:
        assert _listed(device) - reached - _UNREACHED_ON_CUDA == set()


def _of_eager(
    mode: FakeTensorMode, device: str, dtype: torch.dtype
) -> tuple[list[Call], tuple[Any, ...], list[tuple[str, Any]]]:
    """Return the calls that eager PyTorch accepts, their arguments, and the operators called."""
    calls, given, expected = [], [], []
    for call in samples(device, dtype):
        made = [fake(mode, t) if device == "cuda" else mode.from_tensor(t) for t in call[2]]
        with mode, torch.no_grad(), _Log() as log:
            try:
                Calls([call], device).one(0, made)
            except Exception:
                continue
        calls.append(call)
        given.append(made)
        expected.append((call[0], log.calls))
    return calls, tuple(given), expected


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda y, t: functional.cross_entropy(y, t),
    "label_smoothing": lambda y, t: functional.cross_entropy(y, t, label_smoothing=0.1),
    "nll_loss": lambda y, t: functional.nll_loss(y.log_softmax(-1), t),
    "mse_loss": lambda y, t: functional.mse_loss(y, functional.one_hot(t, 8).float()),
    "bce": lambda y, t: functional.binary_cross_entropy_with_logits(
        y, functional.one_hot(t, 8).to(torch.float64)
    ),
    "huber_loss": lambda y, t: functional.huber_loss(y, functional.one_hot(t, 8).float()),
    "prod": lambda y, t: y.prod(-1).sum(),
    "norms": lambda y, t: functional.layer_norm(y, (8,)).norm() + y.float().std(),
    "disabled": lambda y, t: _disabled(y) + y.sum(),
}


def _disabled(y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", enabled=False):
        return (y.float() @ y.float().T).mean()


@pytest.mark.slow
def test_training_under_cudas_autocast(tmp_path: Path) -> None:
    linear, x, target = nn.Linear(8, 8), torch.randn(4, 8), torch.zeros(4, dtype=torch.long)

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
            return [loss(self.linear(x), target) for loss in LOSSES.values()]

    module = Losses()
    with fakes_on_cuda(tmp_path):
        with torch.autocast("cuda", torch.bfloat16):
            captured = capture(module, (x, target))
        again = Rehearsal(module, (x, target), {}, captured)
        results = again(again.leaves_of(again.fakes()))
    assert {r.device.type for r in results} == {"cuda"}
    assert {name: r.dtype for name, r in zip(LOSSES, results, strict=True)} == {
        name: torch.float64 if name == "bce" else torch.float32 for name in LOSSES
    }
