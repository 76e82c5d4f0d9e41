"""The thread pool of exported code runs each part of a loop once, whoever is late."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tvm.support.cc import get_cc

from tvmbridge.exporting import linking

DRIVER = r"""
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#define CALLERS 3
#define LOOPS 2000
typedef struct { void* handle; int32_t count; } Environment;
typedef int (*Task)(int, Environment*, void*);
int (*__TVMBackendParallelLaunch)(Task, void*, int);
int tvmbridge_use_threads(int);
typedef struct { int extent, runs[512]; } Loop;
static void rest(int microseconds) {
  struct timespec time = {0, microseconds * 1000};
  nanosleep(&time, NULL);
}
static int run(int part, Environment* of, void* data) {
  Loop* loop = data;
  int step = (loop->extent + of->count - 1) / of->count, end = (part + 1) * step;
  if (loop->extent % 50 == 0 && part % 3 == 0) rest(20);
  for (int i = part * step; i < end && i < loop->extent; ++i) ++loop->runs[i];
  return loop->extent % 97 == 0 && part == 0 ? -1 : 0;
}
static void* call(void* argument) {
  unsigned random = 1 + (unsigned)(intptr_t)argument;
  for (int i = 0; i < LOOPS; ++i) {
    random = random * 1103515245 + 12345;
    Loop loop = {.extent = 1 + (random >> 16) % 512};
    int code = __TVMBackendParallelLaunch(run, &loop, 0);
    if (code != (loop.extent % 97 == 0 ? -1 : 0)) exit(2);
    for (int k = 0; k < loop.extent; ++k)
      if (loop.runs[k] != 1) exit(3);
    if (random % 41 == 0) rest(100); /* threads of the pool fall asleep */
  }
  return NULL;
}
int main(int count, char** arguments) {
  if (tvmbridge_use_threads(atoi(arguments[count - 1])) < 1) return 1;
  pthread_t callers[CALLERS];
  for (intptr_t i = 0; i < CALLERS; ++i) pthread_create(&callers[i], NULL, call, (void*)i);
  for (int i = 0; i < CALLERS; ++i) pthread_join(callers[i], NULL);
  return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program of the driver above and the thread pool."""
    compiler = get_cc()
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("threads")
    driver, made = folder / "driver.c", folder / "driver"
    driver.write_text(DRIVER)
    pool = Path(linking.__file__).with_name("_threads.c")
    objects = [str(folder / f"{source.stem}.o") for source in (driver, pool)]
    command = [compiler, "-x", "c", "-std=gnu11", "-O2", "-pthread", "-c"]
    for source, path in zip((driver, pool), objects, strict=True):
        subprocess.run([*command, str(source), "-o", path], check=True, capture_output=True)
    link = [compiler, "-pthread", *objects, "-o", str(made)]
    subprocess.run(link, check=True, capture_output=True)
    return made


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_part_of_a_loop_runs_once(threads: int, program: Path) -> None:
    assert subprocess.run([str(program), str(threads)], timeout=60).returncode == 0
