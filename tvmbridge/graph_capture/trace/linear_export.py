"""Run parts of torch.export in linear time that are quadratic in the number of parameters.

torch.export builds a new dictionary for every look-up of a parameter, and compares the name of
every submodule with the path of each parameter. It also makes tensors for the states of generators,
which no trace here reads, and source that nothing runs. Names in its source are literals here.
"""

from __future__ import annotations

import importlib
import keyword
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.export.exported_program
from torch import fx, nn
from torch.fx.graph import CodeGen

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.generated import plain_text
from tvmbridge.core.torch_private import export_trace


@contextmanager
def sources_put_off() -> Iterator[None]:
    """Generate the source of a graph module at its first call, for those of this context.

    torch.export writes, compiles and runs the source of a program some ten times, and calls none.
    """
    with patched_here(fx.GraphModule, "recompile", _recompiled_later):
        yield


def _recompiled_later(genuine: Callable[[Any], Any], module: Any) -> None:
    if type(module.graph._codegen) is not CodeGen:  # its signature is read
        genuine(module)
        return

    def forward(called: Any, *args: Any, **kwargs: Any) -> Any:
        recompiled(called)
        return called.forward(*args, **kwargs)

    def recompiled(asked: Any) -> str:
        if "code" in vars(own):
            del own.code
        genuine(asked)
        return str(asked.code)

    own: Any = type(module)  # each graph module has a class of its own
    own.forward, own.code = forward, property(recompiled)


@contextmanager
def export_in_linear_time() -> Iterator[None]:
    """Speed up torch.export and ``run_decompositions`` in this thread within the context."""
    metadata = "_populate_param_buffer_metadata_to_new_gm"
    with ExitStack() as stack:
        stack.enter_context(sources_put_off())
        for owner in (export_trace(), torch.export.exported_program):
            stack.enter_context(patched_here(owner, metadata, _with_metadata))
        unlift = importlib.import_module("torch.export._unlift")
        stack.enter_context(patched_here(unlift, "_assign_attr", _assigned))
        aot = importlib.import_module("torch._functorch.aot_autograd")
        if not aot.config.functionalize_rng_ops:
            stack.enter_context(patched_here(aot, "PhiloxStateTracker", lambda _: nullcontext()))
        stack.enter_context(patched_here(fx.graph, "_format_target", _attribute))
        yield


def _with_metadata(
    genuine: Callable[..., None], metadata: dict[str, Any], module: Any, signature: Any
) -> None:
    """Call ``genuine`` with the two properties of the signature that it reads for each node.

    Each read of such a property builds a dictionary; here they are built once.
    """
    names = SimpleNamespace(
        inputs_to_parameters=signature.inputs_to_parameters,
        inputs_to_buffers=signature.inputs_to_buffers,
    )
    genuine(metadata, module, names)


def _attribute(_: Callable[..., str], base: str, path: str) -> str:
    """Return the source of the attribute at ``path`` below ``base``.

    PyTorch's own puts a name that is not an identifier between quotes as it is, and a keyword of
    Python without quotes: a module may be called ``class`` or ``a"b``.
    """
    for name in path.split("."):
        plain = name.isidentifier() and not keyword.iskeyword(name)
        base = f"{base}.{name}" if plain else f"getattr({base}, {plain_text(name)!r})"
    return base


def _assigned(
    genuine: Callable[..., None], value: Any, module: nn.Module, path: str, *args: Any, **named: Any
) -> None:
    """Assign ``value`` to ``path`` below ``module``, as torch.export's own helper does.

    That helper, ``genuine``, searches for submodules ``name@1``, ``name@2`` beside each ``name``
    of the path, which is slow. It is called only if there is such a submodule.
    """
    *holders, field = path.split(".")
    holder = module
    for name in holders:
        if f"{name}@1" in holder._modules:
            genuine(value, module, path, *args, **named)
            return
        if not hasattr(holder, name):
            setattr(holder, name, nn.Module())
        holder = getattr(holder, name)
    genuine(value, holder, field, *args, **named)
