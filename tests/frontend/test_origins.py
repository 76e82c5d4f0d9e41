"""The origin of a value (module and line) is kept from the import to the built functions."""

from __future__ import annotations

from pathlib import Path

import torch
import tvm
import tvm_ffi
from torch import nn
from tvm import relax

from tests.models import TransformerLayer
from tvmbridge import capture, to_relax
from tvmbridge.frontend.origins import Origin, origin_of, user_frame
from tvmbridge.passes.base import with_span
from tvmbridge.pipeline import inference_passes, lowering_passes, run_passes


def calls(mod: tvm.IRModule, name: str = "main") -> list[relax.Call]:
    bindings = [b for block in mod[name].body.blocks for b in block.bindings]
    return [b.value for b in bindings if isinstance(b.value, relax.Call)]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()  # the line that is looked for


def test_a_call_says_its_submodules_and_the_line() -> None:
    found = [origin_of(call) for call in calls(to_relax(capture(Pair().eval(), torch.ones(2, 4))))]
    inner = ("inner", "Sequential")
    modules = [(inner, ("inner.0", "Linear"))] * 3 + [(inner, ("inner.1", "LayerNorm")), ()]
    assert [origin.modules for origin in found if origin] == modules
    last = found[-1]
    assert last is not None
    assert (Path(last.file).name, last.function) == ("test_origins.py", "forward")
    code = Path(last.file).read_text(encoding="utf-8").splitlines()[last.line - 1]
    assert "the line that is looked for" in code


def test_passes_hand_it_on_also_to_what_they_spell_out() -> None:
    mod = to_relax(capture(TransformerLayer().train(), torch.ones(2, 5, 8)))
    lowered = calls(run_passes(mod, lowering_passes(), []))
    folded = calls(run_passes(mod, inference_passes(), []))
    assert all(origin_of(call) is not None for call in (*lowered, *folded))
    norms = [o for o in map(origin_of, lowered) if o and o.modules == (("first", "LayerNorm"),)]
    assert len(norms) > 5


def test_it_changes_no_hash() -> None:
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    plain = relax.op.abs(x)
    told = with_span(plain, Origin((("a", "A"),)).span())
    assert origin_of(told) == Origin((("a", "A"),))
    assert tvm_ffi.structural_hash(plain) == tvm_ffi.structural_hash(told)
    tvm.ir.assert_structural_equal(plain, told)


def test_a_span_that_is_there_stays_and_others_are_no_origin() -> None:
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    other = tvm.ir.Span(tvm.ir.SourceName("somebody's file"), 1, 1, 0, 0)
    told = with_span(relax.op.abs(x), other)
    assert origin_of(told) is None
    assert with_span(told, Origin().span()).span.source_name.name == "somebody's file"
    assert origin_of(relax.op.abs(x)) is None


def test_the_innermost_frame_of_the_user_is_taken() -> None:
    trace = (
        '  File "/home/me/model.py", line 3, in outer\n    x\n'
        '  File "/home/torch/tvmbridge/layer.py", line 7, in forward\n    y\n'
        f'  File "{nn.functional.__file__}", line 9, in linear\n    z\n'
    )
    assert user_frame(trace) == ("/home/torch/tvmbridge/layer.py", 7, "forward")
    assert user_frame("nothing") is None
