"""Collate sparse features: check and join the features of a batch on the host, before the copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import default_collate

from tvmbridge.fx.sparse_features import CombinedFeatures, Jagged


@dataclass(frozen=True)
class SparseCollate:
    """A ``collate_fn`` for DataLoader that joins the sparse features of its samples.

    Each sample is a dict. The value of a feature is its indices, as a list or tensor. If
    ``weighted``, the value is a pair of indices and weights. A sample may lack a feature. All other
    values are collated by DataLoader's default. The batch has :class:`CombinedFeatures` under
    ``key``, in pinned memory if DataLoader has ``pin_memory=True``.

    Args:
        tables: the number of rows of each feature's table, or None to leave its indices unchecked.
            The batch has the features in this order.
        weighted: whether indices come with weights.
        key: the key of the features in the batch.
        dtype: the dtype of indices and lengths.
    """

    tables: Mapping[str, int | None]
    weighted: bool = False
    key: str = "features"
    dtype: torch.dtype = field(default=torch.int64)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of ``samples``.

        Raises:
            ValueError: an index is beyond its table, or a row has different numbers of weights and
                indices. The message names the feature and the row.
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
    """Check features on the host and join them.

    Args:
        features: the features by name, on the CPU, all with the same number of rows.
        tables: the number of rows of each feature's table, or None to leave its indices unchecked.

    Raises:
        ValueError: there is no feature, only some features have weights, or their numbers of rows
            differ. Or a feature is wrong: a length is negative, the lengths do not add up, or an
            index is beyond its table. The message then names the feature and the row.
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
    """Raise ValueError if a feature is inconsistent; the message names the feature and the row."""
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
