"""On random joint functions the min cut keeps the least bytes of all allowed choices."""

from __future__ import annotations

import itertools

import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from tvmbridge.coloring import POLICIES, JointGraph
from tvmbridge.differentiation.differentiate import JointModule

SHAPE = (3, 4)
DTYPES = ("float16", "float32", "float64")
Steps = list[tuple[str, int, int]]

steps = st.lists(
    st.tuples(
        st.sampled_from(["tanh", "add", "multiply", "cumsum", "halve", "wide", "narrow", "top"]),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    min_size=1,
    max_size=8,
)
picks = st.lists(st.integers(0, 99), min_size=1, max_size=4)


def cast(value: relax.Expr, dtype: str) -> relax.Expr:
    return relax.op.astype(value, dtype)


def next_value(operator: str, a: relax.Var, b: relax.Var) -> relax.Expr:
    """Return the result of ``operator`` on the operands, which have the same shape."""
    dtype = str(a.ty.dtype)
    if operator in ("add", "multiply"):
        other = b if str(b.ty.dtype) == dtype else cast(b, dtype)
        return getattr(relax.op, operator)(a, other)
    if operator == "halve":
        return relax.op.where(relax.op.greater(a, relax.const(0, dtype)), a, a)
    if operator == "wide":
        return cast(a, "float64")
    if operator == "narrow":
        return cast(a, "float16")
    if operator == "top":
        return relax.op.maximum(a, a)
    if operator == "cumsum":
        return relax.op.cumsum(a, axis=1)
    return relax.op.tanh(a)


def joint_function(forward: Steps, read: list[int], compared: bool) -> JointModule:
    """Build a joint function from the steps ``forward``.

    Backward multiplies the cotangent by the values ``read``, or by comparisons of them.
    """
    parameters = [
        relax.Var("x", relax.TensorType(SHAPE, "float32")),
        relax.Var("noise", relax.TensorType(SHAPE, "float32")),
        relax.Var("ct_0", relax.TensorType(SHAPE, "float32")),
    ]
    builder = relax.BlockBuilder()
    emit = builder.emit
    with builder.function("joint", parameters):
        with builder.dataflow():
            values: list[relax.Var] = list(parameters[:2])
            for operator, a, b in forward:
                chosen = values[a % len(values)], values[b % len(values)]
                values.append(emit(builder.normalize(next_value(operator, *chosen))))
            grad = parameters[2]
            for number in read:
                value = values[number % len(values)]
                if compared:
                    value = emit(relax.op.greater(value, relax.const(0.5, str(value.ty.dtype))))
                grad = emit(relax.op.multiply(grad, emit(cast(value, "float32"))))
            output = builder.emit_output(relax.Tuple([values[-1], grad]))
        builder.emit_func_output(output)
    mod: tvm.IRModule = builder.get()
    names = ("x", "noise")
    return JointModule(mod, names, ("ct_0",), (0,), 1, names, drawn=("noise",))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(forward=steps, read=picks, compared=st.booleans())
def test_min_cut_keeps_the_fewest_bytes(forward: Steps, read: list[int], compared: bool) -> None:
    graph = JointGraph(joint_function(forward, read, compared))
    allowed = [v for v in graph.bound if v in graph.movable and graph.may_repeat(v)]
    own = graph.early - graph.movable
    choices = itertools.chain.from_iterable(
        itertools.combinations(allowed, n) for n in range(len(allowed) + 1)
    )
    least = min(graph.bytes_kept(own.union(choice)) for choice in choices)
    found = {name: graph.bytes_kept(policy(graph)) for name, policy in POLICIES.items()}
    assert found["min_cut"] == least
    assert found["min_cut"] <= found["recompute_cheap"] <= found["save_all"]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(forward=steps, read=picks)
def test_what_a_comparison_reads_is_never_rounded_again(forward: Steps, read: list[int]) -> None:
    graph = JointGraph(joint_function(forward, read, True))
    rounding = {"relax.add", "relax.multiply", "relax.tanh"}
    for policy in POLICIES.values():
        repeated = policy(graph)
        pending = [v for v in graph.needed if v in repeated]
        while pending:
            var = pending.pop()
            assert var in graph.early or graph.bound[var].op.name not in rounding
            pending.extend(v for v in graph.operands[var] if v in repeated)
