"""The passes that lower layer, RMS, group, instance and batch norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import tvm
from tvm import relax

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    build_main,
    compile_and_run,
    operators,
)
from tests.thinned import covering
from tvmbridge.passes.base import RelaxPass
from tvmbridge.passes.relax.lower_batch_norm import LowerBatchNorm
from tvmbridge.passes.relax.lower_group_norm import LowerGroupNorm
from tvmbridge.passes.relax.lower_instance_norm import LowerInstanceNorm
from tvmbridge.passes.relax.lower_layer_norm import LowerLayerNorm
from tvmbridge.passes.relax.lower_rms_norm import LowerRMSNorm

op = relax.op
nn = relax.op.nn
Tensors = tuple[torch.Tensor, ...]


def const(value: float) -> relax.Expr:
    return relax.const(value, "float64")


@dataclass(frozen=True)
class Lowering:
    """A pass that lowers a normalization, with its test data.

    - ``call``: builds the call to lower from Relax variables.
    - ``definition``: builds the expected result from a builder's ``emit`` and the variables.
    - ``expected``: computes PyTorch's result from tensors.
    - ``declined``: a call that is not lowered, and the reason.
    """

    pass_: RelaxPass
    inputs: Tensors
    call: Callable[..., relax.Expr]
    definition: Callable[..., relax.Expr]
    expected: Callable[..., torch.Tensor]
    declined: Callable[..., relax.Expr] | None = None
    reason: str = ""


def numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * 5 + 100


X, GAMMA, BETA = numbers(2, 4, 3, 3), numbers(4), numbers(4) / 7
MEAN, VARIANCE = numbers(4) / 3, numbers(4).abs()


def standardized(emit: Callable[..., relax.Var], x: relax.Expr, axes: list[int]) -> relax.Var:
    mean = emit(op.mean(x, axes, keepdims=True))
    centered = emit(op.subtract(x, mean))
    variance = emit(op.mean(emit(op.multiply(centered, centered)), axes, keepdims=True))
    scale = emit(op.rsqrt(emit(op.add(variance, const(1e-3)))))
    return emit(op.multiply(centered, scale))


def affine(emit: Callable[..., relax.Var], x: relax.Expr, *rows: relax.Expr) -> relax.Var:
    gamma, beta = rows
    return emit(op.add(emit(op.multiply(x, gamma)), beta))


def by_channel(emit: Callable[..., relax.Var], x: relax.Expr, *rows: relax.Expr) -> relax.Var:
    gamma, beta = rows
    scaled = emit(op.multiply(x, emit(op.reshape(gamma, [4, 1, 1]))))
    return emit(op.add(scaled, emit(op.reshape(beta, [4, 1, 1]))))


def rms_definition(emit: Callable[..., relax.Var], x: relax.Expr, w: relax.Expr) -> relax.Var:
    square = emit(op.mean(emit(op.multiply(x, x)), [2], keepdims=True))
    scale = emit(op.rsqrt(emit(op.add(square, const(1e-3)))))
    return emit(op.multiply(emit(op.multiply(x, scale)), w))


def group_definition(emit: Callable[..., relax.Var], x: relax.Expr, *rows: relax.Expr) -> relax.Var:
    groups = emit(op.reshape(x, [4, 18]))
    normed = standardized(emit, groups, [1])
    return by_channel(emit, emit(op.reshape(normed, [2, 4, 3, 3])), *rows)


def batch_definition(emit: Callable[..., relax.Var], x: relax.Expr, *rows: relax.Expr) -> relax.Var:
    gamma, beta, *_ = rows
    mean = emit(op.mean(x, [0, 2, 3], keepdims=True))
    still = emit(op.grad.no_grad(mean))
    centered = emit(op.subtract(x, still))
    variance = emit(op.mean(emit(op.multiply(centered, centered)), [0, 2, 3], keepdims=True))
    scale = emit(op.rsqrt(emit(op.add(variance, const(1e-3)))))
    scale = emit(op.multiply(scale, emit(op.reshape(gamma, [1, 4, 1, 1]))))
    zero = emit(op.subtract(mean, still))
    moved = emit(op.negative(emit(op.multiply(zero, emit(op.grad.no_grad(scale))))))
    summand = emit(op.add(moved, emit(op.reshape(beta, [1, 4, 1, 1]))))
    return emit(op.add(emit(op.multiply(centered, scale)), summand))


def eval_definition(emit: Callable[..., relax.Var], x: relax.Expr, *rows: relax.Expr) -> relax.Var:
    gamma, beta, mean, variance = rows
    scale = emit(op.rsqrt(emit(op.add(variance, const(1e-3)))))
    centered = emit(op.subtract(x, emit(op.reshape(mean, [4, 1, 1]))))
    scaled = emit(op.multiply(centered, emit(op.reshape(scale, [4, 1, 1]))))
    return by_channel(emit, scaled, gamma, beta)


def folded_definition(
    emit: Callable[..., relax.Var], x: relax.Expr, *rows: relax.Expr
) -> relax.Var:
    gamma, beta, mean, variance = rows
    scale = emit(op.rsqrt(emit(op.add(variance, const(1e-3)))))
    factor = emit(op.multiply(scale, gamma))
    summand = emit(op.subtract(beta, emit(op.multiply(mean, factor))))
    return by_channel(emit, x, factor, summand)


def batch_norm(training: bool, momentum: float = 1.0) -> Callable[..., relax.Expr]:
    return lambda *a: relax.TupleGetItem(
        nn.batch_norm(*a, axis=1, epsilon=1e-3, momentum=momentum, training=training), 0
    )


def eager_eval(
    x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, *moving: torch.Tensor
) -> torch.Tensor:
    return F.batch_norm(x, moving[0], moving[1], g, b, False, 0.0, 1e-3)


ROWS = (numbers(2, 3, 4), numbers(4), numbers(4) / 7)
LOWERINGS = {
    "layer": Lowering(
        LowerLayerNorm(),
        ROWS,
        lambda x, g, b: nn.layer_norm(x, g, b, [-1], 1e-3),
        lambda emit, x, g, b: affine(emit, standardized(emit, x, [2]), g, b),
        lambda x, g, b: F.layer_norm(x, (4,), g, b, 1e-3),
        lambda x, g, b: nn.layer_norm(op.permute_dims(x), g, b, [0], 1e-3),
        "relax.nn.layer_norm: the axes are not the last ones, in order",
    ),
    "rms": Lowering(
        LowerRMSNorm(),
        ROWS[:2],
        lambda x, w: nn.rms_norm(x, w, [-1], 1e-3),
        rms_definition,
        lambda x, w: F.rms_norm(x, (4,), w, 1e-3),
        lambda x, w: nn.rms_norm(op.permute_dims(x), w, [0], 1e-3),
        "relax.nn.rms_norm: the axes are not the last ones, in order",
    ),
    "group": Lowering(
        LowerGroupNorm(),
        (X, GAMMA, BETA),
        lambda x, g, b: nn.group_norm(x, g, b, 2, 1, [2, 3], 1e-3),
        group_definition,
        lambda x, g, b: F.group_norm(x, 2, g, b, 1e-3),
        lambda x, g, b: nn.group_norm(op.permute_dims(x, [0, 2, 3, 1]), g, b, 2, 3, [1, 2], 1e-3),
        "relax.nn.group_norm: the channels are not in dimension 1",
    ),
    "instance": Lowering(
        LowerInstanceNorm(),
        (X, GAMMA, BETA),
        lambda x, g, b: nn.instance_norm(x, g, b, 1, [2, 3], 1e-3),
        lambda emit, x, g, b: by_channel(emit, standardized(emit, x, [2, 3]), g, b),
        lambda x, g, b: F.instance_norm(x, None, None, g, b, True, 0.0, 1e-3),
    ),
    "batch": Lowering(
        LowerBatchNorm(),
        (X, GAMMA, BETA, MEAN, VARIANCE),
        batch_norm(True),
        batch_definition,
        lambda x, g, b, m, v: F.batch_norm(x, None, None, g, b, True, 0.0, 1e-3),
    ),
    "batch, moving statistics": Lowering(
        LowerBatchNorm(),
        (X, GAMMA, BETA, MEAN, VARIANCE),
        batch_norm(False),
        eval_definition,
        eager_eval,
    ),
    "batch, folded": Lowering(
        LowerBatchNorm(fold=True),
        (X, GAMMA, BETA, MEAN, VARIANCE),
        batch_norm(False),
        folded_definition,
        eager_eval,
    ),
}


@pytest.fixture(params=LOWERINGS)
def lowering(request: pytest.FixtureRequest) -> Lowering:
    return LOWERINGS[request.param]


def canonical(mod: tvm.IRModule) -> tvm.IRModule:
    for pass_ in (relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()):
        mod = pass_(mod)
    return mod


def by_hand(lowering: Lowering) -> tvm.IRModule:
    parameters = [
        relax.Var(f"x{i}", relax.TensorType(tuple(t.shape), "float64"))
        for i, t in enumerate(lowering.inputs)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", parameters):
        with builder.dataflow():
            result = lowering.definition(builder.emit, *parameters)
            output = builder.emit_output(relax.Tuple([result]))
        builder.emit_func_output(output)
    return builder.get()


def test_is_spelled_out(lowering: Lowering) -> None:
    before = build_main(lowering.inputs, lowering.call)
    after, report = apply_pass(lowering.pass_, before)
    tvm.ir.assert_structural_equal(canonical(after), canonical(by_hand(lowering)))
    assert (report.rewrites, report.declined) == (1, [])


@pytest.mark.parametrize("name", [n for n, low in LOWERINGS.items() if low.declined])
def test_declines_with_the_reason(name: str) -> None:
    lowering = LOWERINGS[name]
    assert lowering.declined is not None
    before = build_main(lowering.inputs, lowering.declined)
    assert assert_changes_nothing(lowering.pass_, before).declined == [lowering.reason]


def test_agrees_with_pytorch_in_float64(lowering: Lowering) -> None:
    mod = lowering.pass_(build_main(lowering.inputs, lowering.call))
    (result,) = compile_and_run(mod, *lowering.inputs)
    expected = lowering.expected(*lowering.inputs)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-11)


def test_applied_twice_changes_nothing(lowering: Lowering) -> None:
    once = lowering.pass_(build_main(lowering.inputs, lowering.call))
    assert_changes_nothing(lowering.pass_, once)


@pytest.mark.parametrize(
    ("name", "center"), covering([n for n in LOWERINGS if n != "rms"], [False, True])
)
def test_what_is_switched_off_is_not_computed(name: str, center: bool) -> None:
    scale = not center
    lowering = LOWERINGS[name]
    attrs = {"center": center, "scale": scale}
    calls: dict[str, Callable[..., relax.Expr]] = {
        "layer": lambda *a: nn.layer_norm(*a, [-1], 1e-3, **attrs),
        "group": lambda *a: nn.group_norm(*a, 2, 1, [2, 3], 1e-3, **attrs),
        "instance": lambda *a: nn.instance_norm(*a, 1, [2, 3], 1e-3, **attrs),
    }
    training = name == "batch"
    default = lambda *a: relax.TupleGetItem(  # noqa: E731
        nn.batch_norm(*a, axis=1, epsilon=1e-3, momentum=1.0, training=training, **attrs), 0
    )
    mod = canonical(lowering.pass_(build_main(lowering.inputs, calls.get(name, default))))
    unit, none = torch.ones(4).double(), torch.zeros(4).double()
    x, gamma, beta, *rest = lowering.inputs
    expected = lowering.expected(x, gamma if scale else unit, beta if center else none, *rest)
    (result,) = compile_and_run(mod, *lowering.inputs)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-11)


def test_moving_statistics_move_by_the_momentum() -> None:
    def call(*a: relax.Expr) -> list[relax.Expr]:
        results = nn.batch_norm(*a, axis=1, epsilon=1e-3, momentum=0.3, training=True)
        return [relax.TupleGetItem(results, i) for i in (1, 2)]

    inputs = (X, GAMMA, BETA, MEAN, VARIANCE)
    mean, variance = compile_and_run(LowerBatchNorm()(build_main(inputs, call)), *inputs)
    batch = X.transpose(0, 1).reshape(4, -1)
    torch.testing.assert_close(mean, 0.7 * MEAN + 0.3 * batch.mean(1), rtol=1e-12, atol=0)
    biased = batch.var(1, correction=0)
    torch.testing.assert_close(variance, 0.7 * VARIANCE + 0.3 * biased, rtol=1e-12, atol=0)


def test_half_precision_is_computed_in_float32() -> None:
    x, w = numbers(2, 3, 4).half(), numbers(4).half()
    after = LowerRMSNorm()(build_main((x, w), lambda x, w: nn.rms_norm(x, w, [-1], 1e-3)))
    assert operators(after)[0] == operators(after)[-1] == "relax.astype"
    (result,) = compile_and_run(after, x, w)
    expected = F.rms_norm(x.double(), (4,), w.double(), 1e-3)
    torch.testing.assert_close(result.double(), expected, rtol=2**-11, atol=0)
