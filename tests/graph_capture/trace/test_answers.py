"""Branches of forward that depend on small buffers agree with eager PyTorch at each call."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import sample
from tests.thinned import thinned
from tvmbridge import CaptureError, CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.graph_capture.capture import capture


class Asks(nn.Module):
    """A linear layer, followed by ``way``, which branches on the module's buffers."""

    def __init__(self, way: Callable[[Asks, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.way = way
        self.inner = nn.Linear(24, 24, dtype=torch.float64)
        self.register_buffer("ready", torch.tensor([True]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("times", torch.linspace(0.0, 1.0, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, self.inner(x))


def _initialises(m: Asks, y: torch.Tensor) -> torch.Tensor:
    if m.ready:
        return y * 2
    m.times.copy_(y.detach().flatten()[:4])
    m.ready.data.copy_(torch.tensor([True]))
    return y - 1


def _counts(m: Asks, y: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return y


def _every_third(m: Asks, y: torch.Tensor) -> torch.Tensor:
    if m.count >= 2:
        m.count.zero_()
        return y * 3
    return _counts(m, y)


def _steps(m: Asks, y: torch.Tensor) -> torch.Tensor:
    assert (m.times.data[1:] > m.times[:-1]).all() or not m.ready
    for before, after in zip(m.times[:-1], m.times[1:], strict=True):
        y = y + (after - before) * y.sin()
        if before > 0.5:
            y = y * int(m.count + 2)
    return y


@pytest.mark.parametrize(
    ("training", "way"),
    thinned(itertools.product([True, False], [_initialises, _every_third, _steps]), 2),
)
def test_calls_are_as_in_eager_pytorch_also_when_the_answer_changes(
    way: Callable[[Asks, torch.Tensor], torch.Tensor], training: bool
) -> None:
    plain = Asks(way).train(training)
    module = copy.deepcopy(plain)
    given = sample()
    add_tvm_dispatch(module, given)
    copied = copy.deepcopy(module)
    for call in range(7):
        if call == 4:
            # Libraries set such flags through ``.data``, which does not change the version.
            for each in (plain, module):
                each.ready.data.fill_(False)
        found, expected = module(given), plain(given)
        torch.testing.assert_close(found, expected)
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(module.get_buffer(name), buffer, rtol=1e-12, atol=0)
        if training:
            found.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(module.inner.weight.grad, plain.inner.weight.grad)
    report = dispatch_report(module)
    assert report.tvm_calls >= 4
    assert all("what forward asks of the buffer" in reason for reason in report.fallbacks)
    copied(given)
    assert dispatch_report(copied).fallbacks == {}


def test_another_answer_is_a_fallback_until_code_is_compiled_for_it() -> None:
    module = Asks(_initialises).eval()
    given = sample()
    add_tvm_dispatch(module, given)
    with torch.no_grad():
        module(given)
        module.ready.fill_(False)
        torch.testing.assert_close(module(given), module.inner(given) - 1)
        assert bool(module.ready)
        module(given)
    reason = "what forward asks of the buffer ready changed"
    assert dispatch_report(module).fallbacks == {reason: 1}
    assert dispatch_report(module).tvm_calls == 2


def test_a_buffer_that_forward_has_written_is_not_known() -> None:
    def writes_first(m: Asks, y: torch.Tensor) -> torch.Tensor:
        m.count[...] = y.argmax()
        return y * 2 if m.count > 2 else y

    module = Asks(writes_first)
    with pytest.raises(CaptureError, match=r"branches by the value of a tensor.*m\.count > 2"):
        add_tvm_dispatch(module, sample(), on_break="forward")
    assert "forward" not in vars(module)


def test_a_buffer_that_shares_memory_is_not_known() -> None:
    def writes_another(m: Asks, y: torch.Tensor) -> torch.Tensor:
        m.both.fill_(3)
        return y * 2 if m.count > 2 else y

    module = Asks(writes_another)
    module.register_buffer("both", torch.zeros(2, dtype=torch.int64))
    module.count = module.both[0]
    with pytest.raises(CaptureError):
        add_tvm_dispatch(module, sample(), on_break="forward")


@torch.no_grad()
def test_a_buffer_of_another_shape_is_asked_by_forward_itself() -> None:
    module = Asks(_initialises).eval()
    add_tvm_dispatch(module, sample())
    module.ready = torch.tensor([True, True])
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        module(sample())
    module.ready = torch.tensor([[True]])
    torch.testing.assert_close(module(sample()), module.inner(sample()) * 2)
    reasons = dispatch_report(module).fallbacks
    assert sum(reasons.values()) == 2 or dispatch_report(module).tvm_calls == 1


def test_numbers_that_are_returned_are_those_of_each_call() -> None:
    module = Asks(lambda m, y: _counts(m, y) * 1 if m.ready else y).eval()
    module.way = lambda m, y: (_counts(m, y), m.count.item())  # type: ignore[assignment, return-value]
    given = sample()
    add_tvm_dispatch(module, given)
    assert [module(given)[1] for _ in range(3)] == [1, 2, 3]
    assert dispatch_report(module).fallbacks == {}


class Columns(nn.Module):
    """Branches on tensors that are plain attributes, as models of tables do for columns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24, dtype=torch.float64)
        self.is_number = torch.tensor([True, False, True])
        self.rounds = torch.tensor(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        for number, is_number in enumerate(self.is_number):
            y = y + x[:, number, None] if is_number else y * x[:, number, None].sin()
        for _ in range(int(self.rounds)):
            y = y.tanh()
        return y


@pytest.mark.parametrize("training", [False, True])
def test_attributes_answer_as_buffers_do(training: bool) -> None:
    plain, x = Columns().train(training), sample()
    module = add_tvm_dispatch(copy.deepcopy(plain), x)

    def both() -> None:
        torch.testing.assert_close(module(x), plain(x), rtol=1e-12, atol=1e-14)

    both()
    assert dispatch_report(module).fallbacks == {}
    for each in (module, plain):
        each.is_number[1] = True
    both()
    for each in (module, plain):
        each.is_number, each.rounds = torch.tensor([True, False, True]), torch.tensor(3)
    both()
    assert set(dispatch_report(module).fallbacks) == {
        "what forward asks of the buffer is_number changed",
        "what forward asks of the buffer rounds changed",
    }
    for each in (module, plain):
        each.rounds.fill_(2)
    both()
    assert dispatch_report(module).tvm_calls == 2


class Counting(nn.Module):
    """Increments a tensor attribute, and branches on it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.tensor(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2 if self.calls > 2 else x


def test_attributes_that_forward_writes_answer_nothing() -> None:
    with pytest.raises(CaptureError):
        add_tvm_dispatch(Counting().eval(), sample(), on_break="forward")


class Masked(nn.Module):
    """Two layers that each ask ``way`` a question of the mask, which is a bool."""

    def __init__(self, way: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(nn.Linear(24, 24, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            mask = torch.ones(x.shape[:-1], device=x.device)
        for layer in self.layers:
            x = layer(x)
            if self.way(mask):
                x = x.sin() * mask.mean()
        return x


def _any_left_out(mask: torch.Tensor) -> bool:
    return bool(((1.0 - mask[:, None, :]) * -10 < 0).flatten().any().item())


def _written_over(mask: torch.Tensor) -> bool:
    chosen = torch.where(mask > 0, torch.zeros(()), -1.0)[:, None]
    chosen[chosen == -1] = 5
    if (chosen > 4).any():
        return bool(torch.isnan(mask).any()) or bool(chosen.max() > 4)
    return False


def _added_mask(mask: torch.Tensor) -> bool:
    rows, columns = torch.arange(mask.shape[0])[:, None], torch.arange(mask.shape[1])
    open_ = (mask > 0)[rows, columns]
    added = torch.where(open_, torch.tensor(0.0, dtype=mask.dtype), -1e9)
    return bool((added < torch.scalar_tensor(-1.0)).any().item())


@pytest.mark.parametrize(
    ("way", "training"),
    thinned(itertools.product([_any_left_out, _written_over, _added_mask], [True, False]), 5),
)
def test_each_branch_by_an_argument_has_code_that_is_chosen_before_the_call(
    way: Callable[[torch.Tensor], bool], training: bool
) -> None:
    plain = Masked(way).train(training)
    module = add_tvm_dispatch(copy.deepcopy(plain))
    x, full, holed = (
        sample(2, 6, 24),
        torch.ones(sample(2, 6, 24).shape[:-1]),
        torch.ones(sample(2, 6, 24).shape[:-1]),
    )
    holed[0, -1] = 0
    for mask in (full, holed, full, holed, None, holed, full, None):
        found, expected = module(x, mask), plain(x, mask)
        torch.testing.assert_close(found, expected)
        if training:
            for each, result in ((module, found), (plain, expected)):
                each.zero_grad()
                result.sum().backward()
            torch.testing.assert_close(module.layers[0].weight.grad, plain.layers[0].weight.grad)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks, report.parts) == (8, {}, ())
    assert len(report.specializations) == 3


def test_equal_conditions_in_each_layer_are_one() -> None:
    captured = capture(
        Masked(_any_left_out).eval(), (sample(2, 6, 24), torch.ones(sample(2, 6, 24).shape[:-1]))
    )
    (answer,) = captured.assumptions.answers
    assert answer.value is False
    assert len(answer.arguments) == 1


def _views_are_written(mask: torch.Tensor) -> bool:
    seen = mask[:1]
    (mask * 1).unfold(0, 1, 1)  # An unknown function of a copy.
    mask.fill_(0)
    return bool(seen.any())


def _memory_is_written(mask: torch.Tensor) -> bool:
    copied = mask + 0
    hidden = copied.data.unfold(0, 1, 1)
    copied.zero_()
    hidden += 1
    return bool(copied.any())


@pytest.mark.parametrize("way", [_views_are_written, _memory_is_written])
def test_a_value_that_may_be_written_elsewhere_is_not_known(
    way: Callable[[torch.Tensor], bool],
) -> None:
    plain = Masked(way).eval()
    module = add_tvm_dispatch(copy.deepcopy(plain))
    x = sample(2, 6, 24)
    with torch.no_grad():
        for _ in range(3):
            masks = [torch.ones(x.shape[:-1]) for _ in range(2)]
            torch.testing.assert_close(module(x, masks[0]), plain(x, masks[1]))
            torch.testing.assert_close(masks[0], masks[1])


def test_a_number_of_an_argument_has_no_code_of_its_own() -> None:
    class Cuts(nn.Module):
        def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
            return x.sin().cos()[:, : int(length.max())].exp()

    with pytest.raises(CaptureError):
        add_tvm_dispatch(
            Cuts().eval(), (sample(2, 6, 24), torch.tensor([2, 3])), on_break="forward"
        )


@pytest.mark.slow
def test_further_sizes_of_a_branch_by_an_argument_run_in_parts() -> None:
    plain = Masked(_any_left_out).eval()
    module = add_tvm_dispatch(copy.deepcopy(plain))
    with torch.no_grad():
        for tokens in range(3, 9):
            x, mask = sample(2, tokens, 24), torch.ones(2, tokens)
            mask[0, -1] = tokens % 2
            torch.testing.assert_close(module(x, mask), plain(x, mask))
    assert dispatch_report(module).fallbacks == {}


def _called_by_keyword(mask: torch.Tensor) -> bool:
    count = torch.sum(input=mask, dim=(0, 1))
    torch.fill_(input=mask * 1, value=2.0)
    return bool(torch.any(input=count < mask.numel()))


def _expanded_is_written(mask: torch.Tensor) -> bool:
    rows = (mask[:1] * 1).expand(2, -1)
    rows[0] = 5.0
    return bool((rows == 5).all())


def _filled_memory(mask: torch.Tensor) -> bool:
    copied = mask * 1
    hidden = copied.data
    torch.zeros(mask.shape, out=copied)
    return bool(hidden.any())


def _indexed(mask: torch.Tensor) -> bool:
    """On a GPU an index out of range would end the process in the guard."""
    numbers = mask.argmin(dim=-1)
    return bool((numbers < 3).all()) and bool(mask[0, :3][numbers].any())


def _multiplies(mask: torch.Tensor) -> bool:
    return bool((mask @ mask.T < 6).any())


@pytest.mark.parametrize(
    "way",
    thinned([_called_by_keyword, _expanded_is_written, _filled_memory, _indexed, _multiplies], 2),
)
def test_conditions_on_masks_agree(way: Callable[[torch.Tensor], bool]) -> None:
    plain = Masked(way).eval()
    module = add_tvm_dispatch(copy.deepcopy(plain))
    x = sample(2, 6, 24)
    with torch.no_grad():
        for left_out in (None, 0, 5, None):
            mask = torch.ones(x.shape[:-1])
            if left_out is not None:
                mask[0, left_out] = 0
            torch.testing.assert_close(module(x, mask.clone()), plain(x, mask))
    assert dispatch_report(module).fallbacks == {}


@torch.library.custom_op("tvmbridge_answers::any", mutates_args=())
def _drawn(mask: torch.Tensor) -> torch.Tensor:
    return mask + torch.rand(()) > 0.5


@_drawn.register_fake
def _(mask: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(mask, dtype=torch.bool)


def test_an_operator_of_another_library_is_not_known_by_its_name() -> None:
    plain = Masked(lambda mask: bool(torch.ops.tvmbridge_answers.any(mask).all())).eval()
    module = add_tvm_dispatch(copy.deepcopy(plain))
    x = sample(2, 6, 24)
    with torch.no_grad():
        for seed in range(4):
            results = []
            for each in (module, plain):
                torch.manual_seed(seed)
                results += [each(x, torch.zeros(2, 6)), torch.rand(1)]
            torch.testing.assert_close(results[:2], results[2:])


@torch.no_grad()
def test_a_buffer_with_a_strange_name_is_no_argument() -> None:
    class Named(Masked):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            x = super().forward(x, mask)
            return x * 2 if self.get_buffer("[1][0]") > 1 else x

    plain = Named(_any_left_out).eval()
    plain.register_buffer("[1][0]", torch.tensor(2))
    given = sample(2, 6, 24), torch.ones(2, 6)
    module = add_tvm_dispatch(copy.deepcopy(plain), given, on_break="forward")
    torch.testing.assert_close(module(*given), plain(*given))
    assert dispatch_report(module).tvm_calls == 1


@pytest.mark.slow
@torch.no_grad()
def test_more_branches_than_may_have_code_run_in_parts() -> None:
    class Several(Masked):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.layers[0](x).sin().cos() * x.tanh()
            x = x.exp() if mask[0] > 0 else x
            x = self.layers[1](x).sin().cos() * x.tanh()
            return x.exp() + x.sin() if mask[1] > 0 else x

    module, x = Several(bool).eval(), sample(2, 6, 24)
    compiled = add_tvm_dispatch(
        copy.deepcopy(module), options=CompileOptions(max_specializations=2)
    )
    for value in range(4):
        mask = torch.tensor([value & 1, value >> 1])
        torch.testing.assert_close(compiled(x, mask), module(x, mask))
    report = dispatch_report(compiled)
    assert report.fallbacks == {}
    assert report.parts


@torch.no_grad()
def test_changing_numbers_that_a_branch_compares_run_in_parts() -> None:
    class Compares(Masked):
        def forward(self, x: torch.Tensor, mask: torch.Tensor, least: int) -> torch.Tensor:  # type: ignore[override]
            x = self.layers[0](x).sin().cos()
            x = x.exp() if mask.sum() > least else x
            return self.layers[1](x).sin().cos()

    plain, x = Compares(bool).eval(), sample(2, 6, 24)
    module = add_tvm_dispatch(copy.deepcopy(plain))
    for least in (1, 20, 2, 30, 3):
        mask = torch.ones(2, 6)
        torch.testing.assert_close(module(x, mask, least), plain(x, mask, least))
    assert dispatch_report(module).fallbacks == {}
