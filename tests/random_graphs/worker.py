"""The worker process: reads programs as JSON lines, writes outcomes as JSON lines."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from dataclasses import asdict

import torch

from tests.random_graphs.check import check
from tests.random_graphs.program import Program
from tests.random_graphs.reduce import reduced


def main() -> None:
    """Read tasks from stdin and run them, until stdin ends."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # Other output must not mix with the lines of the protocol.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        task = json.loads(line)
        program = Program.from_json(task["program"])
        if task["reduce"]:
            answer = {"reduced": reduced(program, check).to_json()}
        else:
            answer = {"outcome": asdict(check(program))}
        out.write(json.dumps(answer) + "\n" + json.dumps({"done": True}) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
