"""CPU seconds up to the result of the first step of models of equal layers, without the cache.

Each model runs in its own process, with ``regions="repeated"``; ``--regions whole`` compiles the
whole model. ``--rows llama-train bert-train`` chooses some rows, ``--layers 4 12`` other sizes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from benchmarks.common import Row, parser, report
from benchmarks.compile_scaling import in_a_new_process
from tvmbridge import CompileOptions, add_tvm_dispatch

# CPU seconds of 48 layers over those of 4.
BOUND = 1.5
_SMALL, _LARGE = 4, 48


def llama(layers: int) -> tuple[nn.Module, Tensor]:
    """Return a narrow Llama without a cache of keys and values, and a sentence."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaModel(config), torch.randint(0, 512, (1, 32))


def bert(layers: int) -> tuple[nn.Module, Tensor]:
    """Return BERT-base with a number of layers, and two sentences."""
    return BertModel(BertConfig(num_hidden_layers=layers)), torch.randint(0, 30000, (2, 128))


MODELS: Mapping[str, Callable[[int], tuple[nn.Module, Tensor]]] = MappingProxyType(
    {"llama": llama, "bert": bert}
)
ROWS = ("llama-eval", "llama-train", "bert-train")


def first_step(row: str, layers: int, regions: str) -> float:
    """Return the CPU seconds from the dispatch of a model to the result of its first step."""
    name, mode = row.split("-")
    options = CompileOptions(cache=False, only_if_faster=False, regions=regions)
    warm = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).train(mode == "train")
    add_tvm_dispatch(warm, torch.randn(2, 4), options=CompileOptions(cache=False))
    torch.manual_seed(0)
    model, sample = MODELS[name](layers)
    model.train(mode == "train")
    start = time.process_time()
    add_tvm_dispatch(model, sample, options=options)
    with torch.set_grad_enabled(model.training):
        results = model(sample)[0]
    if model.training:
        results.sum().backward()
    return time.process_time() - start


def measure(row: str, layers: int, regions: str) -> float:
    """Run :func:`first_step` in a new process and return its result."""
    arguments = ("--rows", row, "--layers", str(layers), "--regions", regions)
    return in_a_new_process("compile_regions", *arguments)["seconds"]


def rows(row: str, layers: Sequence[int], regions: str) -> list[Row]:
    """Return the seconds at each number of layers, and the ratio of the last and the first."""
    seconds = [measure(row, count, regions) for count in layers]
    found = [Row(f"{row}, {n} layers", s, "s") for n, s in zip(layers, seconds, strict=True)]
    if len(layers) > 1:
        bound = BOUND if list(layers) == [_SMALL, _LARGE] and regions == "repeated" else None
        what = f"{row}, {layers[-1]} layers over {layers[0]}"
        found.append(Row(what, seconds[-1] / seconds[0], "times", bound))
    return found


def main(argv: Sequence[str] = ()) -> int:
    """Measure the chosen rows, or all."""
    options = parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options.add_argument("--layers", nargs="+", type=int, help="instead of 4 and 48, for BERT 12")
    options.add_argument("--regions", choices=("repeated", "whole"), default="repeated")
    options.add_argument("--worker", action="store_true", help="compile here and print JSON")
    chosen = options.parse_args(list(argv))
    if chosen.worker:
        seconds = first_step(chosen.rows[0], chosen.layers[0], chosen.regions)
        print(json.dumps({"seconds": seconds}))
        return 0
    table: list[Row] = []
    for row in chosen.rows:
        counts = [12] if row.startswith("bert") else [_SMALL, _LARGE]
        table += rows(row, chosen.layers or counts, chosen.regions)
    return report("CPU time up to the first result", table, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
