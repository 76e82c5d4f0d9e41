"""Keep TorchDynamo out of traces: functions wrapped by torch.compile run as plain Python.

TorchDynamo refuses a frame that it meets under the modes of a trace. PyTorch then never captures
the code of that frame again in this process, for any caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tvmbridge.calls.patches import answers_here, code_of_stubs, patched_here
from tvmbridge.core.torch_private import eval_frame, symbolic_tracing


@contextmanager
def dynamo_left_out() -> Iterator[None]:
    """Keep TorchDynamo from capturing in this thread within the context.

    Other threads run their compiled code as before, and ``is_compiling()`` is False for them.
    """
    frames = eval_frame()
    for code in code_of_stubs():
        frames.skip_code(code)
    # PyTorch 2.11 does not have this function. With a count below 0, ``fullgraph=True`` demands a
    # capture.
    count = getattr(frames, "set_fullgraph_compiled_frame_count", _uncounted)
    with (
        patched_here(frames, "_callback_from_stance", _no_callback),
        answers_here(torch.compiler.is_compiling, torch.compiler.is_exporting, symbolic_tracing),
    ):
        callback, counted = frames.set_eval_frame(None), count(0)
        try:
            yield
        finally:
            count(counted)
            frames.set_eval_frame(callback)


def _no_callback(genuine: Any, callback: Any) -> None:
    return None


def _uncounted(count: int) -> int:
    return count
