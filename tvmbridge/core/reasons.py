"""Reasons: why compiled code does not serve a call or a module, and what the user can do about it.

:class:`Kind` is the table of all reasons. docs/limits.md shows it, rewritten by::

    python -m tvmbridge.core.reasons docs/limits.md
"""

from __future__ import annotations

import enum
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tvmbridge.core.errors import LEAVE_TO_EAGER

_ADD = "call add_tvm_dispatch with these arguments too"
_SAME = f"pass the same kinds of arguments in each call, or {_ADD}"
_REFREEZE = "call add_tvm_dispatch with freeze=True again"
_THAW = "call the module in eval mode under torch.no_grad(), or dispatch it without freeze=True"
_EXPLAIN = "tvmbridge.explain(module, sample) says what would become of it"
_DENSE = "pass plain, dense tensors"
_CLONE = "pass a clone of the tensor"
_OUTSIDE = "call the module outside of it, where calls are many"
_CHECKPOINT = "dispatch the submodules that the checkpoint calls"
_STATE = (
    "keep the state in a buffer and write into it (buffer.add_(1)), leave results in attributes of "
    "modules, also in hooks (layer.out = output), or dispatch submodules that keep no state"
)
_MORE = "raise the option max_specializations"
_SETTLES = "forward sets it at the first call, and further calls find it set"


class Category(enum.Enum):
    """What tvmbridge does; the value is the heading in docs/limits.md."""

    FALLS_BACK = "The module's own forward serves the call"
    REFUSED = "The module or sample is refused"
    ONCE = "A backward with `create_graph=True` is refused"
    DIFFERS = "Results differ from eager PyTorch's"
    NOT_KEPT = "Code is neither kept on disk nor compiled in the background"


_REFUSED, _ONCE, _DIFFERS = Category.REFUSED, Category.ONCE, Category.DIFFERS
_NOT_KEPT = Category.NOT_KEPT


def _changed(sentence: str) -> tuple[str, str]:
    return sentence, "call add_tvm_dispatch again, which compiles for the module as it is now"


def _strides(sentence: str) -> tuple[str, str]:
    return sentence, "make the input contiguous"


def _once(sentence: str) -> tuple[str, str, Category]:
    return sentence, LEAVE_TO_EAGER, Category.ONCE


def _differs(sentence: str) -> tuple[str, str, Category]:
    return sentence, "tvmbridge.compare(module, sample) shows by how much", Category.DIFFERS


@enum.unique
class Kind(enum.Enum):
    """The kinds of reasons.

    - ``sentence``: the reason; a ``{}`` in it is the place of the detail.
    - ``advice``: what the user can do; empty if nothing need be done.
    - ``category``: what tvmbridge does.
    """

    def __init__(
        self, sentence: str, advice: str, category: Category = Category.FALLS_BACK
    ) -> None:
        self.sentence = sentence
        self.advice = advice
        self.category = category

    # The arguments of a call differ.
    SHAPE = "the shape of an input differs", f"pad inputs to one shape, or {_ADD}"
    DTYPE = "the dtype of an input differs", f"convert the input, or {_ADD}"
    DEVICE = "the device of an input differs", "move the input to the device of the code"
    LAYOUT = "the layout of an input differs", _DENSE
    NOT_PLAIN = "an argument is not a plain tensor", _DENSE
    STRUCTURE = "the structure of the arguments differs", f"pass the same in each call, or {_ADD}"
    TENSOR = "an argument is a tensor, and was none", _SAME
    CONSTANT = (
        "an argument that is not a tensor differs",
        "pass a tensor in place of an array, and a 0-dimensional tensor in place of a number that "
        f"changes; otherwise {_ADD}",
    )
    CHOICE = (
        "a string, a bool or None differs",
        f"make tensors of texts before the call; otherwise {_SAME}",
    )
    NUMBER = "a number is none that the code takes as an input", _SAME
    UNSEEN = (
        "an argument is an object whose tensors PyTorch does not see",
        "pass the tensors in it, or a dict of them, or register its class with "
        "torch.export.register_dataclass or torch.utils._pytree.register_pytree_node",
    )
    ARRAY = "an argument is an array of numpy", "pass torch.from_numpy(array)"
    KEYWORD = (
        "the name of a keyword argument is not a plain str, and forward can see its class",
        "pass str(name) in place of np.str_, an enum member or another subclass of str",
    )
    LEFT_TRANSFORM = "an argument has left a function transform", "pass a plain tensor"
    INPUT_FLAG = "requires_grad of an input differs", f"set it as in the sample, or {_ADD}"
    OUTSIDE = (
        "the size of an input is outside of what dynamic_shapes declares",
        "give the Dim wider bounds; sizes of 0 and 1 run in eager",
    )
    TOGETHER = "sizes of inputs that one Dim stands for differ", "give them Dims of different names"
    ALL_DEMANDED = (
        "forward demands the sizes of all dimensions that are Dim.AUTO",
        "dispatch without dynamic_shapes, so that each size has code of its own",
    )
    SPEC = (
        "dynamic_shapes does not fit the arguments",
        "name in dynamic_shapes the arguments that calls have",
    )
    # The memory of tensors differs.
    STRIDES_DRAWS = _strides("an input is laid out otherwise, so that random numbers would differ")
    STRIDES_ASKED = _strides("an input is laid out otherwise, and forward asks for that")
    STRIDES_SHARED = _strides(
        "an input is laid out otherwise, so that other outputs would share memory"
    )
    STRIDES_EXCHANGED = _strides(
        "an input is laid out otherwise, so that other buffers would be exchanged"
    )
    STRIDES_FAIL = _strides("an input is laid out otherwise: {}")
    STRIDES_MANY = "inputs have been laid out in more than {} ways", "make the inputs contiguous"
    EXPANDED = _strides("an input is expanded otherwise, so that equal elements would be sorted so")
    HELD_STRIDES = _changed(
        "a parameter is laid out otherwise, so that random numbers would differ"
    )
    VIEW_STRIDES = _strides("a tensor of which a view is returned has other strides")
    WRITTEN_SHARED = (
        "a tensor that forward writes shares memory, with another or in itself",
        _CLONE,
    )
    ASKS_CLASS = (
        "an argument is a parameter, and forward asks for the class of tensors",
        "pass parameter.detach()",
    )
    ASKS_OFFSET = "a tensor starts within its memory, and forward asks for that", _CLONE
    ASKS_IDENTITY = "one tensor is given twice, and forward asks whether tensors are one", _CLONE
    # The module is not as it was when it was compiled.
    CHANGED = (
        "{} changed",
        "call add_tvm_dispatch again, which compiles for the module as it is now; keep a number "
        "that changes often in a buffer, as a 0-dimensional tensor, or pass it to forward",
    )
    BRANCH = (
        "forward branches otherwise by the values of its arguments",
        "use torch.where in place of the branch",
    )
    FORWARD_CHANGED = _changed("the code or a default of forward changed")
    REPLACED = _changed("a submodule was replaced")
    PATCHED = _changed("the forward of a submodule was replaced")
    ADDED = _changed("a parameter or buffer was added")
    COUNT = _changed("a submodule, parameter or buffer was added or removed")
    UNTIED = _changed("tied parameters were untied")
    WRITTEN = _changed("a tensor that forward has as a constant was written")
    NORM_REMOVED = _changed("a norm was removed")
    MISSING = _changed("a parameter or buffer is missing")
    HELD_NOT_PLAIN = _changed("a parameter or buffer is not a plain tensor")
    HELD_LEFT_TRANSFORM = _changed("a parameter or buffer has left a function transform")
    HOOKED = (
        "a submodule has hooks",
        "remove the hooks, or dispatch the submodules, whose own hooks are called",
    )
    ALL_HOOKED = "hooks of all modules are registered", "remove the hooks"
    FROZEN_REPLACED = "{} was replaced since it was frozen", _REFREEZE
    FROZEN_EXCHANGED = "the memory of {} was exchanged since it was frozen", _REFREEZE
    FROZEN_WRITTEN = "{} was written since it was frozen", _REFREEZE
    FROZEN_COPY = "this is a copy of a frozen module, which has no code", _REFREEZE
    # Where and in which mode the call is made.
    FROZEN_TRAINING = "the weights are frozen, and the module is in train mode", _THAW
    FROZEN_GRADIENTS = (
        "the weights are frozen, and autograd records the call (use torch.no_grad())",
        _THAW,
    )
    TRACED = "the module is being traced", "call remove_tvm_dispatch before the module is traced"
    DISPATCH_MODE = "a dispatch mode is active", _OUTSIDE
    FUNCTION_MODE = "a function mode is active", _OUTSIDE
    TRANSFORM = "a function transform is active", _OUTSIDE
    FORWARD_AD = "forward-mode differentiation is active", _OUTSIDE
    DEFAULT_DEVICE = "another default device is set", "set the default device to the CPU"
    INFERENCE = (
        "forward returns tensors that it makes in inference mode",
        "call the module under torch.inference_mode()",
    )
    STARTED = (
        "forward makes a tensor require a gradient, and nothing given requires one",
        "call the module under torch.no_grad(), or pass an input that requires a gradient",
    )
    CHECKPOINT_WRITES = (
        "forward writes buffers, arguments or counters, and a checkpoint repeats a part of it",
        _CHECKPOINT,
    )
    CHECKPOINT_FIRST = "a checkpoint repeats a call that forward itself served", _CHECKPOINT
    FORKED = "the process was forked after dispatch", "call add_tvm_dispatch in the new process"
    COPY = (
        "it was made through a shallow copy or a replica of the module",
        "use DistributedDataParallel, or deepcopy the module",
    )
    # There is no code.
    FAILED = "{}", _EXPLAIN
    STATE_WRITTEN = "forward changes state at each call: {}", _STATE
    NOT_COMPILED = "nothing is compiled", _EXPLAIN
    NO_SYMBOLIC = "no code for any size: {}", f"pad inputs to a few sizes; {_EXPLAIN}"
    COMPILING = "its code is being compiled in the background", ""
    DROPPED = (
        "code for this requires_grad of inputs and parameters was dropped, of more than "
        "max_specializations not used for longest",
        _MORE,
    )
    FULL = (
        "there is code for max_specializations choices of requires_grad of inputs and parameters "
        "and of branches by arguments, and not for this one",
        _MORE,
    )
    PARTS_ANEW = "{}; TorchDynamo would compile parts of it anew at each call", _STATE
    NO_PART = (
        "{}; no part of it is large enough to be compiled",
        "dispatch the submodules that forward calls, or branch and draw outside of the module",
    )
    OF_PART = "of a part of it, {}", _EXPLAIN
    FURTHER = "further reasons", _EXPLAIN
    # A module or sample is refused.
    UNUSUAL = "{}, and code is compiled for plain, dense tensors", _DENSE, _REFUSED
    HELD_UNUSUAL = (
        "{}, and code is compiled for modules of plain, dense tensors",
        "convert the tensor (to_dense, dequantize), or dispatch the submodules that do not hold it",
        _REFUSED,
    )
    UNINITIALIZED = (
        "{} has no shape before the first call",
        "call the module once before you dispatch it with a sample",
        _REFUSED,
    )
    WITHOUT_VALUES = (
        "{} is on the meta device, without values",
        "create it with module.to_empty(device=...) and load its values; keep a module that "
        "torch.func.functional_call gives other tensors to on a device, too",
        _REFUSED,
    )
    FUNCTIONAL_CALL = (
        "a tensor that is no parameter stands in for {} (functional_call)",
        "call the module itself",
        _REFUSED,
    )
    DISTRIBUTED = (
        "{} is a DTensor (parallelize_module, distribute_tensor), and one compiled function does "
        "not exchange parts of tensors between processes",
        'leave on_break at "eager": add_tvm_dispatch compiles the parts between the exchanges at '
        "the first call",
        _REFUSED,
    )
    SHARDED_WITHIN = (
        "its submodule {} is sharded by itself (fully_shard), and one compiled function cannot "
        "gather its parameters in between",
        "dispatch this and the other sharded submodules instead",
        _REFUSED,
    )
    SHARDED_WHOLE = (
        "its parameters are sharded by FullyShardedDataParallel, and compiled code does not gather "
        "them",
        "use torch.distributed.fsdp.fully_shard",
        _REFUSED,
    )
    SCRIPT = "it is a ScriptModule", "dispatch the module that it was made of", _REFUSED
    SCRIPT_WITHIN = (
        "its submodule {} is a ScriptModule",
        "use the module that it was made of",
        _REFUSED,
    )
    WRAPPER = (
        "it is a wrapper, which calls its {}",
        "dispatch what it holds, or dispatch before you wrap",
        _REFUSED,
    )
    PROPERTY = (
        "its forward is a property, which an instance cannot replace",
        "make forward a method",
        _REFUSED,
    )
    HOOKED_WITHIN = (
        "its submodule {} has hooks that are no plain functions on forward, which compiled code "
        "would not call",
        "remove them, or dispatch the submodules themselves, whose own hooks are called",
        _REFUSED,
    )
    # A backward with create_graph=True cannot run forward again, and has no derivative.
    AGAIN_FREED = "backward has run", "call backward with retain_graph=True", _ONCE
    AGAIN_ALONE = _once("the code was called alone")
    AGAIN_DRAWS = _once("forward draws random numbers on another device than the CPU")
    AGAIN_WRITES = _once("forward writes into arguments")
    AGAIN_LARGE = _once("its results depend on buffers of more than a megabyte that forward writes")
    AGAIN_EPILOGUE = _once("a part of forward runs eagerly after the compiled code")
    AGAIN_COMPLEX = _once("it has complex inputs")
    AGAIN_EXCHANGED = _once("a tensor of the module was exchanged since")
    AGAIN_WRITTEN = _once("an input or a tensor of the module was written since")
    AGAIN_MODE = _once("the module was put into another mode since, or PyTorch")
    AGAIN_HOOK = _once("a tensor of the module has a hook, which would be called twice")
    # What compiled code computes otherwise.
    OVERFLOW = _differs(
        "finite numbers overflow on the way, as in a sum of numbers near the largest of their "
        "dtype, in the squares of `std` or in a norm: an infinity, NaN or 0 may replace another of "
        "these"
    )
    COTANGENT = (
        "TVM's gradient differentiates a norm or `mse_loss`, and the cotangent of a row has an "
        "infinity: NaN may replace an infinity",
        'CompileOptions(joint="aot") has PyTorch\'s own derivatives',
        _DIFFERS,
    )
    BY_PLACE = _differs(
        "eager PyTorch's answer depends on the place of an element in a tensor (`gelu` of the "
        "largest float32 and of infinities, the mean of `var_mean` with an infinity): one of its "
        "two answers is given"
    )
    CONVOLUTION = _differs(
        "loops compute a 3x3 convolution ([how](performance.md#convolutions-in-loops)): NaN may "
        "replace an infinity"
    )
    STATISTICS = (
        "a batch norm reads its running statistics (`training=False`), and a later one in the same "
        "forward updates them: PyTorch's backward reads the updated statistics, and compiled code "
        "those that forward read",
        "give the first norm clones of the buffers: both compute the same gradients then",
        _DIFFERS,
    )
    ZERO = "the sign of a zero", "add 0.0 where the sign matters", _DIFFERS
    # Code is compiled at the call, for this process alone.
    NOT_LINUX = (
        "a process compiles in the background on Linux alone",
        "leave out the options background and budget",
        _NOT_KEPT,
    )
    OTHER_THREAD = (
        "the call is not made by the main thread",
        "call the module in the main thread first",
        _NOT_KEPT,
    )
    DAEMON = (
        "the process is a daemon of multiprocessing, which may have no children",
        "start the process with daemon=False",
        _NOT_KEPT,
    )
    ACCELERATOR = (
        "PyTorch's engine cannot be forked where there is an accelerator",
        "leave out the options background and budget: compilations run within calls",
        _NOT_KEPT,
    )
    CACHE_OFF = "the option cache is off", "set the option cache", _NOT_KEPT
    CACHE_SWITCHED = "TVMBRIDGE_CACHE is {}", "unset TVMBRIDGE_CACHE", _NOT_KEPT
    DUMPED = (
        "TVMBRIDGE_DUMP asks for the module after each pass",
        "unset TVMBRIDGE_DUMP",
        _NOT_KEPT,
    )
    OBSERVED = "passes are observed", "compile outside of tvmbridge.pipeline.observed", _NOT_KEPT
    INSTRUMENTED = (
        "passes are instrumented",
        "compile without instruments of a PassContext",
        _NOT_KEPT,
    )
    SOURCES = (
        "tvmbridge's files were changed since it was imported",
        "start the process again",
        _NOT_KEPT,
    )


@dataclass(frozen=True)
class Reason:
    """Why compiled code does not serve a call or a module.

    - ``kind``: the kind, which has the sentence and the advice.
    - ``detail``: names and values: the argument, its shape and the expected one.
    - ``settles``: whether the next call will be served without the user's doing.

    Example:
        >>> reason = Reason(Kind.SHAPE, "argument `x`: shape (2, 3), compiled for (4, 3)")
        >>> print(reason)
        the shape of an input differs (argument `x`: shape (2, 3), compiled for (4, 3))
        >>> reason.text
        'the shape of an input differs'
    """

    kind: Kind
    detail: str = ""
    settles: bool = False

    @property
    def text(self) -> str:
        """Return the sentence by which calls are counted."""
        return self.kind.sentence.format(self.detail)

    @property
    def example(self) -> str:
        """Return what is to be said beside the sentence; it differs from call to call."""
        if self.settles:
            return _SETTLES
        return "" if "{}" in self.kind.sentence else self.detail

    @property
    def advice(self) -> str:
        """Return what the user can do; empty if nothing need be done."""
        return "" if self.settles else self.kind.advice

    def __str__(self) -> str:
        return f"{self.text} ({self.example})" if self.example else self.text


def table() -> str:
    """Return the kinds as tables in Markdown, one for each category."""
    lines = []
    for category in Category:
        lines += [f"## {category.value}", "", "| reasons | what to do |", "| --- | --- |"]
        kinds = [k for k in Kind if k.category is category and k is not Kind.FAILED]
        for advice in dict.fromkeys(kind.advice for kind in kinds):
            reasons = [k.sentence.format("...") for k in kinds if k.advice == advice]
            lines.append(f"| {'<br>'.join(reasons)} | {advice or 'nothing'} |")
        lines.append("")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return ``page`` with :func:`table` between its two markers."""
    begin, end = "<!-- reasons -->\n", "<!-- end of reasons -->"
    return re.sub(f"({begin}).*({end})", lambda m: f"{m[1]}\n{table()}\n{m[2]}", page, flags=re.S)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(with_table(Path(name).read_text()))
