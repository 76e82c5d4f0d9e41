"""Structure, labels and attributes of the graphs that ``visualize`` draws."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

import html
import re
from dataclasses import dataclass, field

import graphviz
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmbridge.inspect import visualize

_VALUE = r'(?:"(?:[^"\\]|\\.)*"|<(?:[^<>]|<[^<>]*>)*>|[^\s\]]+)'
_STATEMENT = re.compile(rf"^\t+(\w+)(?: -> (\w+))?(?: \[((?:\w+={_VALUE} ?)*)\])?$")


@dataclass
class Parsed:
    """A parsed Digraph: attributes and label lines by node, edges as (from, to, head label)."""

    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    labels: dict[str, list[str]] = field(default_factory=dict)
    edges: list[tuple[str, str, str]] = field(default_factory=list)

    def node(self, title: str) -> str:
        found = [node for node, lines in self.labels.items() if lines[0] == title]
        assert len(found) == 1, f"{len(found)} nodes are titled {title!r}: {self.labels}"
        return found[0]

    def titled(self) -> set[tuple[str, str, str]]:
        return {(self.labels[a][0], self.labels[b][0], place) for a, b, place in self.edges}

    def titles(self) -> list[str]:
        return sorted(lines[0] for lines in self.labels.values())

    def style(self, title: str, name: str) -> str:
        return self.attributes[self.node(title)].get(name, "")


def parse(graph: graphviz.Digraph) -> Parsed:
    parsed = Parsed()
    for line in graph.source.splitlines():
        match = _STATEMENT.match(line)
        others = ("graph", "node", "edge", "legend")
        if match is None or match[1] in others or match[1].startswith("label"):
            continue
        found = re.findall(rf"(\w+)=({_VALUE})", match[3] or "")
        values = {name: value.strip('"') for name, value in found}
        if match[2]:
            parsed.edges.append((match[1], match[2], values.get("headlabel", "")))
            continue
        parsed.attributes[match[1]] = values
        text = re.sub(r"^<|>$", "", values["label"])
        text = html.unescape(re.sub(r"</?FONT[^>]*>", "", text.replace("<BR/>", "\n")))
        parsed.labels[match[1]] = text.split("\n")
    return parsed


@R.function
def small(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32")):
    R.func_attr({"num_input": 1})
    with R.dataflow():
        scaled = R.multiply(x, R.const(0.125, "float32"))
        product = R.matmul(scaled, w)
        total = R.sum(product, axis=[1], keepdims=True)
        parts = R.split(product, 2, axis=1)
        left = parts[0]
        flat = R.reshape(left, (4,))
        R.output(total, flat)
    return (total, flat)


@I.ir_module
class Module:
    @T.prim_func
    def add_one(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (4,))
        B = T.match_buffer(b, (4,))
        for i in T.serial(4):
            B[i] = A[i] + T.float32(1)

    @R.function
    def helper(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        return R.tanh(x)

    @R.function
    def main(x: R.Tensor((4,), "float32")):
        cls = Module
        a = R.call_tir(cls.add_one, (x,), out_ty=R.Tensor((4,), "float32"))
        b = R.call_dps_packed("kernels.linear", (a, x), out_ty=R.Tensor((4,), "float32"))
        c = R.call_pure_packed(
            "tvmbridge.aten",
            R.str('{"op": "aten.mm.default", "args": [0, 1]}'),
            b,
            a,
            ty_args=[R.Tensor((4,), "float32")],
        )
        return cls.helper(c)


@R.function(private=True)
def branching(
    c: R.Tensor((), "bool"),
    x: R.Tensor(("n", 4), "float32"),
    t: R.Tuple(R.Tensor((4,), "float32"), R.Tuple(R.Tensor((1,), "float32"), R.Shape((2,)))),
):
    n = T.int64()
    if c:
        w = R.multiply(x, x)
        r = R.add(w, R.const(2.0))
    else:
        _shape = R.shape_of(x)
        _cast = R.match_cast(x, R.Tensor((n, 4), "float32"))
        r = R.zeros(R.shape([n * 2, 4]), "float32")
    k = t[1][0]
    u = R.add(r, k)
    return (u, (k, R.const(1.0)))


def test_collapsed_nodes_carry_their_small_arguments() -> None:
    drawn = parse(visualize(small))
    assert drawn.titles() == [
        "matmul",
        "multiply(·, 0.125)",
        "output 0",
        "output 1",
        "reshape(·[0], (4,))",
        "split",
        "sum",
        "w: (3, 4) float32",
        "x: (2, 3) float32",
    ]
    assert drawn.titled() == {
        ("x: (2, 3) float32", "multiply(·, 0.125)", ""),
        ("multiply(·, 0.125)", "matmul", "0"),
        ("w: (3, 4) float32", "matmul", "1"),
        ("matmul", "sum", ""),
        ("matmul", "split", ""),
        ("split", "reshape(·[0], (4,))", ""),
        ("sum", "output 0", ""),
        ("reshape(·[0], (4,))", "output 1", ""),
    }


def test_uncollapsed_small_values_are_nodes() -> None:
    drawn = parse(visualize(small, collapse_small=False))
    assert drawn.titled() == {
        ("x: (2, 3) float32", "multiply", "0"),
        ("0.125", "multiply", "1"),
        ("multiply", "matmul", "0"),
        ("w: (3, 4) float32", "matmul", "1"),
        ("matmul", "sum", ""),
        ("matmul", "split", ""),
        ("split", "item 0", ""),
        ("item 0", "reshape", "0"),
        ("(4,)", "reshape", "1"),
        ("sum", "tuple", "0"),
        ("reshape", "tuple", "1"),
        ("tuple", "output", ""),
    }


def test_labels_show_attributes_results_and_kinds() -> None:
    drawn = parse(visualize(small))
    summed = drawn.labels[drawn.node("sum")]
    assert summed == ["sum", "axis=1, keepdims", "total: (2, 1) float32"]
    assert drawn.labels[drawn.node("matmul")] == ["matmul", "product: (2, 4) float32"]
    assert drawn.style("x: (2, 3) float32", "shape") == "ellipse"
    assert drawn.style("output 0", "peripheries") == "2"
    weight = drawn.style("w: (3, 4) float32", "fillcolor")
    assert weight not in ("", drawn.style("x: (2, 3) float32", "fillcolor"))


def test_a_module_has_one_frame_for_each_relax_function() -> None:
    graph = visualize(Module)
    drawn = parse(graph)
    assert re.findall(r"subgraph (\w+)", graph.source) == ["cluster_0", "cluster_1"]
    assert re.findall(r"[ \t]label=(main|helper|add_one)\b", graph.source) == ["main", "helper"]
    assert (drawn.node("add_one")[:3], drawn.node("tanh")[:3]) == ("f0_", "f1_")


def test_calls_are_named_after_their_callee() -> None:
    drawn = parse(visualize(Module["main"]))
    assert drawn.titled() == {
        ("x: (4,) float32", "add_one", ""),
        ("add_one", "kernels.linear", "0"),
        ("x: (4,) float32", "kernels.linear", "1"),
        ("kernels.linear", "aten.mm", "0"),
        ("add_one", "aten.mm", "1"),
        ("aten.mm", "helper", ""),
        ("helper", "output", ""),
    }
    assert len({drawn.style(n, "fillcolor") for n in ("add_one", "kernels.linear", "aten.mm")}) == 3


@pytest.mark.parametrize("text", ['{"op": 3}', "{no json", "[1]", '{"op": "a<b"}'])
def test_a_string_that_describes_no_aten_call_is_an_argument(text: str) -> None:
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    call = relax.call_pure_packed("f", tvm.ir.StringImm(text), x, ty_args=[x.ty])
    title = next(t for t in parse(visualize(relax.Function([x], call, x.ty))).titles() if "f(" in t)
    assert title.endswith(", ·)")


def test_branches_stand_in_frames() -> None:
    graph = visualize(branching)
    drawn = parse(graph)
    assert ("c: () bool", "if", "condition") in drawn.titled()
    assert ("add(·, 2.0)", "if", "then") in drawn.titled()
    assert ("zeros((n * 2, 4))", "if", "else") in drawn.titled()
    assert ("x: (n, 4) float32", "multiply", "0,1") in drawn.titled()
    assert ("x: (n, 4) float32", "match_cast", "") in drawn.titled()
    frames = dict(re.findall(r"subgraph cluster_(then|else)\d+ \{(.*?)\n\t\}", graph.source, re.S))
    assert f"{drawn.node('multiply')} [" in frames["then"]
    assert f"{drawn.node('match_cast')} [" in frames["else"]
    assert "->" not in frames["then"] + frames["else"]


def test_nested_tuples_are_items_and_numbered_outputs() -> None:
    titles = set(parse(visualize(branching)).titles())
    assert {"add(·, ·[1][0])", "output 0", "output 1.0(·[1][0])", "output 1.1(1.0)"} < titles
    apart = parse(visualize(branching, collapse_small=False))
    assert apart.titles().count("tuple") == 2
    assert {("item 1", "item 0", ""), ("item 0", "tuple", "0")} < apart.titled()


def test_attributes_by_variable_expression_and_name() -> None:
    bindings = small.body.blocks[0].bindings
    stranger = relax.Var("stranger", relax.TensorType((1,), "float32"))
    asked = {
        bindings[1].var: {"fillcolor": "lightblue", "penwidth": 2},
        bindings[2].value: {"color": "red"},
        "x": {"label": "the input", "shape": "diamond"},
        "product": {"fillcolor": "green", "style": "dashed"},
        stranger: {"color": "pink"},
    }
    drawn = parse(visualize(small, node_attr_dict=asked))
    product = drawn.attributes[drawn.node("matmul")]
    shown = [product[name] for name in ("fillcolor", "penwidth", "style")]
    assert shown == ["lightblue", "2", "dashed"]
    assert drawn.style("sum", "color") == "red"
    assert drawn.style("the input", "shape") == "diamond"
    assert "pink" not in str(drawn.attributes)


def test_a_name_may_be_of_one_function() -> None:
    source = visualize(Module, node_attr_dict={"helper/x": {"color": "red"}}).source
    assert re.findall(r"(\w+) \[.*color=red", source) == ["f1_n0"]
    assert visualize(Module, node_attr_dict={"x": {"color": "red"}}).source.count("color=red") == 2


def test_a_small_value_with_attributes_of_its_own_is_a_node() -> None:
    blue, red = {"fillcolor": "blue"}, {"fillcolor": "red"}
    drawn = parse(visualize(small, node_attr_dict={"left": red, "parts": blue}))
    assert drawn.style("item 0", "fillcolor") == "red"
    drawn = parse(visualize(small, node_attr_dict={"left": blue, "parts": blue}))
    assert "reshape(·[0], (4,))" in drawn.titles()
    drawn = parse(visualize(small, node_attr_dict={small.body.body: red}))
    assert drawn.style("output 0", "fillcolor") == drawn.style("output 1", "fillcolor") == "red"
    constant = small.body.blocks[0].bindings[0].value.args[1]
    drawn = parse(visualize(small, node_attr_dict={constant: red}))
    assert drawn.style("0.125", "fillcolor") == "red"


def test_unknown_names_are_an_error_that_suggests() -> None:
    with pytest.raises(ValueError, match=r"'nothing', 'prodct'.*did you mean 'product'"):
        visualize(small, node_attr_dict={"prodct": {}, "nothing": {}, "x": {}})
    with pytest.raises(ValueError, match="'main/y'"):
        visualize(Module, node_attr_dict={"main/y": {}})


def test_odd_functions_are_drawn() -> None:
    x = relax.Var("x", relax.TensorType(ndim=2, dtype="float32"))
    free = relax.Var("free", relax.TensorType())
    inner = relax.Function([free], free, free.ty)
    local, unused = relax.Var("local"), relax.Var("unused")
    bindings = [
        relax.VarBinding(local, inner),
        relax.VarBinding(relax.Var("called"), relax.Call(local, [x])),
        relax.VarBinding(relax.Var("alias"), x),
        relax.VarBinding(unused, relax.Tuple([x, relax.Tuple([])])),
        relax.VarBinding(relax.Var("around"), relax.Tuple([unused])),
        relax.VarBinding(relax.Var("loose"), relax.op.concat([x, x, x, x, free])),
        relax.VarBinding(relax.Var("half"), relax.const(1.0, "bfloat16")),
    ]
    body = relax.SeqExpr([relax.BindingBlock(bindings)], relax.const([1.0] * 9))
    function = relax.Function([x], body, relax.AnyType(), is_pure=False)
    drawn = parse(visualize(function))
    assert ("local function", "call", "0") in drawn.titled()
    assert {("x: (?, ?) float32", "tuple", "0"), ("tuple", "tuple", "1")} < drawn.titled()
    assert drawn.titles().count("tuple") == 3
    assert ("free: (…) float32", "concat", "4") in drawn.titled()
    assert ("constant", "output", "") in drawn.titled()
    assert "alias" in parse(visualize(function, collapse_small=False)).titles()
