"""CPU time of importing PyTorch, TVM and tvmbridge, over the time of importing the first two.

Each measurement is a new interpreter, in turns. The figure is the least of them, because other
work on the machine only adds time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.common import Row, parser, report

BOUND = 1.15
PROGRAMS = {
    "import torch, tvm": "import torch, tvm",
    "import torch, tvm, tvmbridge": "import torch, tvm, tvmbridge",
    "from tvmbridge import add_tvm_dispatch": "from tvmbridge import add_tvm_dispatch",
}


def cpu_seconds(program: str) -> float:
    """Return the user and system seconds of an interpreter that runs ``program``."""
    before = os.times()
    subprocess.run([sys.executable, "-c", program], check=True)
    after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system


def main(argv: Sequence[str] = ()) -> int:
    """Run the programs in turns, and print the figures."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args(list(argv))
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(1 + chosen.rounds):
        for name, program in PROGRAMS.items():
            taken = cpu_seconds(program)
            if number:  # the first run reads files from disk and writes bytecode
                seconds[name].append(taken)
    least = {name: min(taken) for name, taken in seconds.items()}
    rows = [Row(name, taken, "s") for name, taken in least.items()]
    bare, imported, used = least.values()
    rows.append(Row("import tvmbridge, times as long", imported / bare, "", BOUND))
    rows.append(Row("add_tvm_dispatch, times as long", used / bare))
    return report("CPU time of imports", rows, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
