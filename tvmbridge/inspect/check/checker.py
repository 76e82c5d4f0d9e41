"""The checker: serve calls as the dispatcher does, and check the calls that the policy selects.

A checked call runs twice: by the module's own forward on copies, and by the compiled code. Outputs,
state, arguments and the random generator are compared after forward. Gradients are compared when
backward runs, for the cotangents that arrive. All effects of the call are those of the compiled
code.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.arguments import Arguments
from tvmbridge.calls.surroundings import in_checkpoint
from tvmbridge.core.checks import CheckPolicy
from tvmbridge.core.errors import NumericsError
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import OutputKind
from tvmbridge.graph_capture.observe.refusal import first_paragraph
from tvmbridge.inspect.check.judge import Judge
from tvmbridge.inspect.check.twin import Twin, generator_states, observed_call
from tvmbridge.inspect.compare.stages import title
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.gradient_parts import whole_backward

logger = logging.getLogger(__name__)


class Checker:
    """Checks calls of one dispatched module.

    ``unchecked`` counts, by reason, the calls that were due but could not be checked.
    """

    def __init__(self, policy: CheckPolicy, options: CompileOptions) -> None:
        self.policy = policy
        self.options = options
        self.unchecked: Counter[str] = Counter()
        # The parts (forward, backward) whose doubtful values were compared in float64 already.
        self._settled: weakref.WeakKeyDictionary[CompiledEntry, set[str]] = (
            weakref.WeakKeyDictionary()
        )

    def renewed(self) -> Checker:
        """Return a new checker with the same policy and options, for a copy of the module."""
        return Checker(self.policy, self.options)

    def run(
        self,
        module: nn.Module,
        entry: CompiledEntry,
        leaves: Sequence[Any],
        tensors: Sequence[Any],
        arguments: Arguments,
    ) -> Any:
        """Serve a call, and check it if it is due.

        Raises:
            NumericsError: the compiled code departs from the module's own forward.
        """
        if not self.policy.due(entry.calls + 1):
            return entry.run(leaves, tensors, arguments)
        if entry.compiled.captured.epilogue is not None:
            self.unchecked["a part of forward runs eagerly after the compiled code"] += 1
            return entry.run(leaves, tensors, arguments)
        if entry.compiled.captured.convention.left:
            self.unchecked["forward leaves values in attributes of the module"] += 1
            return entry.run(leaves, tensors, arguments)
        if in_checkpoint():  # a checkpoint would count the check's saved tensors as the call's
            self.unchecked["a checkpoint watches what the call saves"] += 1
            return entry.run(leaves, tensors, arguments)
        try:
            captured = entry.compiled.captured
            bases = captured.convention.bases if entry.compiled.split is not None else ()
            twin = Twin(module, arguments, captured.device, bases)
        except Exception as error:
            reason = f"the module cannot be copied: {first_paragraph(error)}"
            if not self.unchecked[reason]:
                logger.warning("a call of %s is not checked: %s", type(module).__name__, reason)
            self.unchecked[reason] += 1
            return entry.run(leaves, tensors, arguments)
        return _Check(self, module, entry, twin).run(leaves, tensors, arguments)

    def judged(self, judge: Judge, entry: CompiledEntry, part: str) -> tuple[str, str] | None:
        """Decide by float64 whether a doubtful value is a mistake; return its name and figures.

        Return None if there is no mistake. For each entry, forward and backward are decided once.
        """
        settled = self._settled.setdefault(entry, set())
        if not judge.doubtful or part in settled:
            return None
        settled.add(part)
        return judge.settle()


class _Check:
    """The check of one call."""

    def __init__(
        self, checker: Checker, module: nn.Module, entry: CompiledEntry, twin: Twin
    ) -> None:
        self._checker = checker
        self._module = module
        self._entry = entry
        self._twin = twin
        self._call = entry.calls + 1
        captured = entry.compiled.captured
        primals = captured.primals
        self._titles = [title(d) for d in primals]
        # A tied parameter is several primals, whose gradients are summed; backward returns the
        # gradients of the primals that it reaches.
        self._differentiated: dict[str, list[int]] = {}
        parts = entry.compiled.split
        place = {} if parts is None else {name: i for i, name in enumerate(parts.wanted)}
        for primal, name in zip(primals, self._titles, strict=True):
            if primal.requires_grad:
                tied = captured.assumptions.aliases.get(name, name)
                places = self._differentiated.setdefault(tied, [])
                if primal.name in place:
                    places.append(place[primal.name])

    def run(self, leaves: Sequence[Any], tensors: Sequence[Any], arguments: Arguments) -> Any:
        results: list[Sequence[torch.Tensor]] = []

        def compiled(*args: Any, **kwargs: Any) -> Any:
            with whole_backward():
                results.append(self._entry.results(leaves, tensors))
            return self._entry.outputs.assemble(results[0], leaves, tensors, (args, kwargs))

        outcome = observed_call(compiled, self._module, arguments, leaves)
        twin = self._twin
        if twin.error is not None:
            raise NumericsError(
                f"{self._where()} returned, where the module's own forward raises "
                f"{type(twin.error).__name__}: {first_paragraph(twin.error)}"
            ) from twin.error
        judge = self._judge(backward=self._entry.compiled.split is not None)
        self._compare_forward(judge, outcome.leaves, outcome.state)
        if outcome.structure != twin.outcome.structure:
            raise NumericsError(
                f"{self._where()}: the structure of the outputs is {outcome.structure}, in "
                f"PyTorch {twin.outcome.structure}"
            )
        after = generator_states(self._entry.compiled.captured.device)
        for (_, ours), (_, theirs) in zip(after, twin.states_after, strict=True):
            if not torch.equal(ours, theirs):
                raise NumericsError(
                    f"{self._where()}: generator after the call is in another state than after "
                    "the module's own forward; other random numbers were drawn"
                )
        self._entry.checked += 1
        self._await_backward(results[0])
        return outcome.returned

    def _judge(self, backward: bool, cotangents: Mapping[str, torch.Tensor] | None = None) -> Judge:
        sample = replace(self._twin.sample, cotangents=dict(cotangents or {}))
        return Judge(sample, self._twin.states, backward, self._checker.options)

    def _compare_forward(
        self, judge: Judge, outputs: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        expected = {**self._twin.outcome.leaves, **self._twin.outcome.state}
        self._compare(judge, {**outputs, **state}, expected, "forward")

    def _compare(
        self, judge: Judge, actual: Mapping[str, Any], expected: Mapping[str, Any], part: str
    ) -> None:
        """Raise an error for the first value that departs from the eager reference."""
        for name in [*expected, *(n for n in actual if n not in expected)]:
            fault = judge.fault(name, actual.get(name), expected.get(name))
            if fault is not None:
                self._raise(judge, name, fault)
        found = self._checker.judged(judge, self._entry, part)
        if found is not None:
            self._raise(judge, *found)

    def _raise(self, judge: Judge, name: str, fault: str) -> None:
        raise NumericsError(f"{self._where()}: {name} {fault}; {judge.operator(name)}")

    def _where(self) -> str:
        captured = self._entry.compiled.captured
        mode = "train" if captured.assumptions.training else "eval"
        return f"call {self._call} of {type(self._module).__name__} ({mode}) by compiled code"

    # Backward ------------------------------------------------------------------------------------

    def _await_backward(self, results: Sequence[torch.Tensor]) -> None:
        for node in {r.grad_fn for r in results if r.grad_fn is not None}:
            node.register_hook(self._compare_backward)
            if (step := getattr(node, "step", None)) is not None:
                step.halves = None  # all gradients are compared

    def _compare_backward(
        self, gradients: Sequence[torch.Tensor | None], cotangents: Sequence[torch.Tensor | None]
    ) -> None:
        outputs = self._output_names()
        arrived = {
            name: c.detach().clone()
            for name, c in zip(outputs, cotangents, strict=True)
            if c is not None and name is not None
        }
        names = list(self._differentiated)
        judge = self._judge(True, self._all_cotangents(arrived))
        expected = self._twin.gradients(arrived, names)
        given = [_sum([gradients[i] for i in numbers]) for numbers in self._differentiated.values()]
        labels = [f"gradient of {name}" for name in names]
        self._compare(
            judge,
            dict(zip(labels, given, strict=True)),
            dict(zip(labels, expected, strict=True)),
            "backward",
        )
        self._entry.checked_gradients += 1

    def _output_names(self) -> list[str | None]:
        """Return the names of the computed outputs in order; None for state and checks."""
        names = iter(self._twin.outcome.differentiable)
        found: list[str | None] = []
        for output in self._entry.compiled.captured.outputs:
            name = next(names, None) if output.kind is OutputKind.USER else None
            if output.is_computed:
                found.append(name)
        return found

    def _all_cotangents(self, arrived: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a cotangent for every output, zeros for an output that none arrived for."""
        leaves = self._twin.outcome.differentiable.items()
        tensors = {name: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
        return {n: arrived.get(n, torch.zeros_like(t.detach())) for n, t in tensors.items()}


def _sum(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [g.detach() for g in gradients if g is not None]
    return sum(present[1:], present[0]) if present else None
