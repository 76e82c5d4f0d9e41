"""The share of calls that TVM serves after the third one, for ten small models at 20 sizes each.

Each model runs in evaluation and in training, with ``dynamic_shapes="auto"`` and with a Dim for
each size. Each call is compared with eager PyTorch. ``generate`` decodes with each model's own
cache. A line gives the calls that TVM served, the compilations, and why other calls were not
served. ``--rows bert:train:auto gpt2:generate`` chooses some.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from benchmarks.any_size_models import CONSTANTS, MODELS, NAMES, ids
from tests.random_sizes.compilations import Compilations, counted
from tests.random_sizes.models import Model
from tests.random_sizes.sequences import difference, step
from tvmbridge import add_tvm_dispatch, dispatch_report

_CALLS, _FIRST = 20, 3
_GENERATES = ("gpt2", "llama", "t5")
# Three compilations: for the first call's sizes, for common sizes, and for small sizes.
_LEAST_SHARE, _MOST_COMPILATIONS = 0.97, 3
# A prompt of another length adds two: with an empty cache, and with a full one.
_MOST_OF_PROMPT = 2


@dataclass
class Line:
    """The result of one model in one mode.

    - ``served``, ``calls``: calls that TVM served, and all calls, both after the first three.
    - ``compilations``: successful compilations; ``failed``: the reasons of the failed ones.
    - ``of_prompt``: further compilations, where ``generate`` gets a prompt of another length.
    - ``reasons``: how many calls were not served, by reason.
    - ``wrong``: the difference from eager PyTorch, or None.
    """

    name: str
    served: int = 0
    calls: int = 0
    compilations: int = 0
    of_prompt: int = 0
    failed: Sequence[str] = ()
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: str | None = None
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """Return the share of the calls that TVM served."""
        return self.served / max(1, self.calls)

    @property
    def holds(self) -> bool:
        """Whether results are right, enough calls were served, and compilations were few."""
        few = self.compilations + len(self.failed) <= _MOST_COMPILATIONS
        few &= self.of_prompt <= _MOST_OF_PROMPT
        return self.wrong is None and self.share >= _LEAST_SHARE and few

    def __str__(self) -> str:
        told = (
            f"{'ok  ' if self.holds else 'MISS'} {self.name:24} {self.share:5.0%} of {self.calls}, "
            f"{self.compilations}{f' + {self.of_prompt}' if self.of_prompt else ''} compilations, "
            f"{len(self.failed)} failed, {self.seconds:.0f} CPU s"
        )
        more = [f"wrong: {self.wrong}"] if self.wrong else []
        more += [f"{count} x {reason}" for reason, count in self.reasons.most_common(4)]
        more += [f"failed: {reason}" for reason in self.failed]
        return "\n".join([told, *(f"       {each[:230]}" for each in more)])


def _sizes(model: Model, name: str, calls: int) -> list[tuple[int, ...]]:
    """Return the sizes of calls: three common ones, three of the smallest, and random ones."""
    draw = random.Random(name)
    middle = [tuple((a + b) // 2 + i for a, b in model.ranges) for i in range(_FIRST)]
    few = [tuple(min(max(n, a), b) for a, b in model.ranges) for n in (1, 2, 3)]
    ranges = model.ranges
    others = [
        tuple(draw.randint(a, b) for a, b in ranges) for _ in range(calls - len(few) - _FIRST)
    ]
    mixed = [*few, *others]
    draw.shuffle(mixed)
    return [*middle, *mixed]


def _spec(model: Model, name: str) -> Any:
    counts = max(argument for places in model.places for argument, _ in places) + 1
    shapes: list[dict[int, Any]] = [{} for _ in range(counts)]
    for symbol, places in enumerate(model.places):
        scale = {"vit": 8, "unet": 2}.get(name, 1) if symbol else 1
        least, most = model.ranges[symbol]
        root = Dim(f"size{symbol}", min=least, max=most)
        for argument, dimension in places:
            shapes[argument][dimension] = scale * root if scale > 1 else root
    if name not in NAMES:
        return tuple(shapes)
    constants = dict.fromkeys(CONSTANTS.get(name, ()))
    return {**dict(zip(NAMES[name], shapes, strict=True)), **constants}


def _calls_so_far(module: nn.Module) -> tuple[int, Counter[str]]:
    report = dispatch_report(module)
    reasons: Counter[str] = Counter()
    for reason, count in report.fallbacks.items():
        more = report.examples.get(reason)
        reasons[reason + (f" ({more})" if more else "")] += count
    return report.tvm_calls, reasons


def shares(name: str, mode: str, way: str, calls: int = _CALLS) -> Line:
    """Call a model with ``calls`` sizes and return its line."""
    model, line = MODELS[name], Line(f"{name}:{mode}:{way}")
    training = mode == "train"
    torch.manual_seed(0)
    plain = model.build()
    exact, ours = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    add_tvm_dispatch(
        ours, dynamic_shapes="auto" if way == "auto" else _spec(model, name), on_fallback="silent"
    )
    before, earlier = 0, Counter[str]()
    for number, sizes in enumerate(_sizes(model, name, calls)):
        if number == _FIRST:
            before, earlier = _calls_so_far(ours)
        torch.manual_seed(number)
        arguments = model.arguments(*sizes)
        found = [step(m, model, arguments, training) for m in (ours, plain, exact)]
        different = difference(*found)
        if different and line.wrong is None:
            line.wrong = f"{sizes}: {different}"
    after, reasons = _calls_so_far(ours)
    line.served, line.reasons = after - before, reasons - earlier
    line.calls = line.served + sum(line.reasons.values())
    return line


def generation(name: str, tokens: int, compilations: Compilations) -> Line:
    """Run greedy ``generate`` on two prompts with the model's own cache; return its line."""
    line = Line(f"{name}:generate")
    torch.manual_seed(0)
    plain: Any = MODELS[name].build().eval()
    ours = copy.deepcopy(plain)
    add_tvm_dispatch(ours, dynamic_shapes="auto", on_fallback="silent")
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before, earlier = 0, Counter[str]()
    for rows, length, count in ((2, 9, 3), (2, 9, tokens), (2, 14, tokens // 2)):
        compiled = compilations.done
        prompt = ids(rows, length)
        each = [m.generate(prompt, max_new_tokens=count, **options) for m in (ours, plain)]
        if not torch.equal(*each):
            line.wrong = "the tokens differ"
        if count == 3:
            before, earlier = _calls_so_far(ours)
    after, reasons = _calls_so_far(ours)
    line.served, line.reasons = after - before, reasons - earlier
    line.calls = line.served + sum(line.reasons.values())
    line.of_prompt = compilations.done - compiled
    return line


def names() -> list[str]:
    """Return the names of all rows."""
    ways = [f"{n}:{mode}:{way}" for way in ("auto", "dim") for n in MODELS for mode in MODES]
    return [*ways, *(f"{n}:generate" for n in _GENERATES)]


MODES = ("eval", "train")


def _line(name: str, tokens: int, calls: int) -> Line:
    start = time.process_time()
    with counted() as compilations:
        model, *rest = name.split(":")
        try:
            if rest == ["generate"]:
                line = generation(model, tokens, compilations)
            else:
                line = shares(model, *rest, calls)
        except Exception as error:
            line = Line(name, wrong=f"{type(error).__name__}: {error}")
    line.compilations = compilations.done - line.of_prompt
    line.failed = compilations.failed
    line.seconds = time.process_time() - start
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each row, and the count of each reason; return 1 if a row does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.any_size_shares", description=__doc__
    )
    parser.add_argument("--rows", nargs="+", default=names(), help="prefixes of rows")
    parser.add_argument("--tokens", type=int, default=200, help="that generate adds")
    parser.add_argument("--calls", type=int, default=_CALLS, help="of a model, at least six")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    lines = []
    for name in names():
        if any(name.startswith(prefix) for prefix in options.rows):
            lines.append(_line(name, options.tokens, options.calls))
            print(lines[-1], flush=True)
    rows: Counter[str] = Counter()
    for line in lines:
        rows.update({reason.partition(" (")[0] for reason in line.reasons})
    held = sum(line.holds for line in lines)
    print(f"{held} of {len(lines)} rows are served as they must be; reasons by rows:")
    for reason, count in rows.most_common(15):
        print(f"  {count:3} {reason[:230]}")
    return 0 if held == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
