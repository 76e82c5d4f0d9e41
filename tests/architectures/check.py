"""Run one architecture in one mode in eager PyTorch and through TVM, and compare."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tvmbridge
from tests.architectures.compare import TOLERANCES, difference, leaves
from tests.architectures.table import Architecture, architectures, ids
from tests.device import DEVICE, generators
from tvmbridge.core.errors import BridgeError

MODES = ("eval", "train", "cache")
# A mode that only its name selects: evaluation at several batch sizes, with symbolic sizes.
SIZES = "sizes"
_MORE_ROWS = (0, 3, 1)
# The ways to run compiled code: add_tvm_dispatch, or the backend of torch.compile. The command
# ``python -m tests.export --suite transformers`` exports the same models.
DOORS = ("dispatch", "compile")


@dataclass
class Outcome:
    """The outcome of one architecture in one mode and dtype.

    - ``result``: one of

      - *whole*: TVM served every call, and all values agree.
      - *refused*: tvmbridge refused the model for the reason that the table gives.
      - *wrong*: a value does not agree.
      - *error*: another error, or a refusal for another reason.
      - *crash*, *timeout*: the process crashed or took too long.
      - *breaks*: TVM served every graph, but torch.compile broke the model into several.
      - *eager*: eager PyTorch ran at least one graph.

    - ``reason``: why the result is not *whole*.
    - ``joint``: the source of the joint function, with its reason; empty without gradients.
    - ``native``: counts of the operators that TVM compiled.
    - ``aten``: counts of the operators that compiled code calls PyTorch's kernels for.
    - ``seconds``: the time that compilation took.
    - ``recalled``: for each specialization, whether it came from disk without capture, or why not.
    """

    name: str
    mode: str
    dtype: str
    result: str
    reason: str = ""
    joint: str = ""
    native: Mapping[str, int] = field(default_factory=dict)
    aten: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    recalled: Sequence[str] = ()


Step = Callable[[nn.Module], Any]


def check(name: str, mode: str, dtype: str, door: str = "dispatch") -> Outcome:
    """Run ``name`` both ways and compare results, gradients, buffers and generators."""
    prepare = {"dispatch": _dispatch, "compile": _compile}[door]
    if mode == SIZES:
        prepare = partial(_dispatch, dynamic_shapes="auto")
    architecture = architectures()[name]
    step = {"eval": _evaluate, "train": _train, "cache": _generate, SIZES: _resized}[mode]
    outcome = Outcome(name, mode, dtype, "whole")
    try:
        with _watching() as watch:
            expected = step(architecture, _model(architecture, mode, dtype), _nothing)
        model = _model(architecture, mode, dtype)
        found = step(architecture, model, prepare)
    except BridgeError as error:
        reason = architecture.outcomes().get("refused")
        known = reason is not None and reason in str(error)
        outcome.result = "refused" if known else "error"
        outcome.reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return outcome
    _report(model, outcome) if door == "dispatch" else _report_graphs(outcome)
    if mode == SIZES and outcome.result == "error":
        outcome.result = "eager"
    tolerance = TOLERANCES[torch.float32 if watch.rounds else getattr(torch, dtype)]
    for what in expected if outcome.result in ("whole", "breaks", "eager") else ():
        departure = difference(found[what], expected[what], tolerance)
        if departure:
            outcome.result, outcome.reason = "wrong", f"{what}{departure}"
            break
    return outcome


def _report(model: nn.Module, outcome: Outcome) -> None:
    report = tvmbridge.dispatch_report(model)
    if report.fallbacks:
        outcome.result, outcome.reason = "error", f"fell back: {report.fallbacks}"
    last = report.specializations[-1]
    outcome.native, outcome.aten = last.native_operators, last.aten_operators
    outcome.seconds = sum(sum(s.seconds.values()) for s in report.specializations)
    outcome.recalled = [s.recalled for s in report.specializations]
    outcome.joint = f"{last.joint}: {last.joint_reason}" if last.joint else ""


def _report_graphs(outcome: Outcome) -> None:
    report = tvmbridge.compile_report()
    # A graph without operators has nothing to compile, so it does not count as eager.
    left = [reason for graph in report.graphs if graph.operators for reason in graph.eager_calls]
    if left or not report.graphs:
        outcome.result, outcome.reason = "eager", "; ".join(dict.fromkeys(left)) or "no graph"
    elif report.breaks:
        outcome.result = "breaks"
        outcome.reason = "; ".join(f"{count} x {why}" for why, count in report.breaks.items())
    for graph in report.graphs:
        for dispatch in graph.dispatches:
            outcome.seconds += sum(sum(s.seconds.values()) for s in dispatch.specializations)


def _model(architecture: Architecture, mode: str, dtype: str) -> nn.Module:
    model = architecture.build().to(DEVICE, getattr(torch, dtype))
    return model.train(mode == "train")


def _sample(architecture: Architecture, model: nn.Module) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    floating = torch.float32

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(DEVICE, dtype if leaf.dtype is floating else leaf.dtype)

    return {name: pytree.tree_map(cast, value) for name, value in architecture.sample().items()}


Prepare = Callable[[nn.Module, Mapping[str, Any]], None]


def _nothing(model: nn.Module, sample: Mapping[str, Any]) -> None:
    """Do nothing: the preparation of a model that runs in eager PyTorch."""


def _dispatch(
    model: nn.Module, sample: Mapping[str, Any], dynamic_shapes: str | None = None
) -> None:
    tvmbridge.add_tvm_dispatch(
        model, (), sample_kwargs=sample, dynamic_shapes=dynamic_shapes, on_fallback="silent"
    )


def _compile(model: nn.Module, sample: Mapping[str, Any]) -> None:
    from tvmbridge.dynamo import tvmbridge as backend

    if model._compiled_call_impl is None:
        torch.compiler.reset()
        model.compile(backend=backend, options={"smallest_graph": 1})


def _evaluate(architecture: Architecture, model: nn.Module, prepare: Prepare) -> dict[str, Any]:
    sample = _sample(architecture, model)
    with torch.no_grad():
        prepare(model, sample)
        _seed()
        outputs = model(**sample)
    return {"outputs": outputs, "state": _state(model)}


def _train(architecture: Architecture, model: nn.Module, prepare: Prepare) -> dict[str, Any]:
    sample = _sample(architecture, model)
    prepare(model, sample)
    _seed()
    outputs = model(**sample)
    state = _state(model)
    wanted = [t for t in tensors(outputs) if t.requires_grad]
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in wanted]
    cotangents = [t.to(DEVICE) for t in cotangents]
    torch.autograd.backward(wanted, cotangents)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"outputs": outputs, "gradients": gradients, "state": state}


def _resized(architecture: Architecture, model: nn.Module, prepare: Prepare) -> dict[str, Any]:
    """Run the sample, then the sample with three more rows, and with one more."""
    sample = _sample(architecture, model)
    outputs = []
    with torch.no_grad():
        prepare(model, sample)
        for more in _MORE_ROWS:
            _seed()
            outputs.append(model(**with_rows(sample, batch_size(sample) + more)))
    return {"outputs": outputs, "state": _state(model)}


def with_rows(sample: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the sample with ``rows`` rows in each tensor that has its batch size.

    Rows beyond those of the sample repeat the first ones.
    """
    batch = batch_size(sample)

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != batch:
            return leaf
        return leaf[[number % batch for number in range(rows)]]

    return {name: pytree.tree_map(resized, value) for name, value in sample.items()}


def batch_size(sample: Mapping[str, Any]) -> int:
    """Return the first size of the first tensor of a sample that has dimensions."""
    leaves = pytree.tree_leaves(dict(sample))
    return next(t.shape[0] for t in leaves if isinstance(t, torch.Tensor) and t.dim())


def _generate(architecture: Architecture, model: nn.Module, prepare: Prepare) -> dict[str, Any]:
    """Run two steps: a prompt, then one more token with the cache that the prompt returned."""
    with torch.no_grad():
        _seed()
        prompt = {"input_ids": ids(6).to(DEVICE), "use_cache": True}
        token = ids(1).to(DEVICE)
        prepare(model, prompt)
        first = model(**prompt)
        kept = copy.deepcopy(first)
        cache = first.past_key_values
        following = {"input_ids": token, "past_key_values": cache, "use_cache": True}
        prepare(model, following)
        second = model(**following)
    same = second.past_key_values is cache
    return {"prompt": kept, "outputs": second, "cache": cache, "same": same}


def tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, each once."""
    found = [leaf for _, leaf in leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return list({id(t): t for t in found}.values())


def _seed() -> None:
    torch.manual_seed(2)
    if DEVICE != "cpu":
        torch.backends.cudnn.allow_tf32 = False
    numpy.random.seed(2)
    random.seed(2)


def _state(model: nn.Module) -> dict[str, Any]:
    """Return copies of a model's buffers, and the states of all random generators."""
    return {
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "torch": generators(),
        "numpy": numpy.random.get_state()[1].tolist(),  # type: ignore[union-attr,call-overload]
        "random": random.getstate()[1],
    }


class _Watch(TorchDispatchMode):
    """A mode that sets ``rounds`` if an operator returns a floating dtype other than float64."""

    rounds = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim():
                self.rounds |= leaf.dtype is not torch.float64
        return result


@contextmanager
def _watching() -> Iterator[_Watch]:
    watch = _Watch()
    with watch:
        yield watch
