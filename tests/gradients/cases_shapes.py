"""Cases of the rules of operators that move elements, such as reshapes and permutations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tvm import relax

from tests.gradients.cases import Case, normal

op = relax.op


def permute_cases() -> Iterator[Case]:
    for name, axes in (("swap", [0, 2, 1]), ("cycle", [2, 0, 1]), ("negative", [-1, 0, -2])):
        yield Case(
            "relax.permute_dims",
            name,
            lambda x, a=axes: op.permute_dims(x, a),
            lambda x, a=axes: x.permute(a),
            (normal(2, 3, 4),),
        )
    yield Case("relax.permute_dims", "reversed", op.permute_dims, lambda x: x.t(), (normal(3, 4),))


def reshape_cases() -> Iterator[Case]:
    forms = {
        "flat": ((3, 4), (12,)),
        "guessed": ((3, 4), (2, -1)),
        "to-0-d": ((1, 1), ()),
        "from-0-d": ((), (1, 1)),
        "same": ((3, 4), (3, 4)),
    }
    for name, (source, target) in forms.items():
        yield Case(
            "relax.reshape",
            name,
            lambda x, t=target: op.reshape(x, t),
            lambda x, t=target: x.reshape(t),
            (normal(*source),),
        )


def expand_cases() -> Iterator[Case]:
    for name, shape, axis, want in (
        ("front", (3, 4), 0, (1, 3, 4)),
        ("back", (3, 4), -1, (3, 4, 1)),
        ("several", (3, 4), [0, 2], (1, 3, 1, 4)),
        ("0-d", (), 0, (1,)),
        ("beside-ones", (1, 4), 1, (1, 1, 4)),
    ):
        yield Case(
            "relax.expand_dims",
            name,
            lambda x, a=axis: op.expand_dims(x, a),
            lambda x, w=want: x.reshape(w),
            (normal(*shape),),
        )
    for name, shape, target in (
        ("new-dimension", (4,), (3, 4)),
        ("one", (1, 4), (3, 4)),
        ("middle", (2, 1, 4), (2, 3, 4)),
        ("both", (3, 1), (2, 3, 4)),
        ("0-d", (), (2, 3)),
        ("same", (3, 4), (3, 4)),
        ("ones-stay", (1, 1), (5, 1, 1)),
    ):
        yield Case(
            "relax.broadcast_to",
            name,
            lambda x, t=target: op.broadcast_to(x, t),
            lambda x, t=target: x.expand(t),
            (normal(*shape),),
        )


def concat_cases() -> Iterator[Case]:
    for name, shapes, axis in (
        ("first", ((2, 4), (3, 4)), 0),
        ("last", ((3, 2), (3, 1), (3, 4)), -1),
        ("middle", ((2, 3, 4), (2, 1, 4)), 1),
        ("one-tensor", ((3, 4),), 0),
        ("1-d", ((2,), (3,), (1,)), 0),
    ):
        yield Case(
            "relax.concat",
            name,
            lambda *xs, a=axis: op.concat(list(xs), a),
            lambda *xs, a=axis: torch.cat(xs, a),
            tuple(normal(*s, seed=i) for i, s in enumerate(shapes)),
        )
    yield Case(
        "relax.concat",
        "same-tensor-twice",
        lambda x, y: op.concat([x, y, x], 1),
        lambda x, y: torch.cat([x, y, x], 1),
        (normal(3, 4), normal(3, 2)),
    )
    yield Case(
        "relax.concat",
        "beside-constants",
        lambda m, x: op.concat([op.astype(m, "float64"), x, op.full((2, 4), _one(), "float64")], 0),
        lambda m, x: torch.cat([m.double(), x, torch.ones(2, 4)], 0),
        (torch.ones(1, 4, dtype=torch.bool), normal(3, 4)),
    )


def _one() -> relax.Expr:
    return relax.const(1.0, "float64")


def split_cases() -> Iterator[Case]:
    x = normal(3, 7)

    def pieces(indices: object, axis: int, *chosen: int) -> object:
        def formula(x: relax.Expr) -> list[relax.Expr]:
            parts = relax.BlockBuilder.current().emit(op.split(x, indices, axis))
            return [relax.TupleGetItem(parts, i) for i in chosen]

        return formula

    def torch_pieces(sizes: object, axis: int, *chosen: int) -> object:
        return lambda x: [torch.split(x, sizes, axis)[i] for i in chosen]

    rule = "relax.split"
    yield Case(rule, "all", pieces([2, 5], 1, 0, 1, 2), torch_pieces([2, 3, 2], 1, 0, 1, 2), (x,))
    yield Case(rule, "middle", pieces([2, 5], 1, 1), torch_pieces([2, 3, 2], 1, 1), (x,))
    yield Case(rule, "last", pieces([2, 5], -1, 2), torch_pieces([2, 3, 2], -1, 2), (x,))
    yield Case(rule, "twice", pieces([2], 1, 0, 1, 0), torch_pieces([2, 5], 1, 0, 1, 0), (x,))
    yield Case(rule, "sections", pieces(3, 0, 0, 2), torch_pieces(1, 0, 0, 2), (x,))
    yield Case(
        rule,
        "multiplied",
        lambda x: op.multiply(op.split(x, 2, 1)[0], op.split(x, 2, 1)[1]),
        lambda x: x[:, :3] * x[:, 3:],
        (normal(4, 6),),
    )


def slice_cases() -> Iterator[Case]:
    for name, axes, begins, ends in (
        ("start", [0], [0], [2]),
        ("end", [1], [3], [7]),
        ("middle", [1], [2], [5]),
        ("one-row", [0], [1], [2]),
        ("several", [0, 1], [1, 2], [3, 7]),
        ("whole", [1], [0], [7]),
        ("negative-axis", [-1], [2], [5]),
        ("negative-begin", [1], [-3], [7]),
        ("negative-end", [1], [1], [-1]),
        ("end-beyond", [1], [4], [100]),
        ("begin-beyond-the-front", [1], [-100], [3]),
    ):

        def slice_of(
            x: torch.Tensor,
            axes: list[int] = axes,
            begins: list[int] = begins,
            ends: list[int] = ends,
        ) -> torch.Tensor:
            where = [slice(None)] * x.dim()
            for axis, begin, end in zip(axes, begins, ends, strict=True):
                where[axis] = slice(begin, end)
            return x[tuple(where)]

        yield Case(
            "relax.strided_slice",
            name,
            lambda x, a=axes, b=begins, e=ends: op.strided_slice(x, a, b, e),
            slice_of,
            (normal(3, 7),),
        )
    yield Case(
        "relax.strided_slice",
        "steps-of-one",
        lambda x: op.strided_slice(x, [0, 1], [0, 1], [2, 6], [1, 1]),
        lambda x: x[:2, 1:6],
        (normal(3, 7),),
    )


def repeat_cases() -> Iterator[Case]:
    for name, shape, repeats in (
        ("every", (3, 4), [2, 3]),
        ("more-repeats", (3, 4), [2, 1, 3]),
        ("1-d", (4,), [3]),
        ("ones", (3, 4), [1, 1]),
        ("0-d", (), [2, 3]),
    ):
        yield Case(
            "relax.tile",
            name,
            lambda x, r=repeats: op.tile(x, r),
            lambda x, r=repeats: x.repeat(r),
            (normal(*shape),),
        )
    yield Case(
        "relax.tile",
        "fewer-repeats",
        lambda x: op.tile(x, [2]),
        lambda x: x.repeat(1, 2),
        (normal(3, 4),),
    )
    for axis in (0, 1, -1):
        yield Case(
            "relax.flip",
            f"axis-{axis}",
            lambda x, a=axis: op.flip(x, a),
            lambda x, a=axis: x.flip(a),
            (normal(3, 4),),
        )


def take_cases() -> Iterator[Case]:
    indices = torch.tensor([2, 0, 2, 2, 1])
    for name, shape, axis in (
        ("rows", (4, 3), 0),
        ("columns", (4, 3), 1),
        ("last", (4, 3), -1),
        ("1-d", (4,), 0),
        ("3-d-middle", (2, 3, 4), 1),
        ("3-d-rows", (3, 2, 4), 0),
    ):
        for dtype in (torch.int64, torch.int32) if name == "rows" else (torch.int64,):
            yield Case(
                "relax.take",
                f"{name}-{str(dtype)[6:]}",
                lambda x, i, a=axis: op.take(x, i, axis=a),
                lambda x, i, a=axis: torch.index_select(x, a, i),
                (normal(*shape), indices.to(dtype)),
            )


def shape_cases() -> Iterator[Case]:
    """Yield all cases of this file."""
    yield from permute_cases()
    yield from reshape_cases()
    yield from expand_cases()
    yield from concat_cases()
    yield from split_cases()
    yield from slice_cases()
    yield from repeat_cases()
    yield from take_cases()
