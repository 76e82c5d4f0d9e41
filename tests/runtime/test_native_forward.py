"""After a verdict for the module's own forward, native code calls it: counted, and always right."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tvmbridge import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch
from tvmbridge.runtime import speed_trial
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.guards.watch import native_half
from tvmbridge.runtime.speed_trial import SpeedVerdict

CALLS = 4


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = 2.0

    def forward(self, x: Tensor, scale: float = 1.0, *, bias: Tensor | None = None) -> Tensor:
        found = self.linear(x).relu() * self.factor * scale
        return found if bias is None else found + bias


def inputs(rows: int = 4) -> Tensor:
    return torch.arange(rows * 8.0).reshape(rows, 8) / 10 - 1


@pytest.fixture(autouse=True)
def _slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every verdict be for the module's own forward, without any timing."""
    if native_half() is None:
        pytest.skip("the compiled half is missing")
    monkeypatch.setenv("TVMBRIDGE_ONLY_IF_FASTER", "1")
    monkeypatch.setattr(CompiledEntry, "question", "which is faster")
    monkeypatch.setattr(speed_trial, "known_answer", lambda question: str(SpeedVerdict(2.0, 1.0)))


def aside(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``module``, dispatched, after ``CALLS`` calls."""
    add_tvm_dispatch(module, on_fallback="silent")
    args = args if args or kwargs else (inputs(),)
    for _ in range(CALLS):
        module(*args, **kwargs)
    assert native_calls(module) == CALLS - 1
    assert dispatch_report(module).aside_calls == CALLS
    return module


def native_calls(module: nn.Module) -> int:
    """Return how many calls native code has passed to the module's own forward."""
    asides = module.__dict__["forward"].code.paths.asides
    return sum(each.calls for each in asides)


@pytest.fixture(params=["inference", "training"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch.set_grad_enabled(request.param == "training"):
        yield request.param


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((inputs(),), {}),
        ((inputs(), 3.0), {}),
        ((), {"x": inputs()}),
        ((inputs(),), {"bias": torch.ones(8)}),
        ((inputs(),), {"scale": 0.5, "bias": None}),
    ],
)
def test_calls_of_each_form_are_passed_on(
    mode: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    module = Scaled().train(mode == "training")
    want = module(*args, **kwargs)
    aside(module, *args, **kwargs)
    got = module(*args, **kwargs)
    assert torch.equal(got, want)
    assert native_calls(module) == CALLS
    assert got.requires_grad == (mode == "training")


def test_other_calls_are_not_passed_on() -> None:
    module = aside(Scaled().eval())
    reference = copy.deepcopy(remove_tvm_dispatch(copy.deepcopy(module)))
    x = inputs()
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((inputs(5),), {}),
        ((x.double().float().t().contiguous().t(),), {}),
        ((x, 2.0), {}),
        ((x,), {"scale": 2.0}),
        ((x,), {"bias": x}),
    ]
    (native,) = module.__dict__["forward"].code.paths.asides
    for args, kwargs in others:
        assert torch.equal(module(*args, **kwargs), reference(*args, **kwargs))
        assert native.calls == CALLS - 1
    with pytest.raises(TypeError, match="unexpected keyword"):
        module(x, other=1)
    with pytest.raises(TypeError):
        module()


def test_code_that_native_calls_use_is_not_the_first_to_be_dropped() -> None:
    module = add_tvm_dispatch(
        Scaled().eval(), on_fallback="silent", options={"max_specializations": 2}
    )
    for rows in (4, 5, 4, 4):
        module(inputs(rows))
    with torch.no_grad():
        add_tvm_dispatch(module, inputs(6))
    known = module.__dict__["forward"].code.kept.known
    assert [s.signature.tensors[0][1][0] for s in known] == [4, 6]


@pytest.mark.parametrize(
    "modes",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_other_modes_of_pytorch_have_verdicts_of_their_own(modes: Callable[[], Any]) -> None:
    module = aside(Scaled())
    reference = remove_tvm_dispatch(copy.deepcopy(module))
    (native,) = module.__dict__["forward"].code.paths.asides
    with modes():
        assert torch.equal(module(inputs()), reference(inputs()))
    assert native.calls == CALLS - 1
    assert torch.equal(module.eval()(inputs()), reference.eval()(inputs()))
    assert native.calls == CALLS - 1


def test_changes_of_the_module_and_its_class_count_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = aside(Scaled())
    reference = remove_tvm_dispatch(copy.deepcopy(module))
    for each in (module, reference):
        each.factor = -3.0
        each.linear = nn.Linear(8, 8, bias=False)
        nn.init.ones_(each.linear.weight)
    assert torch.equal(module(inputs()), reference(inputs()))
    monkeypatch.setattr(Scaled, "forward", lambda self, x: x * 7)
    assert torch.equal(module(inputs()), inputs() * 7)
    monkeypatch.undo()
    assert torch.equal(module(inputs()), reference(inputs()))


def test_a_forward_of_the_instance_is_called() -> None:
    module = nn.Linear(8, 8)
    module.forward = lambda input: input + 1  # type: ignore[method-assign]
    aside(module)
    assert torch.equal(module(inputs()), inputs() + 1)
    assert native_calls(module) == CALLS


def test_a_shallow_copy_has_its_own_attributes() -> None:
    module = aside(Scaled())
    shallow = copy.copy(module)
    shallow.factor = 5.0
    reference = remove_tvm_dispatch(copy.deepcopy(module))
    reference.factor = 5.0
    assert torch.equal(shallow(inputs()), reference(inputs()))
    reference.factor = module.factor
    assert torch.equal(module(inputs()), reference(inputs()))


def test_copies_and_pickles_are_as_before() -> None:
    module = aside(Scaled())
    want = module(inputs())
    deep = copy.deepcopy(module)
    assert dispatch_report(deep).aside_calls == 0
    assert torch.equal(deep(inputs()), want)
    read = pickle.loads(pickle.dumps(module))
    assert torch.equal(read(inputs()), want)
    remove_tvm_dispatch(module)
    assert "forward" not in module.__dict__
    assert torch.equal(module(inputs()), want)


def test_hooks_and_gradients_are_those_of_the_own_forward() -> None:
    module = aside(Scaled())
    reference = remove_tvm_dispatch(copy.deepcopy(module))
    seen: list[str] = []
    module.register_forward_hook(lambda *_: seen.append("hook"))
    for each in (module, reference):
        each(inputs()).sum().backward()
    assert seen == ["hook"]
    assert torch.equal(module.linear.weight.grad, reference.linear.weight.grad)


def test_a_checkpoint_is_not_passed_on() -> None:
    module = aside(Scaled())
    reference = remove_tvm_dispatch(copy.deepcopy(module))
    passed = native_calls(module)
    for each in (module, reference):
        checkpoint(each, inputs(), use_reentrant=False).sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, reference.linear.weight.grad)
    assert native_calls(module) <= passed


def test_torch_compile_breaks_its_graph_there() -> None:
    module = aside(Scaled().eval())
    want = module(inputs()).cos()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: module(x).cos(), backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(inputs()), want)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="dispatched to TVM"):
        torch.compile(lambda x: module(x).sin(), backend="eager", fullgraph=True)(inputs())


def test_errors_and_calls_within_calls_leave_all_in_order() -> None:
    class Nested(nn.Module):
        inner: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.inner is not None:
                return self.inner(x)
            return x + 1

    module = aside(Nested())

    def within(x: Tensor) -> Tensor:
        dispatcher = module.__dict__["forward"]
        dispatcher.code.paths.forget()
        del dispatcher
        gc.collect()
        return x + 2

    module.inner = within
    assert torch.equal(module(inputs()), inputs() + 2)

    def raises(x: Tensor) -> Tensor:
        raise KeyError("inner")

    module.inner = raises
    for _ in range(3):
        with pytest.raises(KeyError, match="inner"):
            module(inputs())


def test_several_threads_get_their_own_results() -> None:
    module = aside(Scaled().eval())
    reference = remove_tvm_dispatch(copy.deepcopy(module))
    wrong: list[int] = []

    def work(number: int) -> None:
        x = inputs() + number
        want = reference(x)
        wrong.extend(number for _ in range(200) if not torch.equal(module(x), want))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_a_module_that_nobody_holds_is_freed() -> None:
    module = aside(Scaled())
    freed = weakref.ref(module)
    del module
    gc.collect()
    assert freed() is None
