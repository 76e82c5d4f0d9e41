"""Run the machine-dependent part of the suite as on machines of several kinds:

    python -m tests.machines [--only NAME]... [FOLDER ...]

A machine is an LLVM processor name, a number of cores, and whether the compiled C++ halves are
available. A processor whose instructions this machine lacks is skipped. The exit status is 1 if a
test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from tvm.target import Target, codegen

FOLDERS = tuple(
    f"tests/{name}"
    for name in (
        "records",
        "tuning",
        "kernels",
        "cache",
        "doctor",
        "backends",
        "compiler",
        "schedules",
        "runtime/guards",
    )
)


@dataclass(frozen=True)
class Machine:
    """The machine that a run simulates.

    - ``processor``: LLVM's name of the processor; empty for the real one.
    - ``cores``: the number of cores.
    - ``halves``: whether the compiled C++ halves are used.
    """

    processor: str
    cores: int
    halves: bool

    @property
    def name(self) -> str:
        """The name that is printed, and that ``--only`` takes."""
        return f"{self.processor or 'own'}:{self.cores}{'' if self.halves else ':no-halves'}"

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a run."""
        found = {**os.environ, "OMP_NUM_THREADS": str(self.cores), "OMP_WAIT_POLICY": "passive"}
        processor = self.processor or str(codegen.llvm_get_system_cpu())
        found["TVMBRIDGE_TESTED_MACHINE"] = f"{processor}:{self.cores}"
        if not self.halves:
            found["TVMBRIDGE_HALVES"] = "off"
        return found

    def lacks(self) -> list[str]:
        """Return the instruction sets of the processor that this machine lacks."""
        return sorted(_features(self.processor) - _features("")) if self.processor else []


MACHINES = (
    Machine("", 2, False),
    Machine("", 16, True),
    Machine("skylake-avx512", 1, True),
    Machine("icelake-server", 16, False),
    Machine("sapphirerapids", 2, True),
    Machine("znver3", 2, False),
    Machine("znver5", 16, True),
    Machine("haswell", 1, True),
    Machine("x86-64-v3", 2, True),
)


# The other features are tuning hints, and instructions that LLVM never selects by itself.
_SETS = ("amx", "avx", "bmi", "f16c", "fma", "gfni", "lzcnt", "movbe", "sse", "vaes", "vpclmul")


def _features(processor: str) -> set[str]:
    named = processor or codegen.llvm_get_system_cpu()
    target = Target({"kind": "llvm", "mcpu": named})
    return {f for f in map(str, codegen.llvm_get_cpu_features(target)) if f.startswith(_SETS)}


def run(machine: Machine, folders: list[str]) -> bool:
    """Run the tests of the folders as on ``machine``; return whether all passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not bench", *folders]
    start = time.monotonic()
    done = subprocess.run(
        command, env=machine.environment(), capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    for line in (line for line in lines if line.startswith(("FAILED", "ERROR"))):
        print(f"  {line}", flush=True)
    last = lines[-1] if lines else done.stderr.strip()[-200:]
    print(f"{machine.name}: {last} ({time.monotonic() - start:.0f} s)", flush=True)
    return done.returncode == 0


def main() -> int:
    """Run all machines one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.machines")
    parser.add_argument("folders", nargs="*", default=list(FOLDERS), metavar="FOLDER")
    parser.add_argument(
        "--only", action="append", choices=[m.name for m in MACHINES], metavar="NAME"
    )
    known = parser.parse_args()
    passed = True
    for machine in MACHINES:
        if known.only and machine.name not in known.only:
            continue
        lacking = machine.lacks()
        if lacking:
            print(f"{machine.name}: left out, this machine lacks {', '.join(lacking[:6])}")
            continue
        passed = run(machine, known.folders) and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
