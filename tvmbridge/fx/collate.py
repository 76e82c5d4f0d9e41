"""Collating: the features of a batch are checked and joined on the host, before they are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import default_collate

from tvmbridge.fx.sparse_features import CombinedFeatures, Jagged


@dataclass(frozen=True)
class SparseCollate:
    """A ``collate_fn`` for DataLoader: the sparse features of its samples become one.

    Samples are dicts. Under the name of a feature they have its indices (a list or a tensor), or a
    pair of indices and weights where it is ``weighted``; features may be missing. What else they
    have is collated as DataLoader does by default. The batch has :class:`CombinedFeatures` under
    ``key``, with ``pin_memory=True`` of DataLoader in pinned memory.

    Args:
        tables: the number of rows of each feature's table, or None where it is not to be checked;
            the order of the features.
        weighted: whether indices come with weights.
        key: under which the features stand in the batch.
    """

    tables: Mapping[str, int | None]
    weighted: bool = False
    key: str = "features"
    dtype: torch.dtype = field(default=torch.int64)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of ``samples``.

        Raises:
            ValueError: an index is beyond its table, or there are more or fewer weights than
                indices; the message names the feature and the row.
        """
        rest = [{k: v for k, v in s.items() if k not in self.tables} for s in samples]
        batch = dict(default_collate(rest)) if rest and rest[0] else {}
        features = {name: self._feature(name, samples) for name in self.tables}
        batch[self.key] = combine(features, self.tables)
        return batch

    def _feature(self, name: str, samples: Sequence[Mapping[str, Any]]) -> Jagged:
        indices: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for row, sample in enumerate(samples):
            given = sample.get(name, ((), ()) if self.weighted else ())
            own, counts = given if self.weighted else (given, ())
            indices.append(torch.as_tensor(own, dtype=self.dtype).reshape(-1))
            weights.append(torch.as_tensor(counts, dtype=torch.float32).reshape(-1))
            if self.weighted and len(indices[-1]) != len(weights[-1]):
                raise ValueError(
                    f"feature {name!r}, row {row}: {len(indices[-1])} indices have "
                    f"{len(weights[-1])} weights"
                )
        lengths = torch.tensor([len(own) for own in indices], dtype=self.dtype)
        joined = torch.cat(weights) if self.weighted else None
        return Jagged(torch.cat(indices), lengths, joined)


def combine(
    features: Mapping[str, Jagged], tables: Mapping[str, int | None] | None = None
) -> CombinedFeatures:
    """Join features on the host, after they were checked.

    Args:
        features: by name; on the CPU, of as many rows each.
        tables: the number of rows of each feature's table, or None where it is not checked.

    Raises:
        ValueError: there is no feature, some have weights and others have none, or numbers of rows
            differ; lengths are negative or do not add up, or an index is beyond its table, which is
            told with the feature and the row.
    """
    if not features:
        raise ValueError("there are no features to combine")
    rows = {len(jagged.lengths) for jagged in features.values()}
    if len(rows) > 1:
        raise ValueError(f"the features have different numbers of rows: {sorted(rows)}")
    weighted = {jagged.weights is not None for jagged in features.values()}
    if len(weighted) > 1:
        raise ValueError("some of the features have weights, and others have none")
    for name, jagged in features.items():
        check(name, jagged, None if tables is None else tables.get(name))
    parts = list(features.values())
    weights = [jagged.weights for jagged in parts if jagged.weights is not None]
    return CombinedFeatures(
        tuple(features),
        torch.cat([jagged.indices for jagged in parts]),
        torch.stack([jagged.lengths for jagged in parts]),
        torch.tensor([len(jagged.indices) for jagged in parts]),
        torch.cat(weights) if weights else None,
    )


def check(name: str, jagged: Jagged, table: int | None) -> None:
    """Raise ValueError if a feature is not what it should be; the message says where."""
    indices, lengths = jagged.indices, jagged.lengths
    if indices.is_floating_point() or lengths.is_floating_point():
        raise ValueError(f"feature {name!r}: indices and lengths must be integers")
    if indices.dim() != 1 or lengths.dim() != 1:
        raise ValueError(f"feature {name!r}: indices and lengths must have one dimension")
    if len(lengths) and int(lengths.min()) < 0:
        row = int(lengths.argmin())
        raise ValueError(f"feature {name!r}, row {row}: the length is {int(lengths[row])}")
    total = int(lengths.sum())
    if total != len(indices):
        ends = lengths.cumsum(0)
        row = min(int((ends <= len(indices)).sum()), len(lengths) - 1)
        raise ValueError(
            f"feature {name!r}, row {row}: the lengths add up to {total}, and there are "
            f"{len(indices)} indices"
        )
    if jagged.weights is not None and jagged.weights.shape != indices.shape:
        raise ValueError(
            f"feature {name!r}: {len(indices)} indices have {len(jagged.weights)} weights"
        )
    wrong = indices < 0 if table is None else (indices < 0) | (indices >= table)
    if len(indices) and bool(wrong.any()):
        place = int(wrong.to(torch.int8).argmax())
        row = int(torch.searchsorted(lengths.cumsum(0), place, right=True))
        beyond = "is negative" if table is None else f"is not in its table of {table} rows"
        raise ValueError(f"feature {name!r}, row {row}: index {int(indices[place])} {beyond}")
