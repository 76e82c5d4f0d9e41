"""Decompose the inverse of a short-time Fourier transform into transforms of its frames."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten


def inverse_transform(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return ``torch.istft(...)``; NotImplemented if it returns a complex signal.

    PyTorch raises an error if windows do not cover a place of the signal; here the result has
    infinities or NaNs there.
    """
    names = ("center", "normalized", "onesided", "length", "return_complex")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("return_complex") or not input.is_complex() or not input.shape[-1]:
        return NotImplemented
    hop = n_fft // 4 if hop_length is None else hop_length
    spectra = (input if input.dim() == 3 else input.unsqueeze(0)).transpose(1, 2)
    frames = _frames(spectra, n_fft, given)
    shape = _window(frames, window, n_fft if win_length is None else win_length, n_fft)
    total = n_fft + hop * (frames.shape[1] - 1)
    signal = _overlapped(frames * shape, total, hop)
    weight = _overlapped((shape * shape).expand(1, frames.shape[1], n_fft), total, hop)
    edge = n_fft // 2 if given.get("center", True) else 0
    length = given.get("length")
    end = total - edge if length is None else min(edge + length, total)
    result = signal[:, edge:end] / weight[:, edge:end]
    if length is not None and edge + length > total:
        result = functional.pad(result, (0, edge + length - total))
    return result if input.dim() == 3 else result.squeeze(0)


def _frames(spectra: torch.Tensor, n_fft: int, given: dict[str, Any]) -> torch.Tensor:
    norm = "ortho" if given.get("normalized") else "backward"
    onesided = given.get("onesided")
    if onesided or (onesided is None and spectra.shape[2] != n_fft):
        return torch.fft.irfft(spectra, n_fft, norm=norm)
    return torch.fft.ifft(spectra, norm=norm).real


def _window(
    frames: torch.Tensor, window: torch.Tensor | None, width: int, n_fft: int
) -> torch.Tensor:
    """Return the window, padded with zeros on both sides to the length of a frame."""
    if window is None:
        window = torch.ones(width, dtype=frames.dtype, device=frames.device)
    left = (n_fft - width) // 2
    return functional.pad(window, (left, n_fft - width - left))


def _overlapped(frames: torch.Tensor, total: int, hop: int) -> torch.Tensor:
    """Add frames up that begin ``hop`` elements apart."""
    columns = frames.transpose(1, 2)
    size = [1, frames.shape[2]]
    image = aten.col2im.default(columns, [1, total], size, [1, 1], [0, 0], [1, hop])
    signal: torch.Tensor = image.reshape(frames.shape[0], total)
    return signal
