"""The function ``export``: write a module's forward into one file that runs without PyTorch."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tvm
from torch import nn

from tvmbridge.core.errors import CaptureError, ExportError, UnsupportedOperatorError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.versions import installed_versions
from tvmbridge.exporting.code import AloneCode, alone_code
from tvmbridge.exporting.convention import dtype_name
from tvmbridge.exporting.features import described_target, named_target
from tvmbridge.exporting.gpu import cubin_of, is_gpu
from tvmbridge.exporting.leftovers import refuse_packed_layers
from tvmbridge.exporting.linking import linked
from tvmbridge.exporting.symbolic import symbolic_code
from tvmbridge.exporting.writing import write_file
from tvmbridge.graph_capture.capture import normalize_sample
from tvmbridge.runtime.any_size import sizes_to_serve


def export(
    module: nn.Module,
    sample: Any,
    path: str | os.PathLike[str],
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    dynamic_shapes: Any = None,
    weights: Literal["inside", "beside"] = "inside",
    options: CompileOptions | dict[str, Any] | None = None,
) -> Path:
    """Write ``module``'s forward, compiled and with its weights, into one file.

    ``tvmbridge_runtime.load(path)`` runs the file in a process without PyTorch and without a
    compiler; ``tvmbridge_runtime.h`` runs it in C++. The current weights become constants: batch
    norm is folded, and values that depend on weights alone are computed now. Arguments of forward
    that are no tensors keep the values of the sample.

    Args:
        module: a module in eval mode, on the CPU; it is left unchanged.
        sample: a tensor, or a tuple of positional arguments.
        path: the file; it is written completely or not at all.
        sample_kwargs: keyword arguments of forward.
        target: the name of a processor of this architecture, such as ``"x86-64-v3"``; or a dict of
            TVM of kind ``llvm`` with ``mcpu`` and ``num-cores``; or an NVIDIA GPU, such as
            ``"cuda -arch=sm_90"``. None is this machine's processor.
        dynamic_shapes: a spec as for ``torch.export``; dimensions with a ``Dim`` may have any size
            within its bounds.
        weights: ``"inside"`` writes the weights into the file; ``"beside"`` writes them to a second
            file, ``path`` with ``.safetensors`` appended.
        options: a :class:`CompileOptions` or a dict of its fields.

    Returns:
        The path.

    Raises:
        ExportError: operators or effects of forward need PyTorch, and the message names all of
            them with the lines of the model; or there is no graph of forward, and the message
            has the reason.
        PassError, BuildError: the stage that failed.
        OSError: the file cannot be written.

    Example:
        >>> import torch, tvmbridge
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> path = tvmbridge.export(model, torch.zeros(3, 4), "linear.tvmb")  # doctest: +SKIP
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if weights not in ("inside", "beside"):
        raise ValueError(f'weights is {weights!r}; choose "inside" or "beside"')
    if module.training:
        raise ExportError(
            "the module is in train mode; an exported function is for inference: call eval() first"
        )
    path = Path(path)
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "the path exists, and is no regular file", str(path))
    refuse_packed_layers(module)
    args, kwargs = normalize_sample(sample, sample_kwargs)
    chosen, target = CompileOptions.of(options), named_target(target)
    spec = sizes_to_serve(module, dynamic_shapes, (args, kwargs))
    if spec is not None and is_gpu(target):
        raise ExportError("code for GPUs has fixed sizes: export it without dynamic_shapes")
    if spec == "auto":
        raise ValueError('dynamic_shapes="auto" is for calls; name the dimensions of an export')
    try:
        if spec is None:
            code = alone_code(module, args, kwargs, target=target, options=chosen)
        else:
            code = symbolic_code(module, args, kwargs, spec, target=target, options=chosen)
    except (CaptureError, UnsupportedOperatorError) as error:
        raise ExportError(f"{type(module).__name__} cannot be exported: {error}") from error
    library = linked(code.executable)
    names = _unique_names(code)
    manifest = {
        "name": type(module).__name__,
        "versions": _versions(),
        "target": described_target(code.target),
        "inputs": code.inputs,
        "symbols": code.symbols,
        "relations": code.relations,
        "outputs": code.outputs,
        "structure": code.structure,
        "checks": code.checks,
        "constants": code.constants,
        "parameters": [
            {"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            for name, tensor in zip(names, code.weights, strict=True)
        ],
        "code_sha256": hashlib.sha256(library).hexdigest(),
    }
    held = dict(zip(names, code.weights, strict=True))
    cubin = cubin_of(code.executable, code.target) if is_gpu(code.target) else b""
    write_file(path, manifest, library, held, cubin=cubin, beside=weights == "beside")
    return path


def _versions() -> dict[str, str]:
    found = {p.name: p.found or "" for p in installed_versions()}
    return {"tvm": tvm.__version__, **found}


def _unique_names(code: AloneCode) -> list[str]:
    """Return the names of the weights; names that occur twice get a number appended."""
    names, taken = [], set[str]()
    for name in code.weight_names:
        unique, number = name, 1
        while unique in taken:
            unique, number = f"{name}.{number}", number + 1
        taken.add(unique)
        names.append(unique)
    return names
