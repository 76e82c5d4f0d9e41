"""The eager epilogue: data-dependent functions run in eager PyTorch after the compiled code.

The shape of ``torch.nonzero(mask)`` and the number ``x.item()`` are data-dependent, so nothing
computed from them can be compiled. During a trace, such a function returns a *deferred* value, and
every function that takes a deferred value is recorded instead of run. The tensors that recorded
functions read become additional outputs of the graph. At a call, the recorded functions run on
these outputs in eager PyTorch, where autograd records them as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import TracerBase
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from tvmbridge.calls.generators import generators_used_by
from tvmbridge.core.autocast import autocast_now
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import pytree
from tvmbridge.core.types import DEFERRED, Epilogue
from tvmbridge.graph_capture.dependence import (
    AS_NUMBER,
    BRANCHES,
    DependenceError,
    Ranges,
    depends_on_data,
    is_known,
)

# With more recorded functions than this, little of forward would be left to compile.
_LONGEST = 64

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "rrelu", "poisson", "gumbel")
# How messages name methods and functions that users do not call by name.
_WRITTEN = {
    "__getitem__": "an index that is a mask or a tensor",
    "getitem": "an index",
    "item": ".item()",
    "tolist": ".tolist()",
    "gt": "a comparison",
    "lt": "a comparison",
    "ge": "a comparison",
    "le": "a comparison",
    "eq": "a comparison",
    "ne": "a comparison",
}
_FIXED = (
    "keep the size fixed, by torch.where or masked_fill in place of an index by a mask, or compute "
    "this part outside of the module"
)
_OUTSIDE = "compute this part outside of the module"
_OUT_OF_PLACE = "use the function that returns a new tensor: y = y + 1 in place of y += 1"
_IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul"


class EpilogueRecorder:
    """Wraps a forward so that an epilogue computes its data-dependent results.

    If no result is data-dependent, a call returns the results of ``forward``, and ``epilogue``
    stays None. Otherwise it returns ``(results, read)``. In ``results`` strings are placeholders
    for the deferred results; ``read`` are the tensors from which ``epilogue`` computes them.

    Args:
        forward: the forward that is traced.
        differentiated: whether the results will be differentiated, so that the gradient mode
            matters.
    """

    def __init__(self, forward: Callable[..., Any], *, differentiated: bool) -> None:
        self.epilogue: Epilogue | None = None
        self._forward = forward
        self._differentiated = differentiated

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = _Recorder(differentiated=self._differentiated)
        with _Deferring(recorder):
            results = self._forward(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(results)
        found = [leaf for leaf in leaves if type(leaf) is _Deferred]
        if not found:
            recorder.check()
            return results
        self.epilogue = recorder.finish(found)
        numbers = iter(range(len(found)))
        marked = [
            f"{DEFERRED}{next(numbers)}" if type(leaf) is _Deferred else leaf for leaf in leaves
        ]
        return pytree.tree_unflatten(marked, structure), recorder.read


class _Recorder(TracerBase):
    """The graph of recorded functions while forward is traced."""

    def __init__(self, *, differentiated: bool) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.read: list[torch.Tensor] = []
        self._placeholders: dict[int, fx.Node] = {}
        self._versions: list[int] = []
        self._functions: Counter[str] = Counter()
        self._modes = {torch.is_grad_enabled()} if differentiated else {True, False}

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Deferred:
        """Record a call and return its deferred result."""
        if is_tensor_method_or_property(function) and hasattr(function, "__name__"):
            return self._note("call_method", function.__name__, args, kwargs)
        return self._note("call_function", function, args, kwargs)

    def _note(
        self, kind: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Deferred:
        result = self.create_proxy(kind, target, tuple(args), dict(kwargs))
        assert isinstance(result.node, fx.Node)
        return result  # type: ignore[return-value]

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        """Add a node to the graph.

        Raises:
            DependenceError: an epilogue cannot repeat the call, or it has too many calls.
        """
        title = _title(target)
        reason = _reason_against(title, kwargs)
        if torch.is_grad_enabled() not in self._modes:
            reason = "under another gradient mode than forward"
        if autocast_now():
            reason = "under autocast"
        if reason:
            raise DependenceError(
                f"calls {title} on a value that depends on data, {reason}", _FIXED
            )
        self._functions[title] += 1
        if sum(self._functions.values()) > _LONGEST:
            what = f"calls more than {_LONGEST} functions on values that depend on data"
            raise DependenceError(what, _FIXED)
        return self.graph.create_node(kind, target, args, kwargs, name, type_expr)

    def proxy(self, node: fx.Node) -> _Deferred:
        """Return the deferred value of a node."""
        return _Deferred(node, self)

    def create_arg(self, a: Any) -> Any:
        """Return an argument's form: a tensor is a placeholder, and one more output of forward."""
        if type(a) is _Deferred:
            return a.node
        if not isinstance(a, torch.Tensor):
            return super().create_arg(a)
        node = self._placeholders.get(id(a))
        if node is None:
            with self.graph.inserting_before(self._first()):
                node = self.graph.placeholder(f"read_{len(self.read)}")
            self._placeholders[id(a)] = node
            self.read.append(a)
            self._versions.append(a._version)
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Raise: control flow depends on the deferred value ``obj``."""
        what = f"branches by a value that depends on data, {_made_by(obj)}"
        raise DependenceError(what, BRANCHES)

    def iter(self, obj: fx.Proxy) -> Any:
        """Raise: forward iterates over the deferred value ``obj``."""
        what = f"loops over a value whose length depends on data, {_made_by(obj)}"
        raise DependenceError(what, _FIXED)

    def keys(self, obj: fx.Proxy) -> Any:
        """Raise: forward uses the deferred value ``obj`` as a mapping."""
        what = f"takes a value that depends on data for a mapping, {_made_by(obj)}"
        raise DependenceError(what, _FIXED)

    def _first(self) -> fx.Node:
        """Return the first node that is no placeholder."""
        return next((n for n in self.graph.nodes if n.op != "placeholder"), self.graph._root)

    def check(self) -> None:
        """Raise DependenceError if a tensor was mutated after a recorded function read it."""
        for tensor, version in zip(self.read, self._versions, strict=True):
            if tensor._version != version:
                raise DependenceError(
                    "writes into a tensor that a function with a data-dependent result "
                    f"({', '.join(self._functions)}) has read"
                )

    def finish(self, results: Sequence[_Deferred]) -> Epilogue:
        """Return the epilogue that computes ``results``."""
        self.check()
        self.graph.output([r.node for r in results])
        return Epilogue(self.graph, len(self.read), dict(self._functions))


def _title(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _made_by(deferred: fx.Proxy) -> str:
    """Return a phrase for the call that returned a deferred value, as a user would write it."""
    title = _title(deferred.node.target)
    if title == "getattr":
        return f"the attribute {deferred.node.args[1]} of a result"
    return f"the result of {_WRITTEN.get(title) or f'{title}()'}"


def _reason_against(title: str, kwargs: Mapping[str, Any]) -> str:
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        return "in place"
    if title.endswith("_") and not title.endswith("__"):
        return "in place"
    if title in ("__setitem__", "__set__", "setitem", "setattr"):
        return "in place"
    drawing = any(word in title for word in _RANDOM) or title == "normal"
    return "which draws random numbers" if drawing else ""


class _Deferred(fx.Proxy):
    """A data-dependent value; using it as a Python value, or reading its class, raises."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise DependenceError(
            f"uses a value whose size or number depends on data, {_made_by(self)}, where its type "
            "or size must be known",
            _FIXED,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        recorder: Any = self.tracer
        if not callable(getattr(torch.Tensor, name)):
            return recorder._note("call_function", getattr, (self, name), {})
        return lambda *args, **kwargs: recorder._note("call_method", name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None
    ) -> _Deferred:
        named = kwargs or {}
        recorder: Any = next(_deferred_among((args, named))).tracer
        noted: _Deferred = recorder.call(orig_method, args or (), named)
        return noted


def _refuse_in_place(self: _Deferred, other: Any) -> Any:
    raise DependenceError(
        f"changes a value that depends on data in place, {_made_by(self)}", _OUT_OF_PLACE
    )


def _refuse_number(self: _Deferred, *_: Any) -> Any:
    raise DependenceError(
        f"needs a value that depends on data as a Python number, {_made_by(self)}", AS_NUMBER
    )


for _name in _IN_PLACE.split():
    setattr(_Deferred, f"__{_name}__", _refuse_in_place)
for _name in ("len", "int", "float", "index", "complex", "round", "str", "format"):
    setattr(_Deferred, f"__{_name}__", _refuse_number)


class _Deferring(TorchFunctionMode):
    """A mode that defers data-dependent functions and all functions that take deferred values.

    It is a separate mode because it must see every function.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._ranges = Ranges()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if next(_deferred_among((args, named)), None) is not None:
            return self._recorder.call(func, args, named)
        number = self._ranges.number(func, args)
        if number is not None:
            return number
        if not depends_on_data(func, args, named) or is_known((args, named)):
            result = func(*args, **named)
            self._ranges.learn(result, func, args, named)
            return result
        return self._recorder.call(func, args, named)


def _deferred_among(value: Any) -> Iterator[_Deferred]:
    kind = type(value)
    if kind is _Deferred:
        yield value
    elif kind is slice:
        yield from _deferred_among((value.start, value.stop, value.step))
    elif kind in (tuple, list):
        for item in value:
            yield from _deferred_among(item)
    elif kind is dict:
        yield from _deferred_among(list(value.values()))


def try_epilogue(epilogue: Epilogue, flat: Sequence[Any]) -> None:
    """Check that the epilogue is pure, by one run on copies of the tensors that it reads.

    Args:
        flat: the leaves that the compiled code returns; the last of them are for the epilogue.

    Raises:
        UnsupportedOperatorError: the epilogue draws random numbers, or writes into a tensor.
    """
    first = len(flat) - epilogue.num_read
    kept, read = flat[:first], flat[first:]
    copies = [t.detach().clone() for t in read]
    versions = [c._version for c in copies]
    with torch.no_grad():
        used = generators_used_by(lambda: epilogue.resolve([*kept, *copies]))
    if "torch" in used:
        raise UnsupportedOperatorError(
            "forward draws random numbers from what depends on the values of tensors"
        )
    for tensor, copy, version in zip(read, copies, versions, strict=True):
        # Batch norm writes its running statistics without increasing their version.
        same = torch.equal(tensor.nan_to_num(), copy.nan_to_num())
        if copy._version != version or not same:
            raise UnsupportedOperatorError(
                "forward writes into a tensor what depends on the values of tensors"
            )
