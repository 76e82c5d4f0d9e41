"""The DLRM of ``examples/dlrm`` with torchrec's embedding tables, in torchrec's pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.streamable import Pipelineable

from benchmarks.recommender_rows import by_rank
from examples.dlrm.clicks import Batch
from examples.dlrm.model import DLRM, Sizes
from examples.dlrm.train import Place, make


@dataclass(frozen=True)
class Rule:
    """An optimizer, by a name that fbgemm and ``torch.optim`` share, and its learning rate."""

    name: str
    rate: float

    def dense(self, parameters: Any) -> torch.optim.Optimizer:
        """Return PyTorch's optimizer: fused on the CPU, with foreach operators on a GPU."""
        kind, given = getattr(torch.optim, self.name), list(parameters)
        made: torch.optim.Optimizer = kind(
            given, lr=self.rate, fused=given[0].device.type == "cpu" or None
        )
        return made

    def fused(self) -> dict[str, Any]:
        """Return fbgemm's settings of the same optimizer; ``eps`` is PyTorch's Adagrad default."""
        kind = {"SGD": EmbOptimType.EXACT_SGD, "Adagrad": EmbOptimType.EXACT_ADAGRAD}[self.name]
        return {"optimizer": kind, "learning_rate": self.rate, "eps": 1e-10}


@dataclass
class KeyedBatch(Pipelineable):
    """A batch for torchrec's pipeline: all features of this rank's rows."""

    dense: torch.Tensor
    labels: torch.Tensor
    features: Any

    def to(self, device: torch.device, non_blocking: bool) -> KeyedBatch:
        """Return a copy of the batch on ``device``."""
        parts = (self.dense, self.labels, self.features)
        return KeyedBatch(*(part.to(device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: Any) -> None:
        """Keep the tensors until ``stream`` is done with them."""
        for part in (self.dense, self.labels, self.features):
            part.record_stream(stream)


class Interaction(nn.Module):
    """The part of a DLRM after the embedding lookup."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        model.tables.clear()
        self.model = model

    def forward(self, dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.model.interacted(self.model.bottom(dense), embedded)


class Keyed(nn.Module):
    """The DLRM with torchrec's embedding tables; forward returns the loss."""

    def __init__(self, tables: nn.Module, model: DLRM) -> None:
        super().__init__()
        self.tables, self.rest = tables, Interaction(model)
        self.loss_of = nn.BCEWithLogitsLoss()

    def forward(self, batch: KeyedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss for backward, and a detached loss."""
        embedded = self.tables(batch.features).values()
        loss = self.loss_of(self.rest(batch.dense, embedded), batch.labels)
        return loss, loss.detach()


class Pipelined:
    """torchrec's pipeline; each call runs a step."""

    def __init__(self, sizes: Sizes, place: Place, rule: Rule, batches: Sequence[Batch]) -> None:
        self.model = sharded(sizes, place, rule)
        dense = {k: p for k, p in self.model.named_parameters() if k.startswith("rest.")}
        optimizer = KeyedOptimizerWrapper(dense, rule.dense)
        both = CombinedOptimizer([self.model.fused_optimizer, optimizer])
        self.pipeline = TrainPipelineSparseDist(self.model, both, place.device)
        self.batches = self._keyed(batches)

    def __call__(self) -> torch.Tensor:
        """Run a step; return the loss of this rank's rows."""
        loss: torch.Tensor = self.pipeline.progress(self.batches)
        return loss

    @staticmethod
    def _keyed(batches: Sequence[Batch]) -> Iterator[KeyedBatch]:
        # A KeyedJaggedTensor caches values computed from it, so each step gets a new one.
        for batch in itertools.cycle(batches):
            keyed = batch.features.to_keyed_jagged_tensor()
            yield KeyedBatch(batch.dense, batch.labels, keyed)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters, under the names that ``examples/dlrm`` uses."""
        return {
            name.replace("embedding_bags.", "").removeprefix("rest.model."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.numel()
        }


def sharded(sizes: Sizes, place: Place, rule: Rule) -> DistributedModelParallel:
    """Return the sharded model with the weights and the table placement of ``examples/dlrm``."""
    whole = make(sizes, Place(0, 1, place.device))
    weights = {name: table.weight for name, table in whole.tables.items()}
    owner = {n: r for r in range(place.world) for n in sizes.of_rank(r, place.world)}
    tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name,
                feature_names=[name],
                num_embeddings=sizes.rows,
                embedding_dim=sizes.width,
                pooling=PoolingType.SUM,
            )
            for name in by_rank(sizes, place.world)
        ],
    )
    sharder: Any = EmbeddingBagCollectionSharder(fused_params=rule.fused())
    plan = construct_module_sharding_plan(
        tables,
        {name: table_wise(rank=rank, compute_kernel="fused") for name, rank in owner.items()},
        sharder,
        local_size=place.world,
        world_size=place.world,
        device_type=place.device.type,
    )
    model = DistributedModelParallel(
        Keyed(tables, whole),
        device=place.device,
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )
    with torch.no_grad():
        for name, parameter in model.module.tables.embedding_bags.named_parameters():
            if parameter.numel():
                parameter.copy_(weights[name.removesuffix(".weight")])
    return model
