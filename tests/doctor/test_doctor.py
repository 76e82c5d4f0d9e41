"""The doctor: its findings for machines of several kinds, and its probes on this one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tvmbridge.core import versions
from tvmbridge.doctor import command as doctor
from tvmbridge.doctor import probes
from tvmbridge.doctor.command import Finding, ProbeResult, Status

CPU_ONLY: dict[str, Any] = {
    "gpu": False,
    "hip": None,
    "gpu_names": [],
    "arch": None,
    "threads": 2,
    "cpu": "AVX2",
}
NVIDIA = {**CPU_ONLY, "gpu": True, "gpu_names": ["H200"], "arch": "sm_90"}
AMD = {**CPU_ONLY, "gpu": True, "hip": "7.1", "gpu_names": ["MI300"], "arch": "gfx942"}


class Machine:
    """Answers the doctor's probes as a machine with these facts would."""

    def __init__(self, facts: dict[str, Any], **answers: ProbeResult) -> None:
        self.answers = {
            "torch": ProbeResult(facts),
            "compile_llvm": ProbeResult(),
            "compile_cuda": ProbeResult(),
            "compile_rocm": ProbeResult(),
            "run_cpu": ProbeResult({"equal": True}),
            "run_gpu": ProbeResult({"equal": True}),
            "private_names": ProbeResult({"checked": 80, "problems": []}),
            "alignment": ProbeResult({"allocations": True, "view": False, "copy": True}),
            "stream": ProbeResult({"ordered": True}),
        } | answers

    def __call__(self, name: str, *arguments: str) -> ProbeResult:
        if name == "compile":
            name = f"compile_{json.loads(arguments[0])['kind']}"
        return self.answers[name]


def finding(findings: list[Finding], subject: str) -> Finding:
    (found,) = [f for f in findings if f.subject.startswith(subject)]
    return found


def test_a_cpu_machine_is_well() -> None:
    findings = doctor.examine(Machine(CPU_ONLY))
    assert doctor.cpu_path_works(findings)
    assert finding(findings, "GPU").status is Status.NOTE
    assert "no such device" in finding(findings, "target cuda").detail
    assert not [f for f in findings if f.subject.startswith("streams")]


@pytest.mark.parametrize(
    ("probe", "result", "subject"),
    [
        ("torch", ProbeResult(error="the process died of SIGILL"), "PyTorch"),
        ("compile_llvm", ProbeResult(error="no answer within 120 s"), "target llvm"),
        ("run_cpu", ProbeResult(error="the process died of SIGSEGV"), "target llvm"),
        ("run_cpu", ProbeResult({"equal": False}), "target llvm"),
        ("alignment", ProbeResult({"allocations": False, "view": False, "copy": True}), "align"),
        (
            "private_names",
            ProbeResult({"checked": 80, "problems": ["torch._C._x, used for y: gone"]}),
            "private names of torch",
        ),
    ],
)
def test_what_breaks_the_cpu_path(probe: str, result: ProbeResult, subject: str) -> None:
    findings = doctor.examine(Machine(CPU_ONLY, **{probe: result}))
    wrong = finding(findings, subject)
    assert wrong.status is Status.WRONG
    assert wrong.advice
    assert not doctor.cpu_path_works(findings)


def test_a_missing_code_generator_is_a_note_where_there_is_no_device() -> None:
    refused = ProbeResult(error="RuntimeError: Cannot find ROCm path")
    findings = doctor.examine(Machine(CPU_ONLY, compile_rocm=refused))
    assert finding(findings, "target rocm").status is Status.NOTE
    assert "ROCM_PATH" in finding(findings, "target rocm").advice
    assert doctor.cpu_path_works(findings)


def test_an_nvidia_machine_is_probed_for_its_own_architecture_and_streams() -> None:
    findings = doctor.examine(Machine(NVIDIA))
    assert finding(findings, "target cuda (sm_90)").status is Status.OK
    assert finding(findings, "streams (cuda)").status is Status.OK
    assert "no such device" in finding(findings, "target rocm").detail


def test_an_amd_machine_is_no_cuda_machine() -> None:
    findings = doctor.examine(Machine(AMD))
    assert finding(findings, "target rocm (gfx942)").status is Status.OK
    assert "no such device" in finding(findings, "target cuda").detail


def test_a_wrong_stream_is_wrong_but_leaves_the_cpu_path() -> None:
    findings = doctor.examine(Machine(NVIDIA, stream=ProbeResult({"ordered": False})))
    assert finding(findings, "streams").status is Status.WRONG
    assert doctor.cpu_path_works(findings)


def test_a_wrong_pin_shows_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = versions.PackageVersion("apache-tvm-ffi", "==0.1.14.post1", True, "0.1.15", None)
    monkeypatch.setattr(versions, "installed_versions", lambda: [wrong])
    findings = doctor.examine(Machine(CPU_ONLY))
    assert finding(findings, "apache-tvm-ffi").advice == versions.fix_command()
    assert not doctor.cpu_path_works(findings)


def test_missing_dot_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(doctor, "_OPTIONAL", {"tune": ("no_such_module",)})
    findings = doctor.examine(Machine(CPU_ONLY))
    assert "graphviz program" in finding(findings, "graphviz").advice
    assert "tvmbridge[tune]" in finding(findings, "packages to tune").advice
    assert doctor.cpu_path_works(findings)


def test_a_command_to_copy_is_not_broken_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = versions.PackageVersion("apache-tvm", "==0.27.0.post1", True, "0.25.0", None)
    monkeypatch.setattr(versions, "installed_versions", lambda: [wrong])
    monkeypatch.setattr(doctor, "run_probe", Machine(CPU_ONLY))
    assert doctor.main() == 1
    assert versions.fix_command() in capsys.readouterr().out


@pytest.mark.parametrize("works", [True, False])
def test_the_report_and_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], works: bool
) -> None:
    run = ProbeResult({"equal": works})
    monkeypatch.setattr(doctor, "run_probe", Machine(CPU_ONLY, run_cpu=run))
    assert doctor.main() == (0 if works else 1)
    printed = capsys.readouterr().out
    assert "target llvm" in printed
    assert ("The CPU path works." in printed) is works


def test_a_crash_in_a_probe_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setattr(doctor, "PROBE_FILE", script)
    assert doctor.run_probe("any").error == "the process died of SIGSEGV"


def test_a_hang_in_a_probe_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(doctor, "PROBE_FILE", script)
    assert doctor.run_probe("any", seconds=1).error == "no answer within 1 s"


def test_a_probe_that_prints_no_result_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "probe.py"
    script.write_text("import sys\nsys.exit('no such library')\n")
    monkeypatch.setattr(doctor, "PROBE_FILE", script)
    assert doctor.run_probe("any").error == "exit status 1: no such library"


def test_the_probes_on_this_machine() -> None:
    assert doctor.run_probe("run_cpu") == ProbeResult({"equal": True})
    assert doctor.run_probe("alignment").facts["copy"] is True
    assert doctor.run_probe("private_names").facts["problems"] == []
    unknown = doctor.run_probe("compile", json.dumps({"kind": "no_such_target"}))
    assert unknown.error is not None
    assert "no_such_target" in unknown.error


def test_a_private_name_that_pytorch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_has_storage")
    (problem,) = probes.private_names()["problems"]
    assert problem.startswith("torch._C._has_storage, used for refusing tensors")


@pytest.mark.slow
def test_the_whole_command_on_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tvmbridge", "doctor"]
    assert subprocess.run(command, check=False, timeout=300).returncode == 0
    assert "The CPU path works." in capfd.readouterr().out
