"""ATen calls by the compiled half do the same as those by Python, and as PyTorch."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
import tvm_ffi

from tvmbridge.core.compiled_half import compiled_half
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.kernels import aten_call, register_kernels
from tvmbridge.kernels.aten_call import ATEN_CALL, described_call, run_aten_call
from tvmbridge.kernels.keys import key_of
from tvmbridge.kernels.sized import SIZED

pytestmark = pytest.mark.skipif(
    compiled_half("tvmbridge.kernels._products") is None, reason="the compiled half is missing"
)

X = {"tensor": 0}
FLOAT = "float32"


def _spec(op: str, args: list[Any], declared: list[Any], **fields: Any) -> str:
    content = {"op": op, "args": args, "kwargs": {}, "results": None, "declared": declared}
    return json.dumps(content | fields)


def _called(name: str, spec: str, *tensors: torch.Tensor | tvm_ffi.Shape) -> Any:
    register_kernels()
    given = [t if isinstance(t, tvm_ffi.Shape) else tvm_ffi.from_dlpack(t) for t in tensors]
    found = tvm_ffi.get_global_func(name)(key_of(spec), *given)
    tensor = isinstance(found, tvm_ffi.Tensor)
    return torch.from_dlpack(found) if tensor else [torch.from_dlpack(f) for f in found]


def _pairs(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


CASES = {
    "kwargs and defaults": (
        _spec(
            "aten.cumsum.default",
            [X, 1],
            [[[4, 6], "float64"]],
            kwargs={"dtype": {"dtype": "float64"}},
        ),
        [(4, 6)],
    ),
    "channels last": (
        _spec(
            "aten.convolution.default",
            [{"channels_last": 0}, {"channels_last": 1}, None, *[[1, 1]] * 3, False, [0, 0], 1],
            [[[2, 5, 5, 3], FLOAT]],
            channels_last=True,
        ),
        [(2, 5, 5, 4), (3, 3, 3, 4)],
    ),
    "a list of tensors": (
        _spec("aten.cat.default", [[X, {"tensor": 1}, X], 1], [[[4, 14], FLOAT]]),
        [(4, 6), (4, 2)],
    ),
    "a view of an operand": (
        _spec("aten.sin.default", [{"view": [0, [3, 2], [1, 6], 2]}], [[[3, 2], FLOAT]]),
        [(4, 6)],
    ),
    "complex numbers": (_spec("aten.sgn.default", [{"complex": 0}], [[[3, 2], FLOAT]]), [(3, 2)]),
    "to complex numbers": (
        _spec("aten._fft_r2c.default", [X, [1], 0, True], [[[4, 4, 2], FLOAT]]),
        [(4, 6)],
    ),
    "some of several results": (
        _spec("aten.topk.default", [X, 2], [[[4, 2], "int64"]], results=[1]),
        [(4, 6)],
    ),
    "a list of results": (
        _spec("aten.split.Tensor", [X, 4, 1], [[[4, 4], FLOAT], [[4, 2], FLOAT]], results=[0, 1]),
        [(4, 6)],
    ),
    "an operand as the result": (_spec("aten.alias.default", [X], [[[4, 6], FLOAT]]), [(4, 6)]),
    "no elements": (_spec("aten.sin.default", [X], [[[0, 6], FLOAT]]), [(0, 6)]),
    "no tensors": (
        _spec(
            "aten.full.default",
            [[2, 3], {"float": "inf"}],
            [[[2, 3], FLOAT]],
            kwargs={"device": {"device": "cpu"}},
        ),
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_python_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    spec, shapes = CASES[name]
    operands = [torch.randn(shape) for shape in shapes]
    expected = run_aten_call(key_of(spec), *map(tvm_ffi.from_dlpack, operands))
    monkeypatch.setattr(aten_call, "_program", None)  # Python takes no part
    found = _called(ATEN_CALL, spec, *operands)
    for one, other in zip(_pairs(found), _pairs(expected), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.is_contiguous()
        assert all(one.data_ptr() != operand.data_ptr() or not one.numel() for operand in operands)


def test_optional_tensors_in_a_list() -> None:
    index = {"tensor": 1}
    spec = _spec("aten.index.Tensor", [X, [None, index]], [[[4, 3], FLOAT]])
    x, where = torch.randn(4, 6), torch.tensor([5, 0, 2])
    assert torch.equal(_called(ATEN_CALL, spec, x, where), x[:, where])


@pytest.mark.parametrize("columns", [6, 9])
def test_sizes_that_each_call_passes(columns: int) -> None:
    rest = {"size": [[[1, [1]], [-2, [0]]], 1, False, []]}
    spec = _spec("aten.narrow_copy.default", [X, 1, 2, rest], [[[4, rest], FLOAT]])
    x = torch.randn(4, columns)
    found = _called(ATEN_CALL + SIZED, spec, tvm_ffi.Shape((columns,)), x)
    assert torch.equal(found, x[:, 2:])


def test_the_half_describes_no_custom_operator() -> None:
    with torch.library._scoped_library("aten_calls_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        spec = _spec("aten_calls_test.twice.default", [X], [[[4], FLOAT]], promises=[[1]])
        assert described_call(key_of(spec)) is None
        x = torch.randn(4)
        assert torch.equal(_called(ATEN_CALL, spec, x), x * 2)


def test_a_result_of_another_type_is_refused() -> None:
    spec = _spec("aten.sin.default", [X], [[[5], FLOAT]])
    with pytest.raises(UnsupportedOperatorError, match=r"float32\[4\].*float32\[5\] was declared"):
        _called(ATEN_CALL, spec, torch.randn(4))


_CHOLESKY = _spec(
    "aten.linalg_cholesky_ex.default",
    [X],
    [[[2, 2], FLOAT]],
    results=[0],
    kwargs={"check_errors": True},
)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (_CHOLESKY, (2, 2)),
        (_spec("aten.cumsum.default", [X, 7], [[[2], FLOAT]]), (2,)),
    ],
)
def test_errors_are_those_of_pytorch(spec: str, shape: tuple[int, ...]) -> None:
    x = -torch.ones(shape)
    with pytest.raises((RuntimeError, IndexError)) as expected:
        run_aten_call(key_of(spec), tvm_ffi.from_dlpack(x))
    with pytest.raises(type(expected.value)) as found:
        _called(ATEN_CALL, spec, x)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_warnings_of_a_kernel_are_python_s() -> None:
    spec = _spec("aten.var.correction", [X], [[[], FLOAT]])
    with pytest.warns(UserWarning, match="degrees of freedom"):
        _called(ATEN_CALL, spec, torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="degrees of freedom"):
            _called(ATEN_CALL, spec, torch.ones(1))


def test_nothing_is_recorded_for_backward() -> None:
    spec = _spec("aten.sin.default", [X], [[[4], FLOAT]])
    assert torch.is_grad_enabled()
    assert not _called(ATEN_CALL, spec, torch.randn(4)).requires_grad
    assert torch.is_grad_enabled()
