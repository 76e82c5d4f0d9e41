"""Fine-tuning: the same steps from the same seed, by PyTorch and through TVM, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn

from tvmbridge.demo.minilm import Batch, mean_pool

LEARNING_RATE = 5e-5


class TopicClassifier(nn.Module):
    """BERT with a linear head over the mean of its token vectors."""

    def __init__(self, bert: nn.Module, topics: int) -> None:
        super().__init__()
        self.bert = bert
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(bert.config.hidden_size, topics)  # type: ignore[union-attr,arg-type]

    def forward(self, batch: Batch) -> torch.Tensor:
        """The score of each topic for each sentence."""
        hidden = self.bert(**batch.arguments).last_hidden_state
        scores: torch.Tensor = self.head(self.dropout(mean_pool(hidden, batch.attention_mask)))
        return scores


class Learner:
    """A classifier in training, with an optimizer and a random state of its own.

    Two learners with the same seed can take turns in one process: each finds the generator as it
    left it.
    """

    def __init__(self, bert: nn.Module, topics: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.classifier = TopicClassifier(bert, topics).train()
        self.optimizer = torch.optim.AdamW(self.classifier.parameters(), lr=LEARNING_RATE)
        self.random_state = torch.get_rng_state()
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: Batch, labels: torch.Tensor) -> None:
        """One step of AdamW; its loss and its time are appended."""
        torch.set_rng_state(self.random_state)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.classifier(batch), labels)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.random_state = torch.get_rng_state()


def draw_batches(sentences: int, size: int, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """For each step the numbers of its sentences: epoch after epoch, each in an order of its own.

    All have the same ``size``; the sentences left at the end of an epoch are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        order = torch.randperm(sentences, generator=generator)
        for part in order.split(size):
            if len(part) == size and done < steps:
                yield part
                done += 1


def largest_relative_difference(values: list[float], references: list[float]) -> float:
    """The largest of the differences, each relative to its reference."""
    return max(abs(v - r) / abs(r) for v, r in zip(values, references, strict=True))


def largest_weight_difference(first: nn.Module, second: nn.Module) -> float:
    """The largest difference of two modules' parameters.

    Weights differ by more than rounding after AdamW: it divides each gradient by its own size, so
    where the true gradient is zero (the bias of the keys, by softmax's shift invariance) it makes
    full steps out of rounding.
    """
    others = dict(second.named_parameters())
    return max(
        (p.detach() - others[name].detach()).abs().max().item()
        for name, p in first.named_parameters()
    )
