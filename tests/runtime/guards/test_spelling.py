"""Call forms that bind the same values to forward's parameters are served by the same code."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager, sample
from tests.thinned import covering
from tvmbridge import add_tvm_dispatch, dispatch_report

STRUCTURE = "the structure of the arguments differs"
CONSTANT = "an argument that is not a tensor differs"
CHOICE = "a string, a bool or None differs"
TENSOR = "an argument is a tensor, and was none"


class Masked(nn.Module):
    """A forward with defaults of all common kinds, and a parameter that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24, dtype=torch.float64)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float = 1.0,
        step: int = 0,
        *,
        name: str = "a",
    ) -> torch.Tensor:
        y = self.linear(x) * scale + len(name)
        return y if mask is None else y + mask


SAME: list[Callable[[nn.Module], torch.Tensor]] = [
    lambda m: m(sample()),
    lambda m: m(x=sample()),
    lambda m: m(sample(), None),
    lambda m: m(sample(), mask=None),
    lambda m: m(sample(), scale=1.0),
    lambda m: m(sample(), None, 1.0, name="a"),
    lambda m: m(name="a", scale=1.0, x=sample()),
    lambda m: m(sample(), step=3),
    lambda m: m(sample(), None, 1.0, 4),
]
OTHERS: list[tuple[str, str, Callable[[nn.Module], torch.Tensor]]] = [
    (CONSTANT, "argument `scale`: 2.0, compiled for 1.0", lambda m: m(sample(), scale=2.0)),
    (CONSTANT, "argument `scale`: 1, compiled for 1.0", lambda m: m(sample(), scale=1)),
    (CONSTANT, "argument `scale`: 0.5, compiled for 1.0", lambda m: m(sample(), None, 0.5)),
    (CHOICE, "argument `name`: 'bb', compiled for 'a'", lambda m: m(sample(), name="bb")),
    (TENSOR, "argument `mask`: a tensor (6, 24) float64", lambda m: m(sample(), sample() + 1)),
]
SAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shortest": ((sample(),), {}),
    "by keyword": ((), {"x": sample()}),
    "in full": ((sample(), None, 1.0, 5), {"name": "a"}),
    "in part": ((sample(),), {"scale": 1.0, "mask": None}),
}


@pytest.mark.parametrize("given", SAMPLES.values(), ids=SAMPLES)
def test_what_means_the_same_is_one_call(
    given: tuple[Any, dict[str, Any]], compilations: list[str]
) -> None:
    args, kwargs = given
    module = add_tvm_dispatch(Masked().eval(), args, sample_kwargs=kwargs)
    reference = eager(module)
    with torch.no_grad():
        for call in [*SAME, *SAME]:
            torch.testing.assert_close(call(module), call(reference))
        assert dispatch_report(module).fallbacks == {}
        for _, _, call in OTHERS:
            torch.testing.assert_close(call(module), call(reference))
    assert dispatch_report(module).fallbacks == {CONSTANT: 3, CHOICE: 1, TENSOR: 1}
    assert OTHERS[0][1] in dispatch_report(module).examples[CONSTANT]
    assert dispatch_report(module).tvm_calls == 2 * len(SAME)
    assert compilations == ["Masked"]


@pytest.mark.parametrize(
    ("reason", "expected", "call"), OTHERS, ids=[text for _, text, _ in OTHERS]
)
def test_what_differs_is_named(
    dispatched: nn.Module, reason: str, expected: str, call: Callable[[nn.Module], torch.Tensor]
) -> None:
    matched = dispatched.forward.code.kept.known[0].signature  # type: ignore[union-attr, index]

    class Asks(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return matched.match(args, kwargs)

    found = call(Asks())
    assert (found.text, expected in found.detail) == (reason, True)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def dispatched() -> nn.Module:
    return add_tvm_dispatch(Masked().eval(), sample())


def test_other_spellings_have_a_fast_path_and_the_samples_keeps_it() -> None:
    module = add_tvm_dispatch(Masked().eval(), sample())
    dispatcher: Any = module.forward
    x = sample()
    with torch.no_grad():
        for call in (lambda: module(x), lambda: module(x, mask=None), lambda: module(x=x)):
            call()
            call()
        (fast, _), *others = dispatcher.code.paths.known
        assert not others
        for args, kwargs in (((x,), {}), ((x,), {"mask": None}), ((), {"x": x})):
            (leaf,) = fast.guard.check(args, kwargs)
            assert leaf is x
        for args, kwargs in (((x, x), {}), ((x,), {"mask": x}), ((x,), {"step": 1}), ((), {})):
            assert fast.guard.check(args, kwargs) is None


def test_training_by_keyword_is_training() -> None:
    module = add_tvm_dispatch(Masked().train(), sample())
    reference = eager(module)
    for call in (lambda m: m(x=sample()), lambda m: m(sample(), None), lambda m: m(x=sample())):
        gradients = []
        for each in (module, reference):
            each.zero_grad()
            call(each).square().sum().backward()
            gradients.append([p.grad for p in each.parameters()])
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert (dispatch_report(module).tvm_calls, dispatch_report(module).fallbacks) == (3, {})


@pytest.mark.parametrize(
    "call",
    [lambda m: m(), lambda m: m(sample(), bad=1), lambda m: m(sample(), x=sample())],
    ids=["missing", "unknown", "twice"],
)
def test_a_wrong_call_raises_what_eager_raises(
    dispatched: nn.Module, call: Callable[[nn.Module], torch.Tensor]
) -> None:
    messages = []
    for module in (dispatched, eager(dispatched)):
        with pytest.raises(TypeError) as error:
            call(module)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


class Mutable(nn.Module):
    """A forward with mutable defaults: a list and a tensor."""

    def forward(
        self,
        x: torch.Tensor,
        held: list[int] = [],  # noqa: B006
        by: torch.Tensor = torch.ones(24),  # noqa: B008
    ) -> torch.Tensor:
        return x * (len(held) + 1) * by


def test_defaults_that_are_no_constants_are_left_to_python() -> None:
    module = add_tvm_dispatch(Mutable().eval(), sample())
    reference = eager(module)
    calls: list[Callable[[nn.Module], torch.Tensor]] = [
        lambda m: m(sample()),
        lambda m: m(sample(), [1, 2]),
        lambda m: m(sample(), by=torch.full((24,), 3.0)),
        lambda m: m(x=sample()),
    ]
    for call in calls:
        torch.testing.assert_close(call(module), call(reference))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (2, {STRUCTURE: 2})
    assert report.examples[STRUCTURE] == "argument `held` is given, and was not given by the sample"


def by_spelling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward so that the result depends on the call form, despite the wrapped signature."""

    @functools.wraps(function)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs) * (1 + len(kwargs))

    return wrapper


class Wrapped(nn.Module):
    @by_spelling
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * scale


def test_wrappers_see_the_spelling_of_the_call() -> None:
    module = add_tvm_dispatch(Wrapped().eval(), sample())
    reference = eager(module)
    calls: list[Callable[[nn.Module], torch.Tensor]] = [
        lambda m: m(sample()),
        lambda m: m(sample(), 1.0),
        lambda m: m(sample(), scale=1.0),
        lambda m: m(sample()),
    ]
    for call in calls:
        torch.testing.assert_close(call(module), call(reference))
    assert (dispatch_report(module).tvm_calls, dispatch_report(module).fallbacks) == (
        2,
        {STRUCTURE: 2},
    )


class Collects(nn.Module):
    """Appends to a list argument."""

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor], twice: bool = True) -> Any:
        seen.append(x * 2)
        return seen[-1] + twice


def test_a_container_that_is_changed_is_found_by_its_keyword() -> None:
    module = add_tvm_dispatch(Collects().eval(), (sample(), []))
    ours: list[torch.Tensor] = []
    for given in ({"seen": ours, "x": sample()}, {"x": sample(), "seen": ours, "twice": True}):
        ours.clear()
        torch.testing.assert_close(module(**given), sample() * 2 + 1)
        torch.testing.assert_close(ours, [sample() * 2])
    assert dispatch_report(module).tvm_calls == 2


def test_hooks_see_the_call_as_it_was_made() -> None:
    module = Masked().eval()
    seen: list[Any] = []
    module.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append((len(args), tuple(kwargs))), with_kwargs=True
    )
    add_tvm_dispatch(module, sample())
    module(x=sample(), mask=None)
    module(sample())
    assert seen == [(0, ("x", "mask")), (1, ())]
    assert dispatch_report(module).tvm_calls == 2


@pytest.mark.parametrize(
    ("name", "fast", "of_instance"),
    covering(["__defaults__", "__kwdefaults__", "__code__"], [False, True], [True, False]),
)
def test_another_default_or_body_is_noticed(name: str, fast: bool, of_instance: bool) -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor, scale: float = 1.0, *, by: float = 2.0) -> torch.Tensor:
            return x * scale * by

    def own(x: torch.Tensor, scale: float = 1.0, *, by: float = 2.0) -> torch.Tensor:
        return x * scale * by

    def other(x: torch.Tensor, scale: float = 5.0, *, by: float = 7.0) -> torch.Tensor:
        return x * (scale + by)

    def method(self: nn.Module, x: torch.Tensor, scale: float = 5.0, *, by: float = 7.0) -> Any:
        return x * (scale + by)

    module: nn.Module = Own().eval()
    function: Any = own if of_instance else Own.forward
    if of_instance:
        module.forward = own
    add_tvm_dispatch(module, sample())
    for _ in range(2 * fast):
        torch.testing.assert_close(module(x=sample()), sample() * 2)
    setattr(function, name, getattr(other if of_instance else method, name))
    expected = module.forward.code.original(sample())  # type: ignore[union-attr]
    assert not torch.equal(expected, sample() * 2)
    for _ in range(2):
        torch.testing.assert_close(module(sample()), expected)
        torch.testing.assert_close(module(x=sample()), expected)
    assert sum(dispatch_report(module).fallbacks.values()) == 4


class ByKey(nn.Module):
    """Multiplies each value of a dict by a factor that depends on its key's class."""

    def forward(self, values: dict[Any, torch.Tensor]) -> torch.Tensor:
        factor = 1
        for key in values:
            factor += 2 if key is True else 4 if type(key) is int else 8
        return torch.stack(list(values.values())).sum(0) * factor


@pytest.mark.parametrize("container", [dict, collections.OrderedDict])
def test_equal_keys_of_other_classes_have_code_of_their_own(container: type) -> None:
    """Python's ``1``, ``1.0`` and ``True`` are one key of a dict."""
    module, x = ByKey(), torch.randn(3)
    add_tvm_dispatch(module)
    for key in (True, 1, 1.0, True, 1):
        assert torch.equal(module(container({key: x})), ByKey()(container({key: x})))
    assert dispatch_report(module).tvm_calls == 5
