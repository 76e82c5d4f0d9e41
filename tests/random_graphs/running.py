"""Run one call of a drawn module, and record its results, its effects and its gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from tests.device import generators
from tests.random_graphs.outcome import text_of
from tests.random_graphs.program import NAMES, Call, Program
from tests.random_graphs.tensors import detached, order, sharing, tensors_in

SEED = 2
Found = dict[str, Any]


_OF_EAGER_ALONE = (
    "modified by an inplace operation",
    "its base or another view of its base has been modified inplace",
    "Inplace update to inference tensor",
    "not implemented for",
    "mixed dtype",
    "Found dtype",
)


class Raised(Exception):
    """An error that the module raised; ``found`` has the values recorded before it."""

    def __init__(self, error: Exception, found: Found) -> None:
        super().__init__(text_of(error))
        self.error, self.found = error, found

    @property
    def is_of_eager_alone(self) -> bool:
        """Whether the error is one that eager PyTorch raises, but compiled code need not.

        Autograd raises if a tensor that backward needs, or a view, was written in place. Compiled
        code may need other tensors in backward, and return a tensor that is no view. PyTorch's
        kernels also reject some dtypes, or mixtures of dtypes.
        """
        return any(words in str(self.error) for words in _OF_EAGER_ALONE)


def can_be_made(module: nn.Module, program: Program, call: Call) -> bool:
    """Whether the expressions of a call's arguments can be evaluated."""
    try:
        call.given(leaves_of(module, program, call.seed))
    except Exception:
        return False
    return True


def executed(text: str, module: nn.Module, **names: Any) -> tuple[nn.Module, Exception | None]:
    """Run a statement; return the module, which it may have replaced, and the error or None."""
    torch.manual_seed(SEED)
    scope = {**NAMES, **names, "module": module}
    try:
        exec(text, scope)
    except Exception as error:
        return module, error
    return scope["module"], None


def mode_of(call: Call) -> AbstractContextManager[object]:
    """Return the context manager of a call's autograd mode."""
    if call.gradients == "inference":
        return torch.inference_mode()
    return torch.set_grad_enabled(call.gradients == "grad")


def leaves_of(module: nn.Module, program: Program, seed: int) -> dict[str, Any]:
    """Return the names and values that the expressions of a call's arguments use."""
    return {**program.tensors(seed), "self": module}


def state_of(module: nn.Module) -> Found:
    """Return copies of a module's parameters and buffers, and its current flags."""
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    needs = [p.requires_grad for p in module.parameters()]
    flags = {name: m.training for name, m in module.named_modules()}
    return {"parameters": parameters, "buffers": buffers, "needs": needs, "flags": flags}


def run(module: nn.Module, program: Program, call: Call) -> Found:
    """Make a call with its backward; return results, gradients, and all state that may change.

    Raises:
        Raised: forward or backward raised an error.
    """
    leaves = leaves_of(module, program, call.seed)
    given = call.given(leaves)
    # Forward may append to a list argument; only tensors passed in are checked for writes.
    passed = tensors_in(given)
    found: Found = {}
    torch.manual_seed(SEED)
    try:
        with mode_of(call):
            results = [module(*given) for _ in range(1 + call.twice)]
        # Autograd may raise when the results are read.
        found.update(_told(results, given, module))
    except Exception as error:
        raise Raised(error, {**_afterwards(module, given, passed), "stage": "forward"}) from error
    found.update(_afterwards(module, given, passed))
    if call.after:
        found["after"] = _between(results, given, passed, module, call)
    # Inference tensors cannot take part in autograd.
    if call.gradients == "grad":
        wanted = _wanted(results, call)
        try:
            _backward(wanted)
        except Exception as error:
            raise Raised(error, {**found, "stage": "backward"}) from error
        found["gradients"] = _gradients(module, leaves, given)
        found["generators after backward"] = generators()
    return {**found, "stage": "end"}


def _told(results: Any, given: list[Any], module: nn.Module) -> Found:
    tensors = tensors_in(results)
    others = [*tensors_in(given), *module.parameters(), *module.buffers()]
    return {
        "results": detached(results),
        "needs": [(t.requires_grad, t.is_leaf, t.is_inference()) for t in tensors],
        "strides": [order(t) for t in tensors],
        "sharing": sharing(tensors, others),
    }


def _afterwards(module: nn.Module, given: list[Any], passed: list[torch.Tensor]) -> Found:
    arguments = tensors_in(given)
    return {
        "arguments": detached(given),
        "lying": [order(t) for t in arguments],
        "written": [not t.is_inference() and t._version > 0 for t in passed],
        "state": state_of(module),
        "attributes": {k: v for k, v in vars(module).items() if k[0] in "ak" and len(k) == 2},
        "generators": generators(),
    }


def _between(
    results: Any, given: list[Any], passed: list[torch.Tensor], module: nn.Module, call: Call
) -> Found:
    """Run the statements between forward and backward; return errors, results and state."""
    names = {"made": tensors_in(results), "given": tensors_in(given)}
    errors = [executed(text, module, **names)[1] for text in call.after]
    raised = [None if error is None else type(error).__name__ for error in errors]
    return {"raised": raised, "results": detached(results), **_afterwards(module, given, passed)}


def _wanted(results: Any, call: Call) -> list[torch.Tensor]:
    tensors = tensors_in(results)
    chosen = [t for n, t in enumerate(tensors) if call.used is None or n in call.used]
    return list({id(t): t for t in chosen if t.requires_grad}.values())


def _backward(wanted: list[torch.Tensor]) -> None:
    if not wanted:
        return
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in wanted]
    torch.autograd.backward(wanted, cotangents)


def _gradients(module: nn.Module, leaves: dict[str, Any], given: list[Any]) -> Found:
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    of_arguments = [t.grad for t in tensors_in(given) if t.is_leaf]
    of_parameters = {name: p.grad for name, p in module.named_parameters()}
    kept = {
        "leaves": {name: leaf.grad for name, leaf in tensors.items()},
        "arguments": of_arguments,
        "parameters": of_parameters,
    }
    return {name: detached(value) for name, value in kept.items()}
