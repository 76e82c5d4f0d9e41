"""Write the file of an exported function, which ``tvmbridge_runtime`` reads.

``runtime/tvmbridge_runtime/container.py`` describes the file format.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tvmbridge.core.own_files import replacing

MAGIC = b"TVMBRG\x01\n"
FORMAT = 1
_HEADER, _PAGE, _ALIGNMENT, _CHUNK = 64, 4096, 64, 4 << 20
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_file(
    path: Path,
    manifest: Mapping[str, Any],
    code: bytes,
    weights: Mapping[str, torch.Tensor],
    *,
    cubin: bytes = b"",
    beside: bool,
) -> None:
    """Write an exported function to ``path``, completely or not at all.

    Args:
        cubin: the machine code of a GPU's kernels.
        manifest: the content of the manifest; this function adds the format, the sections and the
            checksums.
        beside: whether the weights go into a file of their own, ``path`` with ``.safetensors``
            appended.
    """
    manifest = {"format": FORMAT, **manifest}
    if beside:
        weights_path = path.with_name(f"{path.name}.safetensors")
        described = _write(weights_path, safetensors(weights))
        manifest["beside"] = {"file": weights_path.name, **described}
    inside = [] if beside else list(safetensors(weights))
    places, parts = {}, list[bytes | memoryview]()
    offset = 0
    sections: dict[str, list[bytes | memoryview]] = {"code": [code]}
    if cubin:
        sections["cubin"] = [cubin]
    sections["weights"] = inside
    for name, pieces in sections.items():
        size = sum(len(piece) for piece in pieces)
        places[name] = {"offset": offset, "size": size}
        padding = -size % _PAGE
        parts += [*pieces, bytes(padding)]
        offset += size + padding
    manifest["sections"] = places
    manifest["body"] = _described(parts)
    _write(path, [*_front(manifest), *parts])


def _front(manifest: Mapping[str, Any]) -> list[bytes]:
    """Return the header, and the manifest padded to a whole page."""
    text = json.dumps(manifest, indent=1).encode()
    text += b" " * (-(_HEADER + len(text)) % _PAGE)
    begin = MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little")
    header = begin + zlib.crc32(begin).to_bytes(4, "little")
    return [header.ljust(_HEADER, b"\0"), text]


def safetensors(weights: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a file in the safetensors format.

    Tensors whose size is a multiple of 64 bytes come first, so that each begins at a cache line.
    """
    names = sorted(weights, key=lambda name: weights[name].nbytes % _ALIGNMENT != 0)
    header: dict[str, Any] = {}
    offset = 0
    for name in names:
        tensor = weights[name]
        header[name] = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        tensor = weights[name].detach().contiguous()
        if tensor.nbytes:
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


def _described(parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Return the size of all ``parts`` together, and the CRC-32 of each chunk."""
    sums, size = list[int](), 0
    current, room = 0, _CHUNK
    for part in parts:
        view = memoryview(part).cast("B")
        size += len(view)
        while len(view):
            piece, view = view[:room], view[room:]
            current, room = zlib.crc32(piece, current), room - len(piece)
            if not room:
                sums.append(current)
                current, room = 0, _CHUNK
    if room < _CHUNK:
        sums.append(current)
    return {"size": size, "chunk": _CHUNK, "crc32": sums}


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write ``parts`` to ``path``, replacing an existing file; return their size and checksums."""
    kept = list(parts)
    with replacing(path, mode=0o666) as file:
        file.writelines(kept)
    return _described(kept)
