"""The doctor: its findings for simulated machines, and its probes on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tvmbridge.core import versions
from tvmbridge.doctor import command as doctor
from tvmbridge.doctor import probes
from tvmbridge.doctor.command import CheckResult, ProbeResult, Status


def half(path: str | None = "/cache/_native.so") -> dict[str, str | None]:
    """Return a probe's entry for one compiled half; ``path`` None: it could not be compiled."""
    text = f"_native: {path}" if path else "_native is missing, because there is no compiler"
    return {"name": "_native", "path": path, "text": text}


class Machine:
    """A simulated machine: answers the doctor's probes with given results."""

    def __init__(self, **answers: ProbeResult) -> None:
        self.answers = {
            "torch": ProbeResult({"threads": 2, "cpu": "AVX2"}),
            "compiler": ProbeResult({"equal": True}),
            "halves": ProbeResult({"halves": [half()]}),
            "linker": ProbeResult({"linker": "/usr/bin/g++"}),
            "alignment": ProbeResult({"aligned": True}),
            "private_names": ProbeResult({"checked": 80, "problems": []}),
            "gpu": ProbeResult({"available": False}),
        } | answers

    def __call__(self, name: str) -> ProbeResult:
        return self.answers[name]


def finding(findings: list[CheckResult], subject: str) -> CheckResult:
    (found,) = [f for f in findings if f.subject.startswith(subject)]
    return found


def test_a_cpu_machine_is_well() -> None:
    findings = doctor.examine(Machine())
    assert doctor.cpu_path_works(findings)
    assert finding(findings, "CPU").detail == "AVX2, 2 threads"
    assert finding(findings, "target llvm").status is Status.OK


@pytest.mark.parametrize(
    ("probe", "result", "subject"),
    [
        ("torch", ProbeResult(error="the process died of SIGILL"), "PyTorch"),
        ("compiler", ProbeResult(error="no answer within 120 s"), "target llvm"),
        ("compiler", ProbeResult({"equal": False}), "target llvm"),
        ("alignment", ProbeResult(error="the process died of SIGSEGV"), "align"),
        ("alignment", ProbeResult({"aligned": False}), "align"),
    ],
)
def test_what_breaks_the_cpu_path(probe: str, result: ProbeResult, subject: str) -> None:
    findings = doctor.examine(Machine(**{probe: result}))
    wrong = finding(findings, subject)
    assert wrong.status is Status.WRONG
    assert wrong.advice
    assert not doctor.cpu_path_works(findings)


GPU = {
    "available": True,
    "name": "H100",
    "count": 1,
    "arch": "sm_90",
    "runtime": "CUDA 13.0",
    "driver": "580.1",
    "needs_nvcc": True,
    "graphs": True,
}


def test_without_a_gpu_there_is_one_line() -> None:
    found = [f for f in doctor.examine(Machine()) if "GPU" in f.subject or "CUDA" in f.subject]
    assert [(f.subject, f.status) for f in found] == [("GPU", Status.NOTE)]


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr("tvmbridge.backends.cuda.source.nvrtc", lambda: None)
    findings = doctor.examine(Machine(gpu=ProbeResult(GPU)))
    assert finding(findings, "GPU").detail == "1 x H100, sm_90, CUDA 13.0, driver 580.1"
    assert finding(findings, "CUDA's compiler").detail == "/bin/nvcc"
    assert finding(findings, "CUDA graphs").status is Status.OK


def test_what_a_gpu_lacks_is_told_and_leaves_the_cpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr("tvmbridge.backends.cuda.source.nvrtc", lambda: None)
    findings = doctor.examine(Machine(gpu=ProbeResult(GPU | {"graphs": False})))
    assert "nvcc" in finding(findings, "CUDA's compiler").advice
    assert finding(findings, "CUDA graphs").status is Status.NOTE
    assert doctor.cpu_path_works(findings)
    found = doctor.verdict(findings)
    assert found == "The CPU path works, but GPUs need nvcc or NVRTC and pictures need dot."


def test_a_missing_half_is_told_and_leaves_the_cpu_path() -> None:
    machine = Machine(halves=ProbeResult({"halves": [half(None)]}))
    findings = doctor.examine(machine)
    assert "there is no compiler" in finding(findings, "compiled halves").detail
    assert "doctor --build" in finding(findings, "compiled halves").advice
    assert doctor.cpu_path_works(findings)
    assert "calls cost more without the compiled halves" in doctor.verdict(findings)


def test_a_machine_without_a_linker_is_told() -> None:
    findings = doctor.examine(Machine(linker=ProbeResult({"linker": None})))
    assert finding(findings, "linker").status is Status.NOTE
    assert doctor.cpu_path_works(findings)


@pytest.mark.parametrize("built", [True, False])
def test_building_says_of_each_half_whether_it_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], built: bool
) -> None:
    found = ProbeResult({"halves": [half(), half("/there" if built else None)]})
    monkeypatch.setattr(doctor, "run_probe", lambda *_: found)
    assert doctor.build() == (0 if built else 1)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_newer_torch_than_was_tested_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = versions.PackageVersion("torch", ">=2.11", True, "9.0.0", None)
    monkeypatch.setattr(versions, "installed_versions", lambda: [newer])
    findings = doctor.examine(Machine())
    assert finding(findings, "torch").status is Status.NOTE
    assert doctor.cpu_path_works(findings)


def test_a_wrong_pin_shows_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = versions.PackageVersion("apache-tvm-ffi", "==0.1.14.post1", True, "0.1.15", None)
    monkeypatch.setattr(versions, "installed_versions", lambda: [wrong])
    findings = doctor.examine(Machine())
    assert finding(findings, "apache-tvm-ffi").advice == versions.fix_command()
    assert not doctor.cpu_path_works(findings)


def test_missing_dot_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(doctor, "_OPTIONAL", {"tune": ("no_such_module",)})
    findings = doctor.examine(Machine())
    assert "graphviz program" in finding(findings, "graphviz").advice
    assert finding(findings, "graphviz").status is Status.NOTE
    assert doctor.verdict(findings) == "The CPU path works, but pictures need dot."
    assert "tvmbridge[tune]" in finding(findings, "packages to tune").advice
    assert doctor.cpu_path_works(findings)


def test_a_private_name_that_pytorch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_has_storage")
    (problem,) = probes.private_names()["problems"]
    assert problem.startswith("torch._C._has_storage, used for refusing tensors")


def test_a_command_to_copy_is_not_broken_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = versions.PackageVersion("apache-tvm", "==0.27.0.post1", True, "0.25.0", None)
    monkeypatch.setattr(versions, "installed_versions", lambda: [wrong])
    monkeypatch.setattr(doctor, "run_probe", Machine())
    assert doctor.main() == 1
    assert versions.fix_command() in capsys.readouterr().out


@pytest.mark.parametrize("works", [True, False])
def test_the_report_and_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], works: bool
) -> None:
    run = ProbeResult({"equal": works})
    monkeypatch.setattr(doctor, "run_probe", Machine(compiler=run))
    assert doctor.main() == (0 if works else 1)
    printed = capsys.readouterr().out
    assert "target llvm" in printed
    assert ("The CPU path works" in printed) is works


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
    assert doctor.run_probe("compiler") == ProbeResult({"equal": True})
    assert doctor.run_probe("alignment") == ProbeResult({"aligned": True})
    unknown = doctor.run_probe("no_such_probe")
    assert unknown.error is not None
    assert "no_such_probe" in unknown.error


@pytest.mark.slow
def test_the_whole_command_on_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tvmbridge", "doctor"]
    assert subprocess.run(command, check=False, timeout=300).returncode == 0
    assert "The CPU path works" in capfd.readouterr().out


def test_the_doctor_itself_imports_neither_torch_nor_tvm() -> None:
    code = "import sys, tvmbridge.doctor.command; print({'torch', 'tvm'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
