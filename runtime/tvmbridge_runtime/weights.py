"""Read the weights of an exported function: safetensors, inside the file or beside it."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from tvmbridge_runtime.container import Container, check_chunks, opened
from tvmbridge_runtime.errors import FileError

_ALIGNMENT = 64
# NumPy has no bfloat16, so its bits are read as uint16.
NUMPY = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint8": "u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "?",
}


def weights_of(
    container: Container, checksum: Callable[[memoryview], int]
) -> list[tuple[numpy.ndarray[Any, Any], str]]:
    """Return the weights in the order in which the code takes them, each with its dtype's name.

    All bytes whose checksum :func:`open_container` has not verified are verified. Each array begins
    at a multiple of 64 bytes.

    Args:
        checksum: the function that computes a CRC-32.

    Raises:
        FileError: a byte differs from the written file; or the file beside is missing, or is not
            the file that was written.
    """
    described, parameters = container.manifest["body"], container.manifest["parameters"]
    chunks = range(container.chunks_of_code().stop, len(described["crc32"]))
    check_chunks(container.path, container.body, described, checksum=checksum, numbers=chunks)
    if not parameters:
        return []
    blob = _blob(container, checksum)
    length = int.from_bytes(blob[:8], "little")
    table = json.loads(bytes(blob[8 : 8 + length]))
    data = blob[8 + length :]
    return [(_tensor(data, table[p["name"]], p), p["dtype"]) for p in parameters]


def _blob(container: Container, checksum: Callable[[memoryview], int]) -> memoryview:
    described = container.manifest.get("beside")
    if described is None:
        return container.section("weights")
    # The file may be a link: its weights are beside the link, or beside what it refers to.
    folders = (container.path.parent, container.path.resolve().parent)
    places = [folder / described["file"] for folder in folders]
    path = next((place for place in places if place.is_file()), places[0])
    if not path.is_file():
        raise FileError(
            f"the weights of {container.path} should be in {path}, which is not there: keep both "
            "files in one folder"
        )
    if path.stat().st_size != described["size"]:
        raise FileError(f"{path} is not the file of weights that belongs to {container.path}")
    with opened(path) as file:
        blob = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    check_chunks(path, blob, described, checksum=checksum)
    return blob


def _tensor(
    data: memoryview, entry: dict[str, Any], parameter: dict[str, Any]
) -> numpy.ndarray[Any, Any]:
    start, end = entry["data_offsets"]
    flat = numpy.frombuffer(data[start:end], dtype=NUMPY[parameter["dtype"]])
    return aligned(flat.reshape(entry["shape"]))


def aligned(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """Return ``array`` if it is contiguous and aligned to 64 bytes, otherwise a copy that is."""
    if array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0:
        return array
    room = empty(array.shape, array.dtype)
    room[...] = array
    return room


def empty(shape: Sequence[int], dtype: Any) -> numpy.ndarray[Any, Any]:
    """Return an uninitialized array that begins at a multiple of 64 bytes."""
    dtype = numpy.dtype(dtype)
    size = int(numpy.prod(shape, dtype=numpy.int64)) * dtype.itemsize
    raw = numpy.empty(size + _ALIGNMENT, dtype=numpy.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return raw[first : first + size].view(dtype).reshape(shape)
