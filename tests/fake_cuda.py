"""CUDA without a GPU: fake CUDA tensors, for which PyTorch uses CUDA's autocast lists."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using c10::Device;
using c10::Stream;
struct NoDevice final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return static_type; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(static_type, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream) const override { return getStream(getDevice()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 0; }
};
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoDevice); }
"""


def fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake CUDA tensor with the shape and dtype of ``tensor``."""
    made = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cuda", 0))
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def autocast_allowed() -> Iterator[None]:
    """A context in which ``torch.autocast("cuda")`` does not require a GPU."""
    with (
        mock.patch.object(
            torch.cuda.amp.common, "amp_definitely_not_available", return_value=False
        ),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
    ):
        yield


@contextmanager
def fakes_on_cuda(folder: Path) -> Iterator[None]:
    """A context in which fake tensors of real tensors are on CUDA, as in a trace for a GPU.

    Autograd needs a C++ device guard for CUDA. If PyTorch is built without CUDA, a dummy guard is
    compiled in ``folder``.
    """
    _register_guard(folder)
    genuine = FakeTensorMode.from_tensor
    made: dict[tuple[int, int], tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def from_tensor(mode: Any, tensor: torch.Tensor, **named: Any) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return genuine(mode, tensor, **named)
        key = id(mode), id(tensor)
        if key not in made:
            found = fake(mode, genuine(mode, tensor, **named))
            if isinstance(tensor, torch.nn.Parameter):
                found = torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
            made[key] = mode, tensor, found
        return made[key][2]

    with ExitStack() as stack:
        stack.enter_context(autocast_allowed())
        stack.enter_context(mock.patch.object(FakeTensorMode, "from_tensor", from_tensor))
        yield


def _register_guard(folder: Path) -> None:
    if torch.backends.cuda.is_built():
        return
    compiler, torch_folder = shutil.which("g++"), Path(torch.__file__).parent
    if compiler is None:
        pytest.skip("no C++ compiler (g++)")
    library = folder / "guard.so"
    (folder / "guard.cpp").write_text(_GUARD)
    includes = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
    options = ["-O0", "-std=c++20", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([compiler, str(folder / "guard.cpp"), *options, *includes], check=True)
    ctypes.CDLL(str(library))
