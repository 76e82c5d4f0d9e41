"""schedule_for_cpu: its result for a module, and the compile time of its kernels."""

from __future__ import annotations

import time

import torch
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tests.legalize.compiled import build_module, compile_module, fuse, target
from tvmbridge.schedules import schedule_for_cpu
from tvmbridge.schedules.target import host_target, vector_bits
from tvmbridge.schedules.threads import share_torch_threads


def _fused() -> tvm.IRModule:
    x = torch.randn(33, 40)
    return fuse(build_module(lambda v: op.nn.softmax(op.tanh(v), -1), (x,)))


def _prim_funcs(mod: tvm.IRModule) -> list[tirx.PrimFunc]:
    return [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]


def test_the_module_given_is_left_as_it_was() -> None:
    mod = _fused()
    before = mod.script()
    schedule_for_cpu(mod, target())
    assert mod.script() == before


def test_what_is_scheduled_stays() -> None:
    once = schedule_for_cpu(_fused(), target())
    assert all("tirx.is_scheduled" in f.attrs for f in _prim_funcs(once))
    twice = schedule_for_cpu(once, target())
    for first, second in zip(_prim_funcs(once), _prim_funcs(twice), strict=True):
        assert first.same_as(second)


def test_code_uses_the_vector_registers_of_the_host() -> None:
    func = _prim_funcs(schedule_for_cpu(_fused(), target()))[0]
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    code = tvm.tirx.build(mod, target()).inspect_source("asm")
    register = {512: "zmm", 256: "ymm", 128: ("xmm", "v0")}[vector_bits(host_target())]
    assert any(name in code for name in ([register] if isinstance(register, str) else register))
    assert "tanhf" not in code
    assert "expf" not in code


def test_a_long_chain_compiles_quickly() -> None:
    def graph(v: relax.Expr) -> relax.Expr:
        for _ in range(10):
            v = op.tanh(op.add(v, op.multiply(v, v)))
        return v

    x = torch.randn(40, 50) / 10
    start = time.thread_time()  # not the time that other processes take
    run = compile_module(build_module(graph, (x,)))
    assert time.thread_time() - start < 20
    exact = x.double()
    for _ in range(10):
        exact = torch.tanh(exact + exact * exact)
    torch.testing.assert_close(run(x).double(), exact, rtol=1e-4, atol=1e-5)


def test_parallel_kernels_on_torch_s_threads() -> None:
    assert share_torch_threads() in (True, False)
    x = torch.randn(2000, 3000)
    run = compile_module(build_module(lambda v: op.sum(op.nn.gelu(v), 0), (x,)))
    exact = torch.nn.functional.gelu(x.double()).sum(0)
    for threads in (1, 2, torch.get_num_threads()):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.testing.assert_close(run(x).double(), exact, rtol=1e-5, atol=1e-3)
        finally:
            torch.set_num_threads(before)
