"""Compile CUDA source by NVRTC, the compiler library that comes with PyTorch's CUDA builds."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tvmbridge.core.errors import BuildError

# NVRTC has no C++ standard library: these are the parts of it that TVM's generated source uses.
_HEADERS = {
    "cuda/std/cstdint": """
namespace cuda { namespace std {
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
} }
""",
    "cuda/std/type_traits": """
namespace cuda { namespace std {
template <bool V> struct truth { static constexpr bool value = V; };
template <class A, class B> struct is_same : truth<false> {};
template <class A> struct is_same<A, A> : truth<true> {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <class T> struct is_floating_point
    : truth<is_same_v<T, float> || is_same_v<T, double>> {};
template <class T> struct is_integral : truth<
    is_same_v<T, bool> || is_same_v<T, char> || is_same_v<T, signed char>
    || is_same_v<T, unsigned char> || is_same_v<T, short> || is_same_v<T, unsigned short>
    || is_same_v<T, int> || is_same_v<T, unsigned int> || is_same_v<T, long>
    || is_same_v<T, unsigned long> || is_same_v<T, long long>
    || is_same_v<T, unsigned long long>> {};
template <class T, bool = is_integral<T>::value || is_floating_point<T>::value>
struct is_signed : truth<(T(-1) < T(0))> {};
template <class T> struct is_signed<T, false> : truth<false> {};
template <class T> struct is_unsigned : truth<is_integral<T>::value && !is_signed<T>::value> {};
template <bool V, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool V, class A, class B> struct conditional { typedef A type; };
template <class A, class B> struct conditional<false, A, B> { typedef B type; };
} }
""",
}
_OPTIONS = ("--std=c++17", "--disable-warnings")


@functools.cache
def nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC from NVIDIA's Python packages or from the system; None if there is none."""
    try:
        # NVRTC opens its builtins library by bare name, which works once that library is loaded.
        for path in _packaged("lib/libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(path))
    except OSError:
        return None
    for name in (*map(str, _packaged("lib/libnvrtc.so.*")), "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _packaged(pattern: str) -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(folder).glob(f"*/{pattern}"))


def _include_options() -> list[str]:
    """Return the compiler options that name the folders of the half-precision headers."""
    found = [file.parent for file in _packaged("include/cuda_fp16.h")]
    found += [Path("/usr/local/cuda/include")]
    return [f"--include-path={folder}" for folder in found if folder.is_dir()]


def compile_by_nvrtc(source: str, arch: str) -> bytes:
    """Return a cubin of CUDA ``source`` for ``arch`` (for example ``sm_90``).

    Raises:
        BuildError: NVRTC is missing, or rejects the source.
    """
    library = nvrtc()
    if library is None:
        raise BuildError("NVIDIA's run-time compiler (libnvrtc) is not installed")
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * len(_HEADERS))(*(n.encode() for n in _HEADERS))
    contents = (ctypes.c_char_p * len(_HEADERS))(*(c.encode() for c in _HEADERS.values()))
    made = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", len(_HEADERS), contents, names
    )
    if made:
        raise BuildError(f"NVRTC cannot begin (error {made})")
    try:
        options = [f"--gpu-architecture={arch}", *_OPTIONS, *_include_options()]
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            log = _text(library, "ProgramLog", program).decode(errors="replace").rstrip("\0")
            raise BuildError(f"NVRTC refuses the kernels: {log[:2000]}")
        return _text(library, "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: Any, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw
