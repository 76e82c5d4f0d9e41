"""Random graphs of element-wise, reduction and layout operators, in Relax and float64 PyTorch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tvm
from tvm import relax
from tvm.relax import op

EXTENTS = [1, 2, 3, 5, 7, 12, 13, 16, 17, 32, 33, 64, 77]
Value = tuple[relax.Expr, torch.Tensor]
Step = Callable[[random.Random, Value, list[Value]], Value | None]


@dataclass
class Graph:
    """A Relax module, its float32 inputs, and its expected outputs in float64."""

    mod: tvm.IRModule
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    steps: list[str]


def _binary(rng: random.Random, value: Value, pool: list[Value]) -> Value | None:
    (v, t), (w, u) = value, rng.choice(pool)
    try:
        size = math.prod(torch.broadcast_shapes(t.shape, u.shape))
    except RuntimeError:
        return None
    if size > 100_000:
        return None
    kind = rng.randrange(4)
    if kind == 0:
        return op.add(v, w), t + u
    if kind == 1:
        return op.subtract(v, w), t - u
    return (op.multiply(v, w), t * u) if kind == 2 else (op.maximum(v, w), torch.maximum(t, u))


def _unary(rng: random.Random, value: Value, _: list[Value]) -> Value:
    v, t = value
    kind = rng.randrange(4)
    if kind == 0:
        return op.tanh(v), t.tanh()
    if kind == 1:
        return op.nn.gelu(v), torch.nn.functional.gelu(t)
    if kind == 2:
        return op.exp(op.tanh(v)), t.tanh().exp()
    tenth = relax.const(0.1, "float32")
    return op.where(op.greater(v, tenth), v, op.multiply(v, tenth)), torch.where(
        t > 0.1, t, t * 0.1
    )


def _reduce(rng: random.Random, value: Value, _: list[Value]) -> Value | None:
    v, t = value
    if t.ndim == 0:
        return None
    axes = sorted(rng.sample(range(t.ndim), rng.randint(1, t.ndim)))
    keep = rng.random() < 0.6
    kind = rng.randrange(4)
    if kind == 0:
        return op.sum(v, axes, keepdims=keep), t.sum(axes, keep)
    if kind == 1:
        return op.mean(v, axes, keepdims=keep), t.mean(axes, keep)
    if kind == 2:
        return op.max(v, axes, keepdims=keep), t.amax(axes, keep)
    return op.variance(v, axes, keepdims=keep), t.var(axes, correction=0, keepdim=keep)


def _normalize(rng: random.Random, value: Value, _: list[Value]) -> Value | None:
    v, t = value
    if t.ndim == 0:
        return None
    if rng.random() < 0.5:
        axis = rng.randrange(t.ndim)
        return op.nn.softmax(v, axis), t.softmax(axis)
    width = t.shape[-1:]
    w = torch.full(width, 1.5)
    weight = relax.const(w.numpy())
    exact = torch.nn.functional.layer_norm(t, width, w.double(), w.double(), 1e-3)
    return op.nn.layer_norm(v, weight, weight, -1, 1e-3), exact


def _move(rng: random.Random, value: Value, _: list[Value]) -> Value | None:
    v, t = value
    if t.ndim == 0:
        return None
    kind, last = rng.randrange(6), t.ndim - 1
    if kind == 0:
        order = rng.sample(range(t.ndim), t.ndim)
        return op.permute_dims(v, order), t.permute(order)
    if kind == 1:
        divisors = [d for d in range(1, min(t.numel(), 500) + 1) if t.numel() % d == 0]
        rows = rng.choice(divisors)
        return op.reshape(v, (rows, t.numel() // rows)), t.reshape(rows, -1)
    if kind == 2 and t.shape[-1] > 2:
        return op.strided_slice(v, [last], [1], [t.shape[-1]]), t[..., 1:]
    if kind == 3 and t.numel() < 20_000:
        axis = rng.randrange(t.ndim)
        return op.concat([v, v], axis), torch.cat([t, t], axis)
    if kind == 4:
        return op.flip(v, last), t.flip(last)
    at = torch.randint(0, t.shape[0], (5,))
    return op.take(v, relax.const(at.numpy(), "int64"), 0), t[at]


STEPS: list[Step] = [_binary, _binary, _unary, _reduce, _reduce, _normalize, _move]


def random_graph(seed: int) -> Graph:
    """Return the random graph of a seed: up to nine steps, and one or two results."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shape = tuple(rng.choice(EXTENTS) for _ in range(rng.randint(0, 4)))
    while math.prod(shape) > 60_000:
        shape = shape[1:]
    shapes = [shape, shape]
    if shape:
        shapes += [shape[-1:], tuple(1 if rng.random() < 0.5 else n for n in shape)]
    inputs = [torch.randn(s) for s in shapes]
    params = [relax.Var(f"x{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    builder, names = relax.BlockBuilder(), []
    with builder.function("main", params):
        with builder.dataflow():
            pool = [(v, t.double()) for v, t in zip(params, inputs, strict=True)]
            pool.append((builder.emit(op.negative(params[0])), -inputs[0].double()))
            for _ in range(rng.randint(1, 9)):
                start = rng.choice(pool[-3:]) if rng.random() < 0.7 else rng.choice(pool)
                step = rng.choice(STEPS)
                made = step(rng, start, pool)
                if made is not None:
                    names.append(f"{step.__name__}{tuple(start[1].shape)}")
                    pool.append((builder.emit(builder.normalize(made[0])), made[1]))
            results = [pool[-1], *([rng.choice(pool[len(params) :])] if rng.random() < 0.4 else [])]
            out = builder.emit_output(relax.Tuple([v for v, _ in results]))
        builder.emit_func_output(out)
    mod = relax.transform.DeadCodeElimination()(builder.get())
    return Graph(mod, inputs, [t for _, t in results], names)
