"""Graphs of ``visualize`` rendered by graphviz, and the refusals of ``visualize``."""

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

from tvmbridge.inspect import visualize

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz' dot is not installed")
_X = relax.Var("x", relax.TensorType((2,), "float32"))
FUNCTION = relax.Function([_X], relax.op.abs(_X), _X.ty)
PRIMITIVE = tvm.te.create_prim_func([tvm.te.placeholder((2,), name="a")])


@needs_dot
def test_labels_are_escaped() -> None:
    name = '<x>&"\\N\x01{|}'
    x = relax.Var(name, relax.TensorType((2,), "float32"))
    function = relax.Function([x], relax.op.abs(x), x.ty).with_attr("global_symbol", "<f\\N>")
    svg = ElementTree.fromstring(visualize(function).pipe("svg"))
    texts = {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert '<x>&"\\N�{|}: (2,) float32' in texts
    assert "<f\\N>" in texts


@pytest.mark.parametrize(
    ("target", "options", "error", "says"),
    [
        (3, {}, TypeError, "IRModule"),
        (PRIMITIVE, {}, TypeError, "PrimFunc"),
        (tvm.IRModule({"f": PRIMITIVE}), {}, ValueError, "no Relax function"),
        (FUNCTION, {"collapse_small": "yes"}, TypeError, "True or False"),
        (FUNCTION, {"node_attr_dict": ["x"]}, TypeError, "pass a dict"),
        (FUNCTION, {"node_attr_dict": {1: {}}}, TypeError, "key 1 of type int"),
        (FUNCTION, {"node_attr_dict": {"x": "red"}}, TypeError, "'x'.*dict of graphviz"),
        (FUNCTION, {"node_attr_dict": {"x": {1: "red"}}}, TypeError, "'x'.*dict of graphviz"),
    ],
)
def test_bad_arguments(
    target: object, options: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        visualize(target, **options)


class Attention(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            torch.nn.Linear(width, width) for _ in range(4)
        )
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape

        def heads(linear: torch.nn.Module) -> torch.Tensor:
            return linear(x).view(batch, length, self.heads, -1).transpose(1, 2)

        scores = heads(self.query) @ heads(self.key).transpose(-1, -2) / width**0.5
        mixed = scores.softmax(-1) @ heads(self.value)
        return self.norm(x + self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


@needs_dot
@pytest.mark.parametrize("collapse_small", [True, False])
def test_a_transformer_of_500_bindings_renders(collapse_small: bool) -> None:
    module = torch.nn.Sequential(*[Attention(16, 2) for _ in range(12)]).eval()
    exported = torch.export.export(module, (torch.randn(2, 4, 16),))
    imported = from_exported_program(exported, keep_params_as_input=True)
    bindings = imported["main"].body.blocks[0].bindings
    assert len(bindings) > 500
    colored = {binding.var: {"fillcolor": "lightblue"} for binding in bindings[::2]}
    graph = visualize(imported, collapse_small=collapse_small, node_attr_dict=colored, legend=False)
    rendered = subprocess.run(
        ["dot", "-Tsvg"], input=graph.source.encode(), capture_output=True, timeout=15, check=True
    )
    assert rendered.stderr == b""
    svg = ElementTree.fromstring(rendered.stdout)
    nodes = svg.findall(".//*[@class='node']")
    assert len(nodes) == len(re.findall(r"^\t+f0_n\d+ \[", graph.source, re.MULTILINE)) > 500
    assert graph.source.count("lightblue") == len(colored)
    lines = [text.text or "" for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert max(map(len, lines)) <= 84
