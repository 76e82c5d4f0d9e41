"""Training on a GPU: the time of a whole step, its peak memory, and memory held after many steps.

The timed step trains a MiniLM (6 layers of 384, random bfloat16 weights) with a fused AdamW on 32
sentences of 128 tokens. Times are medians between CUDA events, in turns with eager PyTorch. Peak
memory is measured beyond the memory that is allocated before the model exists.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.common import parser
from benchmarks.gpu_cases import cases_by_name
from tests.gpu.helpers import result_of
from tvmbridge import add_tvm_dispatch, dispatch_report

Step = Callable[[], None]


class _Classifier(nn.Module):
    """MiniLM with a classification head; forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            attn_implementation="sdpa",
        )
        self.model = BertForSequenceClassification(config)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids).logits
        return functional.cross_entropy(logits.float(), labels)


def _fine_tuning(compiled: bool) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    module = _Classifier().train().to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, 30000, (32, 128), device="cuda")
    labels = torch.randint(0, 2, (32,), device="cuda")
    if compiled:
        add_tvm_dispatch(module, (ids, labels))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        module(ids, labels).backward()
        optimizer.step()

    return module, step


def _milliseconds(step: Step, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def fine_tuning_ratio(rounds: int) -> tuple[float, float]:
    """Return the milliseconds of a step by tvmbridge and by eager PyTorch."""
    module, ours = _fine_tuning(compiled=True)
    _, eager = _fine_tuning(compiled=False)
    for step in (ours, eager) * 8:
        step()
    pairs = [(_milliseconds(ours, 10), _milliseconds(eager, 10)) for _ in range(rounds)]
    report = dispatch_report(module)
    if report.fallbacks:
        raise RuntimeError(f"calls were left to eager PyTorch: {report.fallbacks}")
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return mine, theirs


def _training_step(name: str, compiled: bool) -> Step:
    case = cases_by_name()[name]
    module, x = case.module(0.1), case.sample()
    if compiled:
        add_tvm_dispatch(module, x.detach().clone().requires_grad_())

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        output = result_of(module(x))
        output.backward(torch.ones_like(output))

    return step


def peak_bytes(name: str, compiled: bool) -> int:
    """Return the peak bytes of a step, including the module and memory held between steps."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    step = _training_step(name, compiled)
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def held_bytes(steps: int) -> tuple[int, int]:
    """Return the bytes allocated after 100 steps, and after ``steps`` steps."""
    step = _training_step("layer training 1x14 f32", compiled=True)
    held = []
    for number in range(1, steps + 1):
        step()
        if number in (100, steps):
            gc.collect()
            held.append(torch.cuda.memory_allocated())
    return held[0], held[1]


def main(argv: Sequence[str] = ()) -> int:
    """Measure and print the three rows."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=10_000, help="of the row of held bytes")
    options.add_argument("--quick", action="store_true", help="a few repeats")
    chosen = options.parse_args(list(argv))
    if not torch.cuda.is_available():
        print("there is no GPU that PyTorch can use")
        return 0
    ours, eager = fine_tuning_ratio(5 if chosen.quick else 25)
    print(f"MiniLM step 32x128 bf16: {ours:.2f} ms, eager {eager:.2f} ms, {ours / eager:.2f}")
    right = ours <= 0.6 * eager
    torch.cuda.empty_cache()
    for name in (
        "layer training 8x128 bf16",
        "layer training 32x512 bf16",
        "layer training 8x128 f32",
    ):
        mine, theirs = (peak_bytes(name, compiled) for compiled in (True, False))
        print(f"peak of {name}: {mine / theirs:.2f} of eager's {theirs / 2**20:.0f} MiB")
        right = right and mine <= theirs
    early, late = held_bytes(chosen.steps)
    print(f"held after {chosen.steps} steps over after 100: {late / early:.4f}")
    return int(not chosen.no_check and not (right and late <= early))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
