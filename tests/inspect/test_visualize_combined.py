"""The pictures of BERT's attention before and after its products are combined."""

from __future__ import annotations

import pytest
import torch

from tests.inspect.test_visualize import Parsed, parse
from tests.models import bert_layer
from tests.thinned import thinned
from tvmbridge import capture, to_relax, visualize
from tvmbridge.passes.relax.combine_parallel_batch_matmul import CombineParallelBatchMatmul
from tvmbridge.pipeline import inference_passes, run_passes, tidy_passes


def products_of_the_input(picture: Parsed) -> list[str]:
    """Return the nodes of products whose operand is the layer's input or a view of it."""
    (start,) = [n for n, lines in picture.labels.items() if "hidden_states" in lines[0]]
    reached, found = [start], []
    while reached:
        node = reached.pop()
        for source, target, _ in picture.edges:
            title = picture.labels[target][0]
            if source == node and "matmul" in title:
                found.append(target)
            elif source == node and "reshape" in title:
                reached.append(target)
    return found


@pytest.mark.parametrize("attention", thinned(["sdpa", "eager"], 2))
def test_three_products_become_one(attention: str) -> None:
    captured = capture(bert_layer(attention).eval(), torch.randn(2, 5, 32))
    before = run_passes(to_relax(captured), inference_passes(), [])
    after = run_passes(before, [CombineParallelBatchMatmul(), *tidy_passes()], [])
    pictures = [parse(visualize(mod, collapse_small=False)) for mod in (before, after)]
    assert [len(products_of_the_input(p)) for p in pictures] == [3, 1]
    titles = [[title for title in p.titles() if "matmul" in title] for p in pictures]
    assert len(titles[0]) - len(titles[1]) == 2
    assert any("concat" in title for title in pictures[1].titles())
