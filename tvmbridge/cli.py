"""The command line, ``python -m tvmbridge COMMAND``.

The commands are doctor, demo, visualize, explain, compare, export, tune and cache.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tvmbridge import __version__
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.versions import versions_text

FORMATS: Final = ("svg", "pdf", "png", "html", "dot")
# A copy of the stages in tvmbridge.inspect.stages, which would be slow to load for --help.
STAGES: Final = ("captured", "passes", "joint", "forward", "backward")


class _Version(argparse.Action):
    """Prints the versions, which are read only if ``--version`` is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print one line and end the program."""
        print(f"tvmbridge {__version__} ({versions_text()})")
        parser.exit()


class UsageError(ValueError):
    """A command-line argument that cannot be used; the message gives the reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 1 after an error, 2 for wrong usage."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    if rest and known.command != "demo":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    command: Callable[[argparse.Namespace, list[str]], int] = known.run
    try:
        return command(known, rest)
    except UsageError as error:
        parser.error(str(error))
    except (BridgeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def resolve_factory(name: str) -> tuple[Any, Any]:
    """Call the factory ``package.module:factory`` and return its (module, sample_input).

    Raises:
        UsageError: the name is malformed or unknown, or the factory returns another value.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"{name!r} does not have the form package.module:factory")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise UsageError(f"there is no module {error.name!r} to import") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UsageError(f"{module_name} has no function {attribute!r}")
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2:
        raise UsageError(f"{name} must return a pair (module, sample_input)")
    from torch import nn

    if not isinstance(made[0], nn.Module):
        given = type(made[0]).__name__
        raise UsageError(f"{name} must return a module first, which {given} is not")
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tvmbridge", description="Runs and trains PyTorch modules on code compiled by TVM."
    )
    parser.add_argument("--version", action=_Version, help="say which versions these are")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="say whether tvmbridge works on this machine")
    doctor.add_argument(
        "--build", action="store_true", help="compile the missing C++ halves, and check nothing"
    )
    doctor.set_defaults(run=_doctor)
    # The demo has options of its own, --help among them.
    demo = commands.add_parser("demo", help="a trained BERT serves and learns", add_help=False)
    demo.set_defaults(run=_demo)
    _add_visualize(commands)
    explain = commands.add_parser(
        "explain", help="say what would become of a module, without compiling it"
    )
    _add_factory(explain)
    explain.add_argument("--memory", action="store_true", help="count the memory that a step needs")
    explain.set_defaults(run=_explain)
    compare = commands.add_parser(
        "compare", help="say which stage departs from eager PyTorch, and at which operator"
    )
    _add_factory(compare)
    compare.add_argument("--no-backward", action="store_true", help="compare the outputs alone")
    compare.add_argument(
        "--stages", metavar="NAME,...", help="which stages to evaluate (default: all)"
    )
    compare.add_argument("--out", type=Path, metavar="FILE.json", help="write the report as JSON")
    compare.set_defaults(run=_compare)
    _add_export(commands)
    _add_tune(commands)
    cache = commands.add_parser("cache", help="look at the compiled code kept on disk, or clear it")
    chosen = cache.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--list", action="store_true", help="each file, the one used last first")
    chosen.add_argument("--size", action="store_true", help="bytes in all")
    chosen.add_argument("--clear", action="store_true", help="remove all files")
    chosen.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write code, choices of kernels and tuning records into one file that travels",
    )
    chosen.add_argument(
        "--import",
        type=Path,
        dest="import_",
        metavar="FILE",
        help="take them from such a file; it is native code: import what you would run",
    )
    cache.add_argument(
        "--model",
        metavar="package.module:factory",
        help="with --export: compile this and write its code alone",
    )
    cache.set_defaults(run=_cache)
    return parser


def _add_factory(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "factory",
        metavar="package.module:factory",
        help="a function without arguments that returns (module, sample_input)",
    )


def _add_visualize(commands: Any) -> None:
    visualize = commands.add_parser("visualize", help="draw a module's graph")
    _add_factory(visualize)
    visualize.add_argument(
        "--out",
        type=Path,
        default=Path("graph.svg"),
        metavar="FILE",
        help=f"ends in .{', .'.join(FORMATS)} (default: graph.svg); .html is an interactive page",
    )
    visualize.add_argument(
        "--stage",
        choices=(*STAGES, "all"),
        default="captured",
        help="which graph to draw: as it comes from PyTorch (the default), behind the passes, the "
        "colored joint function, forward, backward, or all of them, a file each",
    )
    visualize.add_argument(
        "--fold",
        type=int,
        metavar="DEPTH",
        help="draw submodules at this depth as one node each; 0: none (default: as is readable)",
    )
    visualize.add_argument(
        "--times", action="store_true", help="measure each operator alone, for the facts of a page"
    )
    visualize.add_argument(
        "--all-nodes", action="store_true", help="draw small values as nodes of their own"
    )
    visualize.set_defaults(run=_visualize)


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export", help="write a module into a file that runs without PyTorch, or describe one"
    )
    export.add_argument("factory", nargs="?", metavar="package.module:factory")
    export.add_argument("--out", type=Path, metavar="FILE", help="the file to write")
    export.add_argument("--target", help="a processor's name (default: this machine's CPU)")
    export.add_argument(
        "--weights", choices=("inside", "beside"), default="inside", help="where the weights go"
    )
    export.add_argument(
        "--relay",
        type=Path,
        metavar="FILE",
        help="write text of TVM's Relay instead, and its parameters to FILE.npz",
    )
    export.add_argument("--relay-version", default="0.17", metavar="VERSION", help="0.11 to 0.17")
    export.add_argument("--inspect", type=Path, metavar="FILE", help="describe an exported file")
    export.set_defaults(run=_export)


def _export(known: argparse.Namespace, _rest: list[str]) -> int:
    if (known.inspect is None) == (known.factory is None):
        raise UsageError("name a factory with --out FILE, or give --inspect FILE")
    if known.inspect is not None:
        from tvmbridge.exporting.describing import description

        print(description(known.inspect))
        return 0
    if (known.out is None) == (known.relay is None):
        raise UsageError("--out FILE is missing" if known.out is None else "--out or --relay")
    module, sample_input = resolve_factory(known.factory)
    if known.relay is not None:
        return _export_relay(known, module, sample_input)
    from tvmbridge.exporting import export
    from tvmbridge.exporting.describing import description

    path = export(module, sample_input, known.out, target=known.target, weights=known.weights)
    print(f"wrote {path}")
    print(description(path))
    return 0


def _export_relay(known: argparse.Namespace, module: Any, sample_input: Any) -> int:
    import numpy as np

    from tvmbridge.relay import to_relay

    try:
        text, params = to_relay(module, sample_input, version=known.relay_version)
    except ValueError as error:
        raise UsageError(str(error)) from error
    arrays: dict[str, Any] = dict(params.items())
    weights = known.relay.with_name(f"{known.relay.name}.npz")
    known.relay.write_text(text, encoding="utf-8")
    with weights.open("wb") as file:
        np.savez(file, **arrays)
    print(f"wrote {known.relay} and {weights}: {len(params)} parameters")
    return 0


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="search for faster schedules and keep them",
        description="Searches for schedules faster than those by rule, for what factories make or "
        "for the tasks that compilation has noted (--pending). A run that is ended goes on at the "
        "next.",
    )
    tune.add_argument(
        "factories",
        nargs="*",
        metavar="package.module:factory",
        help="a function without arguments that returns (module, sample_input)",
    )
    tune.add_argument("--pending", action="store_true", help="work off the pending list")
    tune.add_argument(
        "--merge", nargs="+", type=Path, metavar="FOLDER", help="merge folders of one target"
    )
    tune.add_argument("--prune", type=Path, metavar="FOLDER", help="keep the best records only")
    tune.add_argument("--out", type=Path, metavar="FOLDER", help="where --merge writes to")
    tune.add_argument("--log-dir", default="tuning_logs", metavar="FOLDER")
    tune.add_argument("--target", help="a TVM target (default: this machine's CPU)")
    tune.add_argument("--trials", type=int, help="candidates for each task (default: by its size)")
    tune.add_argument("--timeout", type=float, metavar="SECONDS", help="for the whole run")
    tune.set_defaults(run=_tune)


def _tune(known: argparse.Namespace, _rest: list[str]) -> int:
    chosen = [bool(known.factories), known.pending, bool(known.merge), bool(known.prune)]
    if sum(chosen) != 1:
        raise UsageError("name factories, or one of --pending, --merge and --prune")
    if known.out is not None and not known.merge:
        raise UsageError("--out goes with --merge")
    from tvmbridge.tuning import api
    from tvmbridge.tuning.merge import merge, prune

    if known.merge:
        print(f"wrote {merge(known.merge, known.out)}")
    elif known.prune:
        print("wrote", *prune(known.prune))
    else:
        if not sys.stderr.isatty():  # there is no bar, so say what happens
            logging.basicConfig(format="%(message)s", stream=sys.stderr)
            logging.getLogger("tvmbridge.tuning").setLevel(logging.INFO)
        samples = [resolve_factory(name) for name in known.factories]
        try:
            limits = api.Limits(known.trials, known.timeout)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if samples:
            print(api.tune_all(samples, known.log_dir, known.target, limits))
        else:
            print(api.tune_pending(known.log_dir, target=known.target, **asdict(limits)))
    return 0


def _cache(known: argparse.Namespace, _rest: list[str]) -> int:
    if known.model is not None and known.export is None:
        raise UsageError("--model goes with --export")
    model = None if known.model is None else resolve_factory(known.model)
    from tvmbridge.bundles import command

    command.run(known, model)
    return 0


def _doctor(known: argparse.Namespace, _rest: list[str]) -> int:
    from tvmbridge.doctor import command as doctor

    if known.build:
        return doctor.build()

    return doctor.main()


def _demo(_known: argparse.Namespace, rest: list[str]) -> int:
    from tvmbridge.demo import main as demo_main

    return int(demo_main(rest) or 0)


def _visualize(known: argparse.Namespace, _rest: list[str]) -> int:
    kind = known.out.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise UsageError(f"--out must end in one of {', '.join(FORMATS)}, not {known.out.name!r}")
    module, sample_input = resolve_factory(known.factory)
    from tvmbridge.inspect.command import Wishes, draw

    stages = None if known.stage == "all" else (known.stage,)
    wishes = Wishes(stages, known.out, known.fold, known.all_nodes, known.times)
    for line in draw(module, sample_input, wishes):
        print(line)
    return 0


def _explain(known: argparse.Namespace, _rest: list[str]) -> int:
    """Print a report; return 0 if code would be compiled, 1 if the module keeps its forward."""
    module, sample_input = resolve_factory(known.factory)
    from tvmbridge import explain

    report = explain(module, sample_input, memory=known.memory)
    print(report, end="")
    return 0 if report.ok else 1


def _compare(known: argparse.Namespace, _rest: list[str]) -> int:
    """Print a comparison; return 0 if no stage departs from eager PyTorch, otherwise 1."""
    if known.out is not None and known.out.suffix != ".json":
        raise UsageError(f"--out must end in .json, not {known.out.name!r}")
    from tvmbridge import compare
    from tvmbridge.inspect.compare import STAGES as COMPARED

    stages = None if known.stages is None else known.stages.split(",")
    unknown = sorted(set(stages or ()) - set(COMPARED))
    if unknown:
        raise UsageError(
            f"--stages: no stage is called {', '.join(unknown)}; choose among {', '.join(COMPARED)}"
        )
    module, sample_input = resolve_factory(known.factory)
    report = compare(module, sample_input, backward=not known.no_backward, stages=stages)
    print(report, end="")
    if known.out is not None:
        known.out.parent.mkdir(parents=True, exist_ok=True)
        known.out.write_text(report.to_json(), encoding="utf-8")
        print(f"wrote {known.out}")
    return 0 if report.ok else 1
