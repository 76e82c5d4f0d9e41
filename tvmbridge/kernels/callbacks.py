"""Callbacks from compiled code to Python functions, which pass exceptions around TVM.

tvm_ffi's own callbacks convert a Python exception to a TVM error in Python code. If that code
itself raises (a second interrupt, a RecursionError), no error is set and the process crashes.
tvm_ffi also converts the arguments in Python code, where signal handlers may run. After an
exception there, tvm_ffi 0.1.14 frees a string or a shape that compiled code still reads.

Here two small functions, compiled by TVM's LLVM, enclose the callback of tvm_ffi::

    compiled code -> @outside -> tvm_ffi's callback -> @inside -> the Python function

``@inside`` takes an exception from the interpreter before tvm_ffi sees it. ``@outside`` restores it
in the interpreter, and stops compiled code with the error ``EnvErrorAlreadySet``, which means that
the thread's Python exception is set. So the caller of compiled code gets the same exception object.
``@outside`` also replaces the arguments that tvm_ffi would convert in Python code. The Python
function gets a string as ``str``, a shape as the bytes of its int64, and a dtype as an integer.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import tvm_ffi

from tvmbridge.kernels.machine_code import load_functions

# With fewer calls left below Python's recursion limit, tvm_ffi's conversions could raise.
_ROOM = 8

_SOURCE = """
@where = private constant [36 x i8] c" while compiled code calls a kernel\\00"
@in_thread = private constant [19 x i8] c"EnvErrorAlreadySet\\00"
@of_python = private constant [13 x i8] c"RuntimeError\\00"
@unknown = private constant [50 x i8] c"a kernel's arguments or result were not converted\\00"
@nothing = private constant [1 x i8] c"\\00"

define ptr @inside(ptr %function, ptr %all) {{
  %count = call i64 {PyTuple_Size}(ptr %all)
  %first = call ptr {PyTuple_GetItem}(ptr %all, i64 0)
  %kind_at = call ptr {PyLong_AsVoidPtr}(ptr %first)
  %arguments = call ptr {PyTuple_GetSlice}(ptr %all, i64 1, i64 %count)
  %no_memory = icmp eq ptr %arguments, null
  br i1 %no_memory, label %raised, label %call
call:
  %found = call ptr {PyObject_Call}(ptr %function, ptr %arguments, ptr null)
  call void {Py_DecRef}(ptr %arguments)
  %failed = icmp eq ptr %found, null
  br i1 %failed, label %raised, label %returned
raised:
  %value_at = getelementptr ptr, ptr %kind_at, i64 1
  %trace_at = getelementptr ptr, ptr %kind_at, i64 2
  call void {PyErr_Fetch}(ptr %kind_at, ptr %value_at, ptr %trace_at)
  call void {Py_IncRef}(ptr {none})
  ret ptr {none}
returned:
  ret ptr %found
}}

define i32 @outside(ptr %number, ptr %arguments, i32 %count, ptr %result) {{
  %kind_at = alloca [3 x ptr], align 8
  %error_at = alloca ptr, align 8
  %more = add i32 %count, 1
  %given = alloca [2 x i64], i32 %more, align 8
  %shapes = alloca [2 x i64], i32 %more, align 8
  store ptr null, ptr %kind_at
  %state = call i32 {PyGILState_Ensure}()
  br label %enter
enter:
  %depth = phi i32 [ 0, %0 ], [ %deeper, %entered ]
  %refused = call i32 {Py_EnterRecursiveCall}(ptr @where)
  %is_refused = icmp ne i32 %refused, 0
  br i1 %is_refused, label %leave, label %entered
entered:
  %deeper = add i32 %depth, 1
  %enough = icmp eq i32 %deeper, {room}
  br i1 %enough, label %leave, label %enter
leave:
  %left = phi i32 [ %depth, %enter ], [ %deeper, %entered ], [ %fewer, %next_leave ]
  %no_room = phi i1 [ true, %enter ], [ false, %entered ], [ %no_room, %next_leave ]
  %all_left = icmp eq i32 %left, 0
  br i1 %all_left, label %is_room, label %next_leave
next_leave:
  %fewer = sub i32 %left, 1
  call void {Py_LeaveRecursiveCall}()
  br label %leave
is_room:
  br i1 %no_room, label %stop, label %convert

convert:
  store i64 1, ptr %given
  %box = ptrtoint ptr %kind_at to i64
  %box_at = getelementptr i64, ptr %given, i64 1
  store i64 %box, ptr %box_at
  br label %each
each:
  %i = phi i32 [ 0, %convert ], [ %next, %stored ]
  %is_last = icmp eq i32 %i, %count
  br i1 %is_last, label %call, label %argument
argument:
  %next = add i32 %i, 1
  %from = getelementptr [2 x i64], ptr %arguments, i32 %i
  %from_value = getelementptr i64, ptr %from, i64 1
  %type = load i64, ptr %from
  %index = trunc i64 %type to i32
  %value = load i64, ptr %from_value
  switch i32 %index, label %stored [ i32 {Str}, label %string
                                     i32 {Shape}, label %shape
                                     i32 {DataType}, label %dtype ]
string:
  %string_at = inttoptr i64 %value to ptr
  %text_at = getelementptr i8, ptr %string_at, i64 {content}
  %text = load i64, ptr %text_at
  br label %stored
shape:
  %shape_at = inttoptr i64 %value to ptr
  %sizes_at = getelementptr i8, ptr %shape_at, i64 {content}
  %rank_at = getelementptr i64, ptr %sizes_at, i64 1
  %sizes = load i64, ptr %sizes_at
  %rank = load i64, ptr %rank_at
  %bytes = mul i64 %rank, 8
  %bytes_at = getelementptr [2 x i64], ptr %shapes, i32 %i
  %length_at = getelementptr i64, ptr %bytes_at, i64 1
  store i64 %sizes, ptr %bytes_at
  store i64 %bytes, ptr %length_at
  %view = ptrtoint ptr %bytes_at to i64
  br label %stored
dtype:
  %code = and i64 %value, 4294967295
  br label %stored
stored:
  %new_type = phi i64 [ %type, %argument ], [ {RawStr}, %string ],
                      [ {ByteArrayPtr}, %shape ], [ 1, %dtype ]
  %new_value = phi i64 [ %value, %argument ], [ %text, %string ], [ %view, %shape ],
                       [ %code, %dtype ]
  %to = getelementptr [2 x i64], ptr %given, i32 %next
  %to_value = getelementptr i64, ptr %to, i64 1
  store i64 %new_type, ptr %to
  store i64 %new_value, ptr %to_value
  br label %each

call:
  %callback = call ptr {PyLong_AsVoidPtr}(ptr %number)
  %returned = call i32 {TVMFFIFunctionCall}(ptr %callback, ptr %given, i32 %more, ptr %result)
  %kind = load ptr, ptr %kind_at
  %is_raised = icmp ne ptr %kind, null
  br i1 %is_raised, label %restore, label %done
restore:
  %value_at = getelementptr ptr, ptr %kind_at, i64 1
  %trace_at = getelementptr ptr, ptr %kind_at, i64 2
  %exception = load ptr, ptr %value_at
  %trace = load ptr, ptr %trace_at
  call void {PyErr_Restore}(ptr %kind, ptr %exception, ptr %trace)
  br label %stop
stop:
  call void {PyGILState_Release}(i32 %state)
  call void {TVMFFIErrorSetRaisedFromCStr}(ptr @in_thread, ptr @nothing)
  ret i32 -1
done:
  call void {PyGILState_Release}(i32 %state)
  %is_right = icmp eq i32 %returned, 0
  br i1 %is_right, label %right, label %wrong
right:
  ret i32 0
wrong:
  call void {TVMFFIErrorMoveFromRaised}(ptr %error_at)
  %error = load ptr, ptr %error_at
  %is_lost = icmp eq ptr %error, null
  br i1 %is_lost, label %lost, label %known
lost:
  call void {TVMFFIErrorSetRaisedFromCStr}(ptr @of_python, ptr @unknown)
  ret i32 -1
known:
  call void {TVMFFIErrorSetRaised}(ptr %error)
  call i32 {TVMFFIObjectDecRef}(ptr %error)
  ret i32 -1
}}
"""
_OF_PYTHON = (
    "PyErr_Fetch",
    "PyErr_Restore",
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyLong_AsVoidPtr",
    "PyObject_Call",
    "PyTuple_GetItem",
    "PyTuple_GetSlice",
    "PyTuple_Size",
    "Py_DecRef",
    "Py_EnterRecursiveCall",
    "Py_IncRef",
    "Py_LeaveRecursiveCall",
)
_OF_TVM = (
    "TVMFFIErrorMoveFromRaised",
    "TVMFFIErrorSetRaised",
    "TVMFFIErrorSetRaisedFromCStr",
    "TVMFFIFunctionCall",
    "TVMFFIObjectDecRef",
)
# From TVM's c_api.h: type indices, and the offset of a string's or shape's address and length.
_LAYOUT = {"Str": 65, "Shape": 69, "DataType": 5, "RawStr": 8, "ByteArrayPtr": 9, "content": 24}
_VARARGS = 1


class _Method(ctypes.Structure):
    """Python's ``PyMethodDef``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class _Handle(int):
    """The address of tvm_ffi's callback.

    - ``kept``: the callback, which lives as long as this object.
    """

    kept: tvm_ffi.Function


@functools.cache
def _addresses() -> tuple[_Method, int]:
    """Return the method whose code is ``@inside``, and the address of ``@outside``."""
    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    places = {name: getattr(ctypes.pythonapi, name) for name in _OF_PYTHON}
    places |= {name: getattr(library, name) for name in _OF_TVM}
    numbers = {name: _address(place) for name, place in places.items()} | {"none": id(None)}
    pointers = {name: f"inttoptr (i64 {number} to ptr)" for name, number in numbers.items()}
    source = _SOURCE.format(**pointers, **_LAYOUT, room=_ROOM)
    inside, outside = load_functions(source, ("inside", "outside"))
    return _Method(b"inside", inside, _VARARGS, None), outside


def _address(place: Any) -> int:
    return int(ctypes.cast(place, ctypes.c_void_p).value or 0)


def callback(function: Callable[..., Any]) -> tvm_ffi.Function:
    """Return ``function`` as a TVM function; the module's docstring says how arguments arrive."""
    method, outside = _addresses()
    pointer, object_ = ctypes.c_void_p, ctypes.py_object
    make = ctypes.PYFUNCTYPE(object_, pointer, object_, pointer)
    inside = make(("PyCFunction_NewEx", ctypes.pythonapi))
    inner = tvm_ffi.convert(inside(ctypes.addressof(method), function, None))
    handle = _Handle(inner.__chandle__())
    handle.kept = inner
    return tvm_ffi.Function.__from_extern_c__(outside, keep_alive_object=handle)


def integers(shape: bytes) -> tuple[int, ...]:
    """Return the sizes of a shape, which a callback gets as the bytes of int64 values."""
    return tuple(memoryview(shape).cast("q"))
