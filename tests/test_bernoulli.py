"""Dropout masks equal PyTorch's masks, and leave PyTorch's generator in the same state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tvmbridge.core import bernoulli


def _drawn(draw: Callable[[torch.Tensor, float], torch.Tensor], used: int) -> list[torch.Tensor]:
    """Draw masks of many sizes after ``used`` other numbers; return them with generator state."""
    torch.manual_seed(11)
    torch.rand(used)
    found = []
    for size, p in ((0, 0.5), (1, 0.9), (311, 0.1), (313, 0.5), (5000, 0.9), (7, 1.0), (624, 0.0)):
        found.append(draw(torch.empty(size, dtype=torch.bool), p))
        # A float32 draw uses one word, so the next draw starts in the middle of a pair of words.
        found.append(torch.rand(1))
    found.append(draw(torch.empty(3, 40, 50, dtype=torch.bool).transpose(1, 2), 0.3))
    return [*found, torch.get_rng_state()]


@pytest.mark.parametrize("used", [0, 1, 623, 624, 1000])
def test_masks_are_those_of_bernoulli(used: int) -> None:
    expected = _drawn(torch.Tensor.bernoulli_, used)
    for one, other in zip(_drawn(bernoulli.draw_mask, used), expected, strict=True):
        assert torch.equal(one, other)


def test_the_limit_is_exact() -> None:
    # Each probability equals one of the drawn numbers, and no number is less than itself.
    torch.manual_seed(3)
    numbers = torch.rand(50, dtype=torch.float64)
    for p in numbers.tolist():
        expected, found = torch.empty(2, 50, dtype=torch.bool)
        torch.manual_seed(3)
        expected.bernoulli_(p)
        torch.manual_seed(3)
        assert torch.equal(bernoulli.draw_mask(found, p), expected)


def test_other_tensors_are_left_to_pytorch() -> None:
    for mask in (torch.empty(9), torch.empty(3, 8, dtype=torch.bool)[:, ::2]):
        other = torch.empty_strided(mask.shape, mask.stride(), dtype=mask.dtype)
        torch.manual_seed(5)
        expected = mask.bernoulli_(0.4).clone()
        torch.manual_seed(5)
        assert torch.equal(bernoulli.draw_mask(other, 0.4), expected)


def test_a_probability_beyond_one_is_refused() -> None:
    with pytest.raises(RuntimeError, match="in"):
        bernoulli.draw_mask(torch.empty(4, dtype=torch.bool), 1.5)


def test_where_pytorch_draws_other_numbers_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(address: int, count: int, p: float, generator: torch.Generator) -> None:
        """Fill with other numbers than PyTorch's, as PyTorch with MKL draws on Intel processors."""

    assert not bernoulli._draws_alike(fill)


def test_numbers_are_compared_on_the_cpu_whatever_the_default_device_is() -> None:
    fill = bernoulli._compiled()
    if fill is None:
        pytest.skip("the compiled half was not built, or PyTorch draws by MKL")
    with torch.device("meta"):
        assert bernoulli._draws_alike(fill)
