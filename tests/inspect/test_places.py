"""The submodule that each value of a joint function belongs to."""

from __future__ import annotations

import torch
from torch import nn
from tvm import relax

from tvmbridge import capture, to_relax
from tvmbridge.coloring import color
from tvmbridge.compiler.split import split
from tvmbridge.differentiation.differentiate import JointModule, differentiate
from tvmbridge.inspect.places import places, with_places

HOLDERS = {"p_first_weight": "first", "p_first_bias": "first"}
HOLDERS |= {"p_second_weight": "second", "p_second_bias": "second"}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def joint() -> JointModule:
    captured = capture(Two(), torch.ones(2, 4), needs_grad=True)
    wanted = [d.name for d in captured.inputs if d.requires_grad]
    return differentiate(to_relax(captured), wanted, [0], [])


def by_name(function: relax.Function) -> dict[str, str]:
    """Return the innermost submodule of each operator and parameter that has a known place."""
    found = places(function)
    return {var.name: modules[-1][0] if modules else "" for var, modules in found.items()}


def products(function: relax.Function) -> list[tuple[str, tuple[int, ...]]]:
    """Return the submodule and the shape of each matrix product."""
    found, made = places(function), []
    for binding in function.body.blocks[0].bindings:
        if getattr(getattr(binding.value, "op", None), "name", "") == "relax.matmul":
            shape = tuple(int(d) for d in binding.var.ty.shape.values)
            made.append((found[binding.var][-1][0], shape))
    return made


def test_gradients_stand_with_the_submodule_of_their_operator() -> None:
    function = with_places(joint(), HOLDERS).mod["joint"]
    assert products(function) == [
        ("first", (2, 6)),
        ("second", (2, 3)),
        ("second", (2, 6)),  # the gradient of second's input
        ("second", (3, 6)),  # the gradient of second's weight
        ("first", (6, 4)),
    ]
    assert {name: by_name(function)[name] for name in HOLDERS} == HOLDERS


def test_the_parts_of_a_joint_function_know_it_too() -> None:
    made = with_places(joint(), HOLDERS)
    mod = split(made, color(made, "save_all")).mod
    assert [place for place, _ in products(mod["backward"])] == ["second", "second", "first"]
    assert [place for place, _ in products(mod["forward"])] == ["first", "second"]


def test_the_function_stays_the_same() -> None:
    before, after = joint(), with_places(joint(), HOLDERS)
    counts = [len(j.mod["joint"].body.blocks[0].bindings) for j in (before, after)]
    assert counts[0] == counts[1]
    assert [p.name for p in after.mod["joint"].params] == [*before.primals, *before.cotangents]


def test_of_backward_alone_nothing_is_guessed() -> None:
    made = joint()
    mod = split(made, color(made, "save_all")).mod
    assert places(mod["backward"]) == {}


def test_what_a_pass_adds_stands_where_its_readers_stand() -> None:
    mod = to_relax(capture(Two().eval(), torch.ones(2, 4)))
    x = mod["main"].params[0]
    builder = relax.BlockBuilder()
    with builder.function("main", list(mod["main"].params)):
        with builder.dataflow():
            added = builder.emit(relax.op.negative(x))
            bindings = mod["main"].body.blocks[0].bindings
            told = next(b.value for b in bindings if isinstance(b.value, relax.Call))
            read = relax.Call(told.op, [added, *told.args[1:]], told.attrs, [], told.span)
            output = builder.emit_output(builder.emit(read))
        builder.emit_func_output(output)
    found = places(builder.get()["main"])
    assert found[added] == (("first", "Linear"),)
