"""The random draws of the captured graph, which PyTorch makes in program order.

The compiled function stays pure: each draw is an additional input. PyTorch's own generator makes
the draws in the order in which the eager module would. So the same seed gives the same numbers and
leaves the generator in the same state.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram, ExportGraphSignature

from tvmbridge.backends import backend_of
from tvmbridge.core.alone import runs_alone
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.torch_private import OpOverload, pytree
from tvmbridge.core.types import ComputedTensor, NoiseDescriptor, TensorSpec

aten = torch.ops.aten

# The argument of attention without which it draws nothing.
_PROBABILITY = "dropout_p"
_DROPOUT = (aten.dropout.default, aten.native_dropout.default)

RRELU = aten.rrelu_with_noise_functional.default
RRELU_NAME = "aten::rrelu_with_noise"

OTHER_DRAWS = "the captured graph draws other random numbers than the module"

# Draws that read only shape, strides, dtype and device of their tensor arguments.
READS_METADATA_ONLY = frozenset(
    {
        "aten::rand",
        "aten::rand_like",
        "aten::randn",
        "aten::randn_like",
        "aten::randint",
        "aten::randint_like",
        "aten::randperm",
        "aten::uniform",
        "aten::normal_functional",
        "aten::exponential",
        "aten::geometric",
        "aten::log_normal",
        "aten::cauchy",
        "aten::random",
    }
)
METADATA_ONLY_OVERLOADS = frozenset({aten.bernoulli.p, aten.normal.float_float})

# Draws that read values of their tensor arguments; PyTorch computes these tensors beforehand.
READS_VALUES = frozenset(
    {
        "aten::_sample_dirichlet",
        "aten::_standard_gamma",
        "aten::bernoulli",
        "aten::binomial",
        "aten::multinomial",
        "aten::normal",
        "aten::poisson",
    }
)

# Functional forms, which PyTorch puts into the graph, and the in-place draws that they replaced.
# The in-place form is called: the order of the random numbers follows the strides of the tensor
# that is filled, and a copy would have other strides.
_IN_PLACE: dict[Any, Any] = {
    aten.uniform.default: aten.uniform_.default,
    aten.normal_functional.default: aten.normal_.default,
    aten.exponential.default: aten.exponential_.default,
    aten.geometric.default: aten.geometric_.default,
    aten.log_normal.default: aten.log_normal_.default,
    aten.cauchy.default: aten.cauchy_.default,
    aten.random.default: aten.random_.default,
    getattr(aten.random, "from"): getattr(aten.random_, "from"),
    aten.random.to: aten.random_.to,
    aten.bernoulli.Tensor: aten.bernoulli_.Tensor,
}


def tidy_draws(program: ExportedProgram) -> None:
    """Normalize random operators: one draw for each, and none if eager PyTorch draws nothing.

    Remove dead code, except for draws, because they advance the generator. Code that runs without
    PyTorch has no generator, so that draws whose numbers nothing reads are removed from it too.
    """
    graph, signature = program.graph, program.graph_signature
    draws_count = not runs_alone()
    for node in list(graph.nodes):
        if node.target is aten.native_dropout.default and node.args[1:] == (1.0, True):
            # Eager PyTorch draws nothing for dropout with p=1: it multiplies by zero.
            _replace_item(graph, signature, node, 0, (node.args[0], 0.0))
        elif node.target is RRELU and is_draw(node):
            slopes = next((u for u in node.users if u.args[1] == 1), None)
            if slopes is None:
                with graph.inserting_after(node):
                    slopes = graph.call_function(operator.getitem, (node, 1))
                slopes.meta["val"] = node.meta["val"][1]
            _replace_item(graph, signature, node, 0, (node.args[0], slopes))
    graph.eliminate_dead_code(
        lambda n: (
            n.op in ("placeholder", "output") or (draws_count and (is_draw(n) or _is_slopes(n)))
        )
    )


def _is_slopes(node: fx.Node) -> bool:
    """Whether ``node`` is the second result of ``rrelu_with_noise``, the drawn slopes."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    return node.args[0].target is RRELU  # type: ignore[union-attr]


def _replace_item(
    graph: fx.Graph, signature: ExportGraphSignature, node: fx.Node, index: int, factors: Any
) -> None:
    """Replace the result of ``node`` at ``index`` by the product of ``factors``."""
    for item in [u for u in node.users if u.args[1] == index]:
        with graph.inserting_before(item.next):
            product = graph.call_function(aten.mul.Tensor, factors)
        product.meta = dict(item.meta)
        item.replace_all_uses_with(product)
        signature.replace_all_uses(item.name, product.name)


def find_noise(graph: fx.Graph) -> tuple[NoiseDescriptor, ...]:
    """Return descriptors of all random draws of ``graph`` in program order.

    Raises:
        UnsupportedOperatorError: an operator draws in a way that cannot be done before the call.
    """
    return tuple(
        _describe_dropout(node) if node.target in _DROPOUT else _describe_draw(node)
        for node in graph.nodes
        if is_draw(node)
    )


def is_draw(node: fx.Node) -> bool:
    """Whether eager PyTorch draws random numbers at this node."""
    if node.op != "call_function":
        return False
    return is_active_dropout(node) if node.target in _DROPOUT else _is_random(node)


def dropout_arguments(node: fx.Node) -> tuple[fx.Node, float, bool]:
    """Return ``(input, p, train)`` of a dropout node."""
    x, p, train = node.args
    assert isinstance(x, fx.Node)
    return x, float(p), train is None or bool(train)  # type: ignore[arg-type]


def is_active_dropout(node: fx.Node) -> bool:
    """Whether eager PyTorch draws a mask: in training, for 0 < p < 1 and an input with elements."""
    if node.target not in _DROPOUT:
        return False
    x, p, train = dropout_arguments(node)
    return train and 0.0 < p < 1.0 and x.meta["val"].numel() > 0


def _is_random(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if target is RRELU:
        return bool(_argument(node, "training", 4, False))
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    if _PROBABILITY not in names:
        return True
    return bool(_argument(node, _PROBABILITY, names.index(_PROBABILITY), 0.0))


def _argument(node: fx.Node, name: str, position: int, default: Any) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _describe_dropout(node: fx.Node) -> NoiseDescriptor:
    x, p, _ = dropout_arguments(node)
    return dropout_descriptor(node.name, x.meta["val"], p)


def dropout_descriptor(name: str, like: torch.Tensor, p: float) -> NoiseDescriptor:
    """Return the descriptor of the mask for dropout of ``like`` with probability ``p``."""
    if not backend_of(like.device).draws_by_strides:
        return mask_descriptor(name, like, 1.0 - p, drop_probability=p)
    mask = TensorSpec.of(torch.empty_like(like, dtype=torch.bool))
    args = (TensorSpec.of(like), p, True)
    return NoiseDescriptor(name, mask, aten.native_dropout.default, args, {}, p, 1)


def mask_descriptor(
    name: str, like: torch.Tensor, keep: float, *, drop_probability: float | None = None
) -> NoiseDescriptor:
    """Return the descriptor of a boolean mask with the strides of ``like``.

    Args:
        keep: the probability that an element is True.
        drop_probability: the probability of dropout; None if the mask is not for dropout.
    """
    spec = TensorSpec.of(torch.empty_like(like, dtype=torch.bool))
    return NoiseDescriptor(name, spec, aten.bernoulli_.float, (spec, keep), {}, drop_probability)


def _describe_draw(node: fx.Node) -> NoiseDescriptor:
    op: Any = node.target
    if op is RRELU:
        return describe_rrelu(node)
    metadata_only = op._schema.name in READS_METADATA_ONLY or op in METADATA_ONLY_OVERLOADS
    if not metadata_only and op._schema.name not in READS_VALUES:
        raise UnsupportedOperatorError(
            f"{op} draws random numbers in a way that is not known, so the draw cannot be made "
            "before the compiled code runs"
        )
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise UnsupportedOperatorError(f"{op} draws several results at once")
    if op is aten.bernoulli.p:
        if not value.is_contiguous():
            raise UnsupportedOperatorError(
                f"{op} draws in an order that depends on the strides of its input and on whether "
                "it stands for bernoulli_"
            )
        return mask_descriptor(node.name, value, float(_argument(node, "p", 1, 0.5)))
    spec_of = spec_of_node if metadata_only else computed_by
    args, kwargs = pytree.tree_map(spec_of, (node.args, node.kwargs))
    drawn = _IN_PLACE.get(op, op)
    if drawn is aten.bernoulli_.Tensor:
        args = (spec_of_node(node.args[0]), *args[1:])
    descriptor = NoiseDescriptor(node.name, TensorSpec.of(value), drawn, tuple(args), kwargs)
    # The kernel draws in the dtype of the mean, and scales the numbers in place.
    read = [tensor.spec.dtype for tensor in descriptor.computed]
    if op._schema.name == "aten::normal" and read and value.dtype is not read[0]:
        raise UnsupportedOperatorError(
            f"{op} of a mean and a standard deviation of two dtypes draws in that of the mean, "
            "where PyTorch's tracing foretells another"
        )
    return descriptor


def describe_rrelu(node: fx.Node) -> NoiseDescriptor:
    """Return the descriptor of ``rrelu``'s slopes, named after the getitem that reads them."""
    x, noise, *rest = node.args
    name = next((u.name for u in node.users if u.args[1] == 1), node.name)
    spec = spec_of_node(noise)
    return NoiseDescriptor(name, spec, RRELU, (computed_by(x), spec, *rest), {}, result=1)


def base_name(op: Any) -> str:
    """Return the name that the in-place, functional and plain variants of an operator share."""
    return str(op._schema.name).removesuffix("_functional").rstrip("_")


def memory_order(tensor: torch.Tensor | TensorSpec) -> tuple[int, ...]:
    """Return the strides of dimensions with several elements, which decide the order of draws."""
    stride = tensor.stride if isinstance(tensor, TensorSpec) else tensor.stride()
    return tuple(s for s, extent in zip(stride, tensor.shape, strict=True) if extent > 1)


def spec_of_node(value: Any) -> Any:
    """Return a draw's argument with a TensorSpec for a node; the draw reads only its metadata."""
    return TensorSpec.of(value.meta["val"]) if isinstance(value, fx.Node) else value


def computed_by(value: Any) -> Any:
    """Return a draw's argument with a ComputedTensor for a node; the draw reads its values."""
    if not isinstance(value, fx.Node):
        return value
    return ComputedTensor(value.name, TensorSpec.of(value.meta["val"]))
