"""One call of a drawn module: what it gives, what it changes, what its backward gives."""

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
    """What the module raised, of which ``found`` is known nevertheless."""

    def __init__(self, error: Exception, found: Found) -> None:
        super().__init__(text_of(error))
        self.error, self.found = error, found

    @property
    def is_of_eager_alone(self) -> bool:
        """Whether eager PyTorch forbids what compiled code may do.

        Who writes between forward and backward, or into a view, may be told by autograd, but
        compiled code may read something else in backward, and what it returns may be no view. And
        PyTorch's kernels have dtypes that they do not mix, or lack.
        """
        return any(words in str(self.error) for words in _OF_EAGER_ALONE)


def can_be_made(module: nn.Module, program: Program, call: Call) -> bool:
    """Whether the arguments of a call can be made."""
    try:
        call.given(leaves_of(module, program, call.seed))
    except Exception:
        return False
    return True


def executed(text: str, module: nn.Module, **names: Any) -> tuple[nn.Module, Exception | None]:
    """Run a statement; the module, which may be another one then, and what was raised."""
    torch.manual_seed(SEED)
    scope = {**NAMES, **names, "module": module}
    try:
        exec(text, scope)
    except Exception as error:
        return module, error
    return scope["module"], None


def mode_of(call: Call) -> AbstractContextManager[object]:
    """The mode of gradients that a call is made in."""
    if call.gradients == "inference":
        return torch.inference_mode()
    return torch.set_grad_enabled(call.gradients == "grad")


def leaves_of(module: nn.Module, program: Program, seed: int) -> dict[str, Any]:
    """The names that the arguments of a call are made of."""
    return {**program.tensors(seed), "self": module}


def state_of(module: nn.Module) -> Found:
    """Parameters, buffers and flags of a module as they are now."""
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    needs = [p.requires_grad for p in module.parameters()]
    flags = {name: m.training for name, m in module.named_modules()}
    return {"parameters": parameters, "buffers": buffers, "needs": needs, "flags": flags}


def run(module: nn.Module, program: Program, call: Call) -> Found:
    """What a call and its backward give and change.

    Raises:
        Raised: the module raised, or backward did.
    """
    leaves = leaves_of(module, program, call.seed)
    given = call.given(leaves)
    # What forward appends to a list has a count of writes of its own.
    passed = tensors_in(given)
    found: Found = {}
    torch.manual_seed(SEED)
    try:
        with mode_of(call):
            results = [module(*given) for _ in range(1 + call.twice)]
        # Autograd may forbid to look at them.
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
    """What statements between forward and backward raise, and what the results are then."""
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
