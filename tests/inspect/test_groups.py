"""Pictures: frames around submodules, folding, the legend, and inputs that nothing reads."""

from __future__ import annotations

import re

import pytest
import torch
import tvm
from torch import nn
from tvm import relax

from tests.models import TransformerLayer
from tvmbridge import capture, to_relax, visualize
from tvmbridge.inspect.picture import Edge, Frame, Node, Picture
from tvmbridge.inspect.visualize import picture_of


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + 1
        return x


@pytest.fixture(scope="module")
def mod() -> tvm.IRModule:
    return to_relax(capture(Stack().eval(), (torch.ones(2, 4), torch.ones(3))))


def frames(source: str) -> list[str]:
    return re.findall(r'label="?((?:layers\.)?\d: \w+)"?', source)


def test_values_stand_in_the_frame_of_their_submodule(mod: tvm.IRModule) -> None:
    drawn = picture_of(mod)
    paths = {n.name: [drawn.groups[g].path for g in n.groups] for n in drawn.nodes}
    found = {(n.facts.get("operator"), *paths[n.name][1:]) for n in drawn.nodes}
    assert {
        ("matmul", "layers.0", "layers.0.0"),
        ("nn.relu", "layers.1", "layers.1.1"),
        ("add",),
    } <= found
    weights = {n.facts["variable"]: paths[n.name][1:] for n in drawn.nodes if n.kind == "weight"}
    assert weights["p_layers_1_0_bias"] == ["layers.1", "layers.1.0"]
    assert [n.facts["variable"] for n in drawn.nodes if n.kind == "input"] == ["x"]
    titles = ["layers.0: Sequential", "0: Linear", "1: ReLU"]
    titles += ["layers.1: Sequential", "0: Linear", "1: ReLU"]
    assert frames(visualize(mod).source) == titles


def test_without_groups_there_are_no_frames(mod: tvm.IRModule) -> None:
    assert frames(visualize(mod, groups=False).source) == []


def test_inputs_that_nothing_reads_are_left_out_and_counted(mod: tvm.IRModule) -> None:
    source = visualize(mod).source
    assert "unused" not in source
    assert "1 input that nothing reads left out" in source
    assert "unused" in visualize(mod, node_attr_dict={"unused": {"color": "red"}}).source


@pytest.mark.parametrize("fold", [1, ["layers.0", "layers.1"]])
def test_folded_submodules_are_one_node_each(mod: tvm.IRModule, fold: int | list[str]) -> None:
    source = visualize(mod, fold=fold).source
    assert "matmul" not in source
    assert len(re.findall(r"shape=box3d", source)) == 2
    assert "layers.0<BR/>Sequential" in source
    assert "p_layers" not in source
    one = visualize(mod, fold=["layers.0"]).source
    assert one.count("<matmul<") == 1


@pytest.mark.parametrize("fold", [7, ["layers.2"], "nothing"])
def test_a_fold_that_is_not_there_is_an_error(mod: tvm.IRModule, fold: object) -> None:
    with pytest.raises(ValueError, match="submodule"):
        visualize(mod, fold=fold)  # type: ignore[arg-type]


def test_the_legend_names_the_colors_that_are_there(mod: tvm.IRModule) -> None:
    legend = dict(picture_of(mod).legend)
    assert {"input", "weight or buffer", "output", "operator, compiled by TVM"} < set(legend)
    assert "ATen call, PyTorch's kernel" not in legend
    assert ">weight or buffer<" in visualize(mod).source
    assert ">weight or buffer<" not in visualize(mod, legend=False).source


def test_facts_of_a_value() -> None:
    mod = to_relax(capture(TransformerLayer().eval(), torch.ones(2, 5, 8)))
    drawn = picture_of(mod)
    (softmax,) = [n for n in drawn.nodes if n.facts.get("operator") == "nn.softmax"]
    facts = dict(softmax.facts)
    assert facts["type"] == "(2, 2, 5, 5) float32"
    assert facts["bytes"] == 2 * 2 * 5 * 5 * 4
    assert facts["source"].startswith("models.py:")
    assert "scaled_dot_product_attention" in facts["code"]


def chain() -> Picture:
    """Return the picture ``a -> b -> c -> d`` and ``a -> c``; ``outer.inner`` has b and c."""
    around = {"a": (), "b": ("outer", "inner"), "c": ("outer", "inner"), "d": ("outer",)}
    nodes = [Node(name, name, name, "op", {}, groups) for name, groups in around.items()]
    edges = [Edge("a", "b"), Edge("b", "c", "0"), Edge("a", "c", "1"), Edge("c", "d")]
    groups = {name: Frame(name, name, {}, name, "Class", depth) for depth, name in DEPTHS.items()}
    return Picture(nodes, edges, groups)


DEPTHS = {1: "outer", 2: "inner"}


def test_edges_of_folded_nodes_are_drawn_once() -> None:
    folded = chain().folded(["inner"])
    assert [n.name for n in folded.nodes] == ["a", "inner", "d"]
    assert folded.nodes[1].groups == ("outer",)
    assert folded.nodes[1].facts["operators"] == 2
    assert [(e.source, e.target, e.head) for e in folded.edges] == [
        ("a", "inner", None),
        ("inner", "d", None),
    ]
    assert [n.name for n in chain().folded(["inner", "outer"]).nodes] == ["a", "outer"]
    assert [n.name for n in chain().nodes] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("most", "expected"), [(4, set()), (3, {"inner"}), (2, {"outer"}), (1, {"outer"})]
)
def test_as_little_is_folded_as_is_enough(most: int, expected: set[str]) -> None:
    assert chain().readable(most) == expected


def test_a_submodule_that_runs_twice_has_a_frame_in_each_place() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    shared = nn.Linear(4, 4)
    module = nn.Sequential(Outer(shared), Outer(shared)).eval()
    drawn = picture_of(to_relax(capture(module, torch.ones(2, 4))))
    around = [n.groups for n in drawn.nodes if n.facts.get("operator") == "matmul"]
    assert len(around) == 2
    for groups in around:
        assert all(g in drawn.groups for g in groups)
    drawn.digraph()


def test_branches_are_not_mixed_with_submodules() -> None:
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    function = relax.Function([x], relax.op.abs(x), x.ty)
    assert picture_of(function).groups == {}
