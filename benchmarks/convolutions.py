"""Convolutions in compiled code against eager PyTorch: inference, and training by ``relax``."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from benchmarks.common import Row, alternate, parser, report
from benchmarks.modules import resnet
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report

# Compiled code calls PyTorch's kernel for a lone convolution, so the excess is call overhead.
BOUND = 1.05
_TRAINED = CompileOptions(joint="relax")


def _tower() -> nn.Module:
    """Return a network that halves the image size and doubles it again."""
    down = [nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*down, nn.ConvTranspose2d(64, 32, 2, 2), nn.ReLU())


_SQUARE, _ROW = (8, 64, 56, 56), (8, 256, 512)
CASES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv2d 3x3": (lambda: nn.Conv2d(64, 64, 3, 1, 1), _SQUARE),
    "conv2d 1x1": (lambda: nn.Conv2d(64, 256, 1, bias=False), _SQUARE),
    "conv2d 3x3 depthwise": (lambda: nn.Conv2d(64, 64, 3, 1, 1, groups=64), _SQUARE),
    "conv1d 5": (lambda: nn.Conv1d(256, 256, 5, 1, 2), _ROW),
    "conv3d 3x3x3": (lambda: nn.Conv3d(16, 32, 3, 1, 1), (2, 16, 16, 28, 28)),
    "conv_transpose2d 2x2": (lambda: nn.ConvTranspose2d(64, 32, 2, 2), _SQUARE),
    "down and up": (_tower, (8, 32, 56, 56)),
}


def _step(module: nn.Module, x: torch.Tensor) -> None:
    module.zero_grad()
    module(x).square().mean().backward()


def measured(name: str, module: nn.Module, x: torch.Tensor, rounds: int) -> list[Row]:
    """Return eager's time and the ratio of ours to it, for inference and for a training step."""
    rows = []
    for training in (False, True):
        eager, ours = copy.deepcopy(module).train(training), copy.deepcopy(module).train(training)
        with torch.set_grad_enabled(training):
            add_tvm_dispatch(ours, x, options=_TRAINED)
            run = _step if training else nn.Module.__call__
            pairs = [(run, eager), (run, ours)]
            functions = [lambda f=f, m=m: f(m, x) for f, m in pairs]
            theirs, mine = alternate(functions, rounds=rounds)
        assert not dispatch_report(ours).fallbacks, dispatch_report(ours).fallbacks
        kind = "training step" if training else "inference"
        rows.append(Row(f"{name}, {kind}: eager", theirs * 1e3, "ms"))
        bound = None if training else BOUND
        rows.append(Row(f"{name}, {kind}: ours over eager's", mine / theirs, "times", bound))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a bound is checked and does not hold."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=25, help="measured calls of each")
    made.add_argument("--cases", nargs="+", choices=[*CASES, "ResNet"], help="only these")
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = made.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for name in options.cases or [*CASES, "ResNet"]:
        if name == "ResNet":
            module, x = resnet()
        else:
            construct, shape = CASES[name]
            module, x = construct(), torch.randn(shape)
        rows += measured(name, module, x, options.rounds)
    return report("Convolutions", rows, check=not options.no_check)


if __name__ == "__main__":
    sys.exit(main())
