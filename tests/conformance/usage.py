"""Count which operators models use most, over the captured graphs of many small models.

    python -m tests.conformance.usage --write

writes ``usage.json``: for each operator, the number of models whose captured graph has it, in
evaluation or in training. The operators are those that the frontend sees after decomposition, and
they are ranked by that number. Core ATen operators that no model has follow in alphabetical order,
up to 150 in all.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.conformance.usage_models import models
from tvmbridge.core.admission import admitted_table
from tvmbridge.graph_capture.capture import capture
from tvmbridge.kernels.aten_call import resolve_overload

USAGE = Path(__file__).with_name("usage.json")
COUNT = 150

# Operators that compute nothing in compiled code, that it cannot contain (complex numbers, strides,
# shapes that depend on data), or that belong to other libraries.
_NOT_COMPUTED = (
    "aten.sym_ aten._local_scalar_dense aten._assert aten.resize_ aten._fft_ aten.as_strided "
    "aten.empty aten.view_as_ aten.nonzero transformers."
)


def operators_of(graph: torch.fx.Graph) -> set[str]:
    """Return the names of the ATen overloads that a captured graph calls."""
    return {
        str(node.target)
        for node in graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    }


def count_models() -> tuple[Counter[str], dict[str, str]]:
    """Return the number of models with each operator, and why some models were not counted."""
    counts: Counter[str] = Counter()
    left_out: dict[str, str] = {}
    for name, construct, args, kwargs in models():
        found: set[str] = set()
        try:
            model = construct()
            for training in (False, True):
                model.train(training)
                captured = capture(model, args, sample_kwargs=kwargs, needs_grad=training)
                found |= operators_of(captured.program.graph)
        except Exception as error:
            left_out[name] = type(error).__name__
        counts.update(found)
        print(f"{name}: {len(found)} operators {left_out.get(name, '')}", flush=True)
    return counts, left_out


def core_operators() -> list[str]:
    """Return the names of this PyTorch's functional core ATen overloads."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        operator, _, overload = rest.partition(".")
        if space != "aten":
            continue
        op: Any = getattr(getattr(torch.ops.aten, operator), overload or "default")
        if torch.Tag.core in op.tags and not op._schema.is_mutable:
            found.append(str(op))
    return sorted(found)


def most_used(content: dict[str, Any], count: int = COUNT) -> list[str]:
    """Return the ``count`` most used operators, from the content of ``usage.json``."""
    models_with: dict[str, int] = content["models_with"]
    ranked = sorted(models_with, key=lambda name: (-models_with[name], name))
    ranked += [name for name in content["core"] if name not in models_with]
    return [name for name in ranked if not name.startswith(tuple(_NOT_COMPUTED.split()))][:count]


def is_native(name: str) -> bool:
    """Whether compiled code needs no call of PyTorch's kernel for the overload ``name``.

    An overload that reads no tensor is a constant. Random numbers are drawn before the compiled
    function runs, and passed to it.
    """
    op = resolve_overload(name)
    reads = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
    drawn = torch.Tag.nondeterministic_seeded in op.tags
    return name in admitted_table()["converters"] or not reads or drawn


def read_usage() -> dict[str, Any]:
    """Return the content of ``usage.json``."""
    content: dict[str, Any] = json.loads(USAGE.read_text(encoding="utf-8"))
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: count the operators, and print the counts or write the file."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.usage", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {USAGE.name}")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    counts, left_out = count_models()
    content = {
        "models": sum(1 for _ in models()) - len(left_out),
        "left_out": left_out,
        "models_with": dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
        "core": core_operators(),
    }
    if options.write:
        USAGE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name in most_used(content):
        print(f"{counts[name]:4d} {'native' if is_native(name) else 'call  '} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
