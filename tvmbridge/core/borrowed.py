"""Tensors on memory that they do not keep alive."""

from __future__ import annotations

import ctypes

import torch


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of ``tensor``, with its strides, that does not keep it alive.

    The caller must make sure that the memory is not freed or given to another tensor while the
    result is used. ``tensor`` must have elements.
    """
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = span * tensor.itemsize
    if tensor.is_cuda:
        memory = torch.as_tensor(_DeviceMemory(tensor.data_ptr(), nbytes), device=tensor.device)
        flat = memory.view(tensor.dtype)
    else:
        buffer = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
        flat = torch.frombuffer(buffer, dtype=tensor.dtype)
    if tensor.is_contiguous():
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, tensor.stride())


class _DeviceMemory:
    """Bytes on a GPU as a buffer that does not keep the memory alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
