"""Fine-tuning: equal steps from equal seeds, in eager PyTorch and through TVM by turns."""

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
        """Return the score of each topic for each sentence."""
        hidden = self.bert(**batch.arguments).last_hidden_state
        scores: torch.Tensor = self.head(self.dropout(mean_pool(hidden, batch.attention_mask)))
        return scores


class Learner:
    """A classifier in training, with its own optimizer and state of the random generator.

    Two learners with one seed can take turns in one process, since each step restores the state
    that the learner's last step left. ``losses`` and ``seconds`` have one number for each step.
    """

    def __init__(self, bert: nn.Module, topics: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.classifier = TopicClassifier(bert, topics).train()
        self.optimizer = torch.optim.AdamW(self.classifier.parameters(), lr=LEARNING_RATE)
        self.random_state = torch.get_rng_state()
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: Batch, labels: torch.Tensor) -> None:
        """Run one step of AdamW, and append its loss and its time."""
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
    """Yield the sentences of each step by index, shuffled each epoch; only full batches."""
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        order = torch.randperm(sentences, generator=generator)
        for part in order.split(size):
            if len(part) == size and done < steps:
                yield part
                done += 1


def largest_relative_difference(values: list[float], references: list[float]) -> float:
    """Return the largest absolute difference between values and references, each relative."""
    return max(abs(v - r) / abs(r) for v, r in zip(values, references, strict=True))


def largest_weight_difference(first: nn.Module, second: nn.Module) -> float:
    """Return the largest absolute difference between the parameters of two modules.

    After AdamW this is more than rounding, because AdamW divides each gradient by its own
    magnitude. For a parameter whose true gradient is zero it makes full steps from rounding errors.
    The bias of attention's keys is such a parameter, because softmax is invariant to shifts.
    """
    others = dict(second.named_parameters())
    return max(
        (p.detach() - others[name].detach()).abs().max().item()
        for name, p in first.named_parameters()
    )
