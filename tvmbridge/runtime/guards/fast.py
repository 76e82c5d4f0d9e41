"""The fast guard of a compiled entry: one generated function that checks that nothing has changed.

It is generated after a call that the full guards (``state.py``, ``layout.py``, ...) have accepted.
It compares everything that the full guards look at with its state at that call: dictionaries and
tensors of the module by a :class:`~.watch.Watch`, arguments with their strides, and PyTorch's
modes by PyTorch's ``GlobalStateGuard``. If it accepts a call, the full guards would as well. If it
does not, the full guards decide, and name the reason. The generated function has only the checks
that the entry needs.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad

from tvmbridge.backends import BACKENDS
from tvmbridge.core.assumptions import Question
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.contents import MISSING, same_value
from tvmbridge.core.generated import Scope
from tvmbridge.core.torch_private import (
    GlobalStateGuard,
    dispatch_mode_count,
    function_mode_count,
    innermost_transform,
    saved_tensors_hooks_in_force,
    tracing_state,
)
from tvmbridge.core.types import InputKind, OutputKind
from tvmbridge.graph_capture.observe.watching import Codes
from tvmbridge.runtime.guards.signature import Signature, has_plain_names
from tvmbridge.runtime.guards.spelling import Default, Source
from tvmbridge.runtime.guards.state import ModuleState
from tvmbridge.runtime.guards.watch import (
    Code,
    MovingTensors,
    Place,
    alike,
    behind,
    dict_of_class,
    versions_of,
    watch,
)

logger = logging.getLogger(__name__)

# Properties that forward reads and that the comparisons here do not fix.
_ASKED_EACH_TIME = {
    Question.CLASS,
    Question.IDENTITY,
    Question.INFERENCE,
    Question.OFFSET,
    Question.STARTED,
}
# Types whose equal values are interchangeable to forward.
_EQUAL = (int, str, bytes)
_DISPATCHED = "num_dispatch_modes()"
_MODES = (
    "is_compiling() or is_tracing() or num_function_modes()",
    "transforms() is not None or forward_ad._current_level >= 0 or not same_state()",
)

Check: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], Sequence[Any] | None]


class FastGuard:
    """The generated guard of one entry.

    - ``check(args, kwargs)``: returns the leaves of a call that the entry may serve; or None.
    - ``check_under_dynamo``: the same without comparing PyTorch's modes, which TorchDynamo has
      done for its calls.
    - ``source``: the text of ``check``.

    Args:
        state: the state of the module; the full guards must just have accepted a call.
        leaves: the leaves of that call's arguments.
        written: the tensors that the call writes.
        frozen: tensors that must not have been written, each with its expected version.
        moving: whether ``tensors`` may be at other addresses.
    """

    def __init__(
        self,
        state: ModuleState,
        signature: Signature,
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        records_writes: bool,
        frozen: Sequence[tuple[torch.Tensor, int]] = (),
        *,
        moving: bool = False,
    ) -> None:
        self._lines: list[str] = []
        self._scope = Scope(
            {
                "flatten": signature.leaves_of,
                "forward_ad": forward_ad,
                "is_compiling": torch.compiler.is_compiling,
                "is_tracing": tracing_state,
                "num_dispatch_modes": dispatch_mode_count,
                "num_function_modes": function_mode_count,
                "same_state": GlobalStateGuard().check,
                "transforms": innermost_transform,
            }
        )
        constants = state.constants
        self._emit_arguments(signature)
        self._emit_constants(signature.constants)
        self._emit_numbers(signature)
        self._emit_tensors(signature, leaves)
        modes = [f"if {condition}: return None" for condition in _MODES]
        self._lines += modes
        self._emit_inference()
        self._emit_surroundings(signature, records_writes)
        self._emit_module(state, [*(() if moving else tensors), *constants], signature)
        if moving:
            self._refuse_if(f"not {self._name('moving', MovingTensors(tensors).fit)}()")
        self._emit_versions("frozen", [t for t, _ in frozen], tuple(v for _, v in frozen))
        self._emit_memory(signature, written)
        if state.branches.outcomes:
            self._refuse_if(f"not {self._name('branches', state.branches.hold)}(leaves)")
        self.source = _function(self._lines)
        self.check: Check = _compiled(self.source, self._scope)
        rest = _function([line for line in self._lines if line not in modes])
        self.check_under_dynamo: Check = _compiled(rest, self._scope)

    def _emit(self, line: str) -> None:
        self._lines.append(line)

    def _refuse_if(self, condition: str) -> None:
        self._emit(f"if {condition}: return None")

    def _name(self, kind: str, value: Any) -> str:
        return self._scope.bind(kind, value)

    def _emit_arguments(self, signature: Signature) -> None:
        """Generate code that computes the leaves; without a call if all arguments are leaves."""
        if not signature.flat or signature.ordered:
            self._emit("leaves = flatten(args, kwargs)")
            self._refuse_if("leaves is None")
            return
        if signature.sees_names:
            self._refuse_if(f"not {self._name('plain', has_plain_names)}(kwargs)")
        sample = signature.num_args, signature.keywords
        places = [*range(signature.num_args), *signature.keywords]
        otherwise = signature.spellings()
        if not otherwise:
            self._refuse_if(f"not ({self._spelled(*sample)})")
            self._emit(f"leaves = {self._leaves(signature.num_args, places)}")
            return
        leaves = self._leaves(signature.num_args, places)
        self._emit(f"if {self._spelled(*sample)}: leaves = {leaves}")
        for count, keywords, spelling in otherwise:
            conditions = [self._spelled(count, keywords)]
            for place, _, default in spelling.extras:
                conditions.append(f"not ({self._differs(self._argument(place), default)})")
            leaves = self._leaves(count, [*spelling.positional, *spelling.keywords.values()])
            self._emit(f"elif {' and '.join(conditions)}: leaves = {leaves}")
        self._emit("else: return None")

    def _leaves(self, count: int, sources: Sequence[Source]) -> str:
        if sources == list(range(count)):
            return "args"
        each = (
            self._name("default", s.value) if isinstance(s, Default) else self._argument(s)
            for s in sources
        )
        return f"[{', '.join(each)}]"

    def _argument(self, place: int | str) -> str:
        if isinstance(place, int):
            return f"args[{place}]"
        return f"kwargs[{self._scope.literal(place, 'keyword')}]"

    def _spelled(self, count: int, keywords: Sequence[str]) -> str:
        """Return the condition that a call has ``count`` positional arguments and ``keywords``."""
        condition = f"len(args) == {count} and "
        if not keywords:
            return f"{condition}not kwargs"
        given = [f"{self._scope.literal(name, 'keyword')} in kwargs" for name in keywords]
        return f"{condition}len(kwargs) == {len(keywords)} and {' and '.join(given)}"

    def _emit_constants(self, constants: Sequence[tuple[int, Any]]) -> None:
        for i, value in constants:
            self._refuse_if(self._differs(f"leaves[{i}]", value))

    def _emit_numbers(self, signature: Signature) -> None:
        """Generate code that replaces Python numbers by the tensors that the code reads."""
        if signature.numbers:
            self._emit(f"leaves = {self._name('inputs', signature.with_numbers)}(leaves)")
            self._refuse_if("leaves is None")

    def _differs(self, leaf: str, value: Any) -> str:
        """Return the condition that ``leaf`` is another constant than ``value``."""
        if value is None or isinstance(value, bool):
            return f"{leaf} is not {value!r}"
        if type(value) in _EQUAL:
            literal = self._scope.literal(value)
            return f"type({leaf}) is not {type(value).__name__} or {leaf} != {literal}"
        return f"not {self._name('same', same_value)}({leaf}, {self._name('constant', value)})"

    def _emit_tensors(self, signature: Signature, leaves: Sequence[Any]) -> None:
        """Generate the comparison of the arguments' tensors.

        It compares classes, dispatch keys, dtypes, devices, shapes, strides and requires_grad.
        """
        positions = [i for i, *_ in signature.tensors]
        if positions:
            check = self._name("alike", alike([leaves[i] for i in positions]))
            given = ", ".join(f"leaves[{i}]" for i in positions)
            self._refuse_if(f"not {check}({given})")

    def _emit_inference(self) -> None:
        """Generate the comparison of inference mode, which the state of PyTorch does not have.

        Where gradients are off, the mode makes no difference.
        """
        if torch.is_grad_enabled():
            self._scope.set("inferring", torch.is_inference_mode_enabled)
            self._refuse_if(f"inferring() is not {torch.is_inference_mode_enabled()}")

    def _emit_surroundings(self, signature: Signature, records_writes: bool) -> None:
        self._refuse_if(_DISPATCHED)
        for device in sorted({device.type for *_, device in signature.tensors}):
            for read in BACKENDS[device].settings:
                known, now = self._name("setting", read()), self._name("read", read)
                self._refuse_if(f"{now}() != {known}")
        if records_writes:  # a checkpoint would repeat the writes, and uses saved-tensor hooks
            self._scope.set("saved_hooks", saved_tensors_hooks_in_force)
            self._refuse_if("saved_hooks(True) is not None")

    def _emit_module(
        self, state: ModuleState, tensors: Sequence[torch.Tensor], signature: Signature
    ) -> None:
        """Generate the comparison of the module and of the values that forward reads elsewhere."""
        constants = tuple(state.constants)
        self._emit_versions("constants", constants, versions_of(constants) if constants else ())
        dicts = {id(d): d for d in state.watched_dicts()}
        beyond = state.values.beyond(dicts.keys())
        dicts.update((id(d), d) for d in beyond.dicts)
        places = [place for class_, _ in state.classes for place in _forward_of(class_)]
        places += [*state.watched_places(), *beyond.places]
        functions: list[Code] = []
        own = signature.parameters
        if own is not None:
            functions.append((own.function, own.code, own.defaults))
            for held in own.keyword_defaults():
                dicts[id(held)] = held
                defaults = f"{self._name('own', own.function)}.__kwdefaults__"
                self._refuse_if(f"{defaults} is not {self._name('held', held)}")
        for held, name, kind in state.added_to():
            found = f"{self._name('added_to', held)}.get({self._scope.literal(name, 'key')})"
            self._refuse_if(f"type({found}) is not {kind.__name__}")
        missing = self._name("missing", MISSING) if beyond.slots else ""
        for holder, name, value in beyond.slots:
            if isinstance(holder, Codes):
                functions += holder.before
            elif isinstance(holder, dict | types.MappingProxyType):
                behind_it = holder if isinstance(holder, dict) else behind(holder)
                places.append((behind_it, name, value))
            else:
                key = self._scope.literal(name, "key")
                found = f"{self._name('get', holder.get)}({key}, {missing})"
                self._refuse_if(f"{found} is not {self._name('value', value)}")
        # Forward may name a value many times, but each call compares it once.
        once = {(id(held), key): (held, key, value) for held, key, value in places}
        called = {id(function[0]): function for function in functions}
        everything = list(once.values()), list(called.values()), beyond.asked
        objects = [*state.members, *beyond.objects]
        made = watch(list(dicts.values()), objects, tensors, *everything)
        self._refuse_if(f"not {self._name('unchanged', made.unchanged)}()")
        for container in beyond.containers:
            self._refuse_if(f"{self._name('changed', container.changed)}()")

    def _emit_versions(
        self, kind: str, tensors: Sequence[torch.Tensor], versions: Sequence[int]
    ) -> None:
        """Generate the comparison of the versions of tensors that must not have been written."""
        if tensors:
            written, held = self._name("versions", versions_of), self._name(kind, tuple(tensors))
            self._refuse_if(f"{written}({held}) != {self._name('known', tuple(versions))}")

    def _emit_memory(self, signature: Signature, written: Sequence[torch.Tensor]) -> None:
        """Generate the check that no argument shares memory with a tensor that the call writes."""
        # All tensors without elements have the address 0.
        memory = {t.untyped_storage().data_ptr() for t in written if t.numel()}
        if not memory:
            return
        name = self._name("written", memory)
        for i, *_ in signature.tensors:
            self._refuse_if(f"leaves[{i}].untyped_storage().data_ptr() in {name}")


def _function(lines: Sequence[str]) -> str:
    body = "".join(f"    {line}\n" for line in (*lines, "return leaves"))
    return f"def guard(args, kwargs):\n{body}"


def _forward_of(class_: type) -> Iterator[Place]:
    """Yield the entry of a class that has forward, and the empty ones of classes before it.

    The classes are in method resolution order, so a forward in any of these would be called.
    """
    for each in class_.__mro__:
        forward = each.__dict__.get("forward", MISSING)
        yield dict_of_class(each), "forward", forward
        if forward is not MISSING:
            return


def may_be_fast(state: ModuleState, captured: CapturedGraph) -> bool:
    """Whether the fast guard covers everything in the graph; rare features need the full guards."""
    specs = [*(d.spec for d in captured.inputs), *(d.spec for d in captured.noise)]
    if any(spec.dtype.is_complex for spec in specs):
        return False
    names = set(state.names)
    for output in captured.outputs:
        if output.rebinds or output.kind is OutputKind.INPUT_MUTATION:
            return False
        alias = output.alias
        if alias is not None and alias.kind is InputKind.BUFFER and alias.key not in names:
            return False
    # A fast guard would watch, and keep alive, what the call before it has replaced.
    is_fixed = state.is_plain and not state.replaces
    return is_fixed and not captured.assumptions.asks & _ASKED_EACH_TIME


_numbers = iter(range(1 << 62))


def generated_guard(lines: Sequence[str], scope: Scope) -> tuple[str, Check]:
    """Return the source text of a guard with these ``lines``, and the compiled function."""
    source = _function(lines)
    return source, _compiled(source, scope)


def _compiled(source: str, scope: Scope) -> Any:
    """Compile ``source`` and return its function ``guard``; tracebacks can show the text."""
    file = f"<tvmbridge guard {next(_numbers)}>"
    logger.debug("%s\n%s", file, source)
    return scope.function("guard", source, file)
