"""Describe an exported file in readable lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from tvmbridge.core.errors import ExportError
from tvmbridge.exporting.runtime import runtime


def description(path: Path) -> str:
    """Return lines about an exported file: arguments, results, target, sizes and versions.

    Raises:
        ExportError: the file is damaged, or is no exported file.
        OSError: the file cannot be read.
    """
    package = runtime()
    try:
        manifest = package.read_manifest(path)
    except package.RuntimeFileError as error:
        raise ExportError(str(error)) from error
    parameters = manifest["parameters"]
    weights = sum(_nbytes(p) for p in parameters)
    target, sections = manifest["target"], manifest["sections"]
    place = "beside" if "beside" in manifest else "inside"
    names = ("tvm", "apache-tvm-ffi", "torch")
    place_of_code = f"{target['cpu']} ({target['architecture']}, {target['num_cores']} cores)"
    if target["kind"] == "cuda":
        kernels = sections["cubin"]["size"]
        place_of_code = f"{target['architecture']}, {kernels} bytes of kernels for {target['gpu']}"
    return "\n".join(
        [
            f"{manifest['name']}: {sections['code']['size']} bytes of code for {place_of_code}",
            *(f"argument {_told(i)}" for i in manifest["inputs"]),
            *(f"symbol {s['name']}: from {s['least']} to {s['most']}" for s in manifest["symbols"]),
            *(f"result {n} {_typed(o)}" for n, o in enumerate(manifest["outputs"])),
            f"{len(parameters)} weights of {weights} bytes, {place}",
            "instruction sets: " + " ".join(target["features"]),
            "versions: " + ", ".join(f"{n} {manifest['versions'][n]}" for n in names),
        ]
    )


def _told(spec: Mapping[str, Any]) -> str:
    return f"{spec['name']} {_typed(spec)}"


def _typed(spec: Mapping[str, Any]) -> str:
    return f"{spec['dtype']}[{', '.join(map(str, spec['shape']))}]"


_SIZES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "bool": 1}


def _nbytes(parameter: Mapping[str, Any]) -> int:
    shape: Sequence[int] = parameter["shape"]
    dtype = str(parameter["dtype"])
    return prod(shape) * _SIZES.get(dtype, 1 if dtype.endswith("int8") else 4)
