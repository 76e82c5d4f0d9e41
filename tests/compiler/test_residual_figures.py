"""No more bytes are kept than by eager and AOTAutograd, on small sizes of benchmarked modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.modules import Made, ResNet, bert_layer, gpt2_block
from benchmarks.residuals import aot_bytes, eager_bytes, ours
from tests.thinned import but_slow


def small_resnet() -> Made:
    torch.manual_seed(7)
    return ResNet(width=4, stages=2, blocks=2).train(), torch.randn(2, 3, 8, 8)


SMALL: dict[str, Callable[[], Made]] = {
    "BertLayer": lambda: bert_layer("eager", 1, 8),
    "GPT-2 block": lambda: gpt2_block("sdpa", 1, 8),
    "ResNet": small_resnet,
}


@pytest.mark.parametrize("name", but_slow(SMALL, "GPT-2 block", "ResNet"))
def test_min_cut_keeps_no_more_than_its_peers(name: str) -> None:
    module, x = SMALL[name]()
    kept = {policy: parts.residual_bytes for policy, parts in ours(module, x).items()}
    assert kept["min_cut"] <= kept["recompute_cheap"] <= kept["save_all"]
    assert 0 < kept["min_cut"] <= aot_bytes(module, x)
    assert kept["min_cut"] <= eager_bytes(module, x)
