"""Call small modules of many forms at random sizes: ``python -m tests.random_sizes.forms``.

Each form is called in evaluation and in training with ``dynamic_shapes="auto"`` and compared with
eager PyTorch in float32 and float64. A line says whether results are right, how many calls after
the third TVM served, how many compilations there were, and why other calls were not served.
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
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.random_sizes import attention_forms as attention
from tests.random_sizes import other_forms as others
from tests.random_sizes.compilations import counted
from tests.random_sizes.models import Model
from tests.random_sizes.sequences import difference, step
from tvmbridge import add_tvm_dispatch, dispatch_report

_CALLS, _FIRST = 12, 3
_ROWS, _LENGTHS = (1, 10), (1, 40)


def _rows(b: int, *n: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(b, each, 8) for each in n)


def _mask(b: int, n: int, left: bool = False) -> torch.Tensor:
    mask = (torch.arange(n) < torch.randint(1, n + 1, (b, 1))).long()
    return mask.flip(1) if left else mask


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 30, shape)


def _begins(count: int, total: int) -> torch.Tensor:
    inner = torch.randint(0, total + 1, (count - 1,)).sort()[0]
    return torch.cat([torch.zeros(1, dtype=torch.long), inner])


def _edges(n: int, e: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 8), torch.randint(0, n, (2, e))


def _sometimes_masked(module: nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
    x, mask = given
    return module(x, mask) if x.shape[1] % 2 else module(x)


def _prefilled(module: nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
    """Call with a prompt and an empty cache, and then with three single positions."""
    x, more = given
    cache = (x.new_zeros(x.shape[0], 2, 0, 4), x.new_zeros(x.shape[0], 2, 0, 4))
    found, *cache = module(x, *cache)
    results = [found]
    for each in more.split(1, 1):
        found, *cache = module(each, *cache)
        results.append(found)
    return results


def _in_lists(module: nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
    *sequences, bias = given
    return module(sequences, {"bias": bias})


_BATCH = (_ROWS, _LENGTHS)


def _model(
    build: Any, arguments: Any, ranges: Sequence[tuple[int, int]] = _BATCH, run: Any = None
) -> Model:
    return Model(build, arguments, tuple(ranges), (), run=run)


def _masked_ids(b: int, n: int) -> tuple[torch.Tensor, ...]:
    return _ids(b, n), _mask(b, n)


def _masked_rows(left: bool, b: int, n: int) -> tuple[torch.Tensor, ...]:
    return (*_rows(b, n), _mask(b, n, left))


def _packed(b: int, n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(b, n, 8), torch.randint(1, n + 1, (b,))


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)


FORMS: dict[str, Model] = {
    "mask or none": _model(attention.Masked, partial(_masked_rows, False), run=_sometimes_masked),
    "left padding": _model(attention.LeftPadded, partial(_masked_rows, True)),
    "cross attention": _model(attention.Cross, _rows, (*_BATCH, _LENGTHS)),
    "growing cache": _model(
        attention.Cached, lambda b, n: (torch.randn(b, n, 8), torch.randn(b, 3, 8)), run=_prefilled
    ),
    "cache of any length": _model(
        attention.Cached,
        lambda b, n, m: (*_rows(b, n), torch.randn(b, 2, m, 4), torch.randn(b, 2, m, 4)),
        (*_BATCH, _LENGTHS),
    ),
    "static cache": _model(
        attention.StaticCache,
        lambda b, n: (torch.randn(b, n, 8), torch.randn(b, 64, 8), torch.randperm(64)[:n]),
    ),
    "sliding window": _model(attention.Sliding, _rows),
    "alibi": _model(attention.Alibi, _rows),
    "relative biases": _model(attention.Relative, _rows),
    "rotary": _model(attention.Rotary, _rows),
    "length only": _model(attention.Rotary, lambda n: _rows(3, n), (_LENGTHS,)),
    "batch only": _model(attention.Sliding, lambda b: _rows(b, 7), (_ROWS,)),
    "chunks": _model(attention.Chunked, _rows),
    "cu_seqlens": _model(
        attention.Packed, lambda k, n: (torch.randn(n, 8), _begins(k, n)), ((1, 8), (1, 60))
    ),
    "relative shift": _model(attention.RelativeShift, _rows),
    "linear attention": _model(attention.Linear, _rows),
    "class token": _model(attention.WithClass, _rows),
    "encoder layer": _model(_encoder, _rows),
    "rows": _model(
        others.Rows, lambda b: (torch.randn(b, 8), torch.randint(0, 5, (b,))), ((1, 90),)
    ),
    "empty batch": _model(others.Empty, lambda b: (torch.randn(b, 8),), ((0, 6),)),
    "contrastive": _model(
        others.Contrastive, lambda b: (torch.randn(b, 8), torch.randn(b, 6)), ((1, 60),)
    ),
    "text convolution": _model(others.TextConvolution, _masked_ids),
    "mean pooling": _model(others.MeanPooled, _masked_ids),
    "halves": _model(others.HalvedAndBack, _rows),
    "shifted tokens": _model(others.Shifted, lambda b, n: (_ids(b, n),)),
    "bags": _model(
        others.Bags,
        lambda k, n: (_ids(n), _begins(k, n), torch.rand(n)),
        ((1, 12), (1, 60)),
    ),
    "ragged dlrm": _model(
        others.RaggedDLRM,
        lambda b, n, m: (torch.randn(b, 6), _ids(n), _ids(m), _begins(b, min(n, m))),
        ((1, 12), (1, 60), (1, 60)),
    ),
    "lstm": _model(partial(others.Recurrent, nn.LSTM), _rows),
    "gru": _model(partial(others.Recurrent, nn.GRU), _rows),
    "packed lstm": _model(partial(others.PackedRecurrent, nn.LSTM), _packed),
    "packed gru": _model(partial(others.PackedRecurrent, nn.GRU), _packed),
    "lists": _model(
        others.Lists,
        lambda n, m, k: (*(torch.randn(i, 8) for i in (n, m)), torch.randn(k, 8)),
        (_LENGTHS, _LENGTHS, _ROWS),
        run=_in_lists,
    ),
    "padded lists": _model(
        others.PaddedLists,
        lambda n, m, k: (*(torch.randn(i, 8) for i in (n, m)), torch.randn(k, 8)),
        (_LENGTHS, _LENGTHS, _ROWS),
        run=_in_lists,
    ),
    "gcn": _model(others.GCN, _edges, ((1, 60), (1, 200))),
    "gat": _model(others.GAT, _edges, ((1, 60), (1, 200))),
    "graphs": _model(
        others.GraphPooled,
        lambda n, k: (torch.randn(n, 8), torch.randint(0, k, (n,)), torch.randn(k)),
        ((1, 60), (1, 9)),
    ),
    "two towers": _model(
        others.TwoTowers, lambda b, m: (_ids(b), torch.randint(0, 40, (m,))), ((1, 40), (1, 40))
    ),
    "decay": _model(others.Decay, _rows),
}


def sizes_of(name: str, calls: int = _CALLS) -> list[tuple[int, ...]]:
    """Return random sizes of a form's calls, among them the smallest, 2 and 3."""
    draw, ranges = random.Random(name), FORMS[name].ranges
    found = [tuple(draw.randint(a, b) for a, b in ranges) for _ in range(calls - 4)]
    found += [tuple(min(max(n, a), b) for a, b in ranges) for n in (0, 1, 2, 3)]
    draw.shuffle(found)
    return found


def run(name: str, training: bool, calls: int = _CALLS) -> str:
    """Call a form at ``calls`` sizes; return a line that begins with wrong, few or ok."""
    start = time.process_time()
    with counted() as compilations:
        ours, before, wrong = _called(name, training, calls)
    served, total = (a - b for a, b in zip(_counts(ours), before, strict=True))
    reasons = Counter(dict(dispatch_report(ours).fallbacks)).most_common(3)
    result = "wrong" if wrong else "ok" if served == total else "few"
    parts = [f"{result} {name}, {'training' if training else 'evaluation'}: {served} of {total}"]
    parts += [f"{compilations.done} compilations, {len(compilations.failed)} failed"]
    parts += [f"{time.process_time() - start:.0f} s", wrong]
    parts += [f"{count} x {reason[:250]}" for reason, count in reasons]
    return "; ".join(filter(None, [*parts, *(f[:250] for f in compilations.failed)]))


def _called(name: str, training: bool, calls: int) -> tuple[nn.Module, tuple[int, int], str]:
    """Return the called module, the counts before the calls that count, and what was wrong."""
    model, wrong, before = FORMS[name], "", (0, 0)
    torch.manual_seed(0)
    plain = model.build()
    exact, ours = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    add_tvm_dispatch(ours, dynamic_shapes="auto", on_fallback="silent")
    try:
        for number, sizes in enumerate(sizes_of(name, calls)):
            if number == _FIRST:
                before = _counts(ours)
            torch.manual_seed(number)
            arguments = model.arguments(*sizes)
            found = [step(m, model, arguments, training) for m in (plain, exact, ours)]
            different = difference(found[2], found[0], found[1])
            wrong = wrong or (f"{sizes}: {different}" if different else "")
    except Exception as error:
        wrong = f"{sizes}: {type(error).__name__}: {str(error)[:300]}"
    return ours, before, wrong


def _counts(module: nn.Module) -> tuple[int, int]:
    report = dispatch_report(module)
    return report.tvm_calls, report.tvm_calls + sum(report.fallbacks.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_sizes.forms", description=__doc__)
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--modes", nargs="+", default=["eval", "train"])
    parser.add_argument("--calls", type=int, default=_CALLS)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    lines = []
    for name in options.forms:
        for mode in options.modes:
            lines.append(run(name, mode == "train", options.calls))
            print(lines[-1], flush=True)
    print(Counter(line.partition(" ")[0] for line in lines))
    return int(any(line.startswith("wrong") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
