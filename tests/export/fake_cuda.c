// Libraries in place of CUDA's driver and run-time, whose only device is the host.
//
// The library that TVMBRIDGE_FAKE_KERNELS names has the kernels (tests/schedules/gpu/emulator.h): a
// launch runs one there. The machine code of a module is never run, but must be the one of a file.
// A graph has the launches between the begin and the end of a capture.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  const char* (*run)(void**, int, int, int);
  int (*count)(void);
  char name[256];
} Kernel;

#define OK(name) \
  int name() { return 0; }

#ifdef DRIVER
typedef struct {
  unsigned grid[3], block[3], shared;
} Config;

int cuModuleLoadData(void** module, const char* image) {
  *module = (void*)1;
  return strncmp(image, "\x7f" "ELF of tests", 13) ? 200 : 0;
}
int cuModuleGetFunction(Kernel** function, void* module, const char* name) {
  void* library = dlopen(getenv("TVMBRIDGE_FAKE_KERNELS"), RTLD_NOW);
  Kernel* kernel = calloc(1, sizeof(Kernel));
  snprintf(kernel->name, 256, "run_%s", name);
  kernel->run = (const char* (*)(void**, int, int, int))dlsym(library, kernel->name);
  snprintf(kernel->name, 256, "count_%s", name);
  kernel->count = (int (*)(void))dlsym(library, kernel->name);
  *function = kernel;
  return kernel->run && kernel->count ? 0 : 500;
}
typedef struct Launch {
  struct Launch* next;
  Config config;
  Kernel* kernel;
  void* pointers[64];
} Launch;
static Launch *graph, *last;  // of the capture; its first member is no launch

static int run(const Launch* launch) {
  const Config* config = &launch->config;
  Kernel* kernel = launch->kernel;
  const char* failure =
      kernel->run((void**)launch->pointers, config->grid[0], config->block[0], 0);
  if (failure && *failure) fprintf(stderr, "%s: %s\n", kernel->name, failure);
  return failure && *failure ? 719 : 0;
}
int cuLaunchKernelEx(const Config* config, Kernel* kernel, void** given, void** extra) {
  Launch* launch = calloc(1, sizeof(Launch));
  launch->config = *config;
  launch->kernel = kernel;
  for (int i = 0; i < kernel->count(); ++i) launch->pointers[i] = *(void**)given[i];
  if (!graph) return run(launch);
  last = last->next = launch;
  return 0;
}
void* fake_capture(int begins) {
  void* captured = graph;
  graph = last = begins ? calloc(1, sizeof(Launch)) : NULL;
  return captured;
}
int fake_replay(const Launch* captured) {
  int failure = captured->next ? 0 : 1;
  while (!failure && (captured = captured->next)) failure = run(captured);
  return failure;
}
static int named(const char** text) {
  *text = "an error of the fake driver";
  return 0;
}
int cuGetErrorName(int code, const char** text) { return named(text); }
int cuGetErrorString(int code, const char** text) { return named(text); }
OK(cuModuleUnload) OK(cuFuncSetAttribute) OK(cuTensorMapEncodeTiled) OK(cuDeviceGetName)
#else
static void* driver(const char* name) { return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name); }
int cudaStreamBeginCapture(void* stream, int mode) {
  return ((void* (*)(int))driver("fake_capture"))(1), 0;
}
int cudaStreamEndCapture(void* stream, void** graph) {
  return *graph = ((void* (*)(int))driver("fake_capture"))(0), 0;
}
int cudaGraphInstantiate(void** code, void* graph, unsigned long long flags) {
  return *code = graph, 0;
}
int cudaGraphLaunch(void* code, void* stream) {
  return ((int (*)(void*))driver("fake_replay"))(code);
}
int cudaGetDeviceCount(int* count) { return *count = 1, 0; }
int cudaGetDevice(int* device) { return *device = 0, 0; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 10 ? 32 : 1024;
  return 0;
}
int cudaMalloc(void** place, size_t size) { return posix_memalign(place, 256, size + 256); }
int cudaMallocHost(void** place, size_t size) { return cudaMalloc(place, size); }
int cudaFree(void* place) { return free(place), 0; }
int cudaFreeHost(void* place) { return free(place), 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  return memcpy(to, from, size), 0;
}
const char* cudaGetErrorString(int code) { return "an error of the fake run-time"; }
const char* cudaGetErrorName(int code) { return "cudaErrorFake"; }
OK(cudaSetDevice) OK(cudaGetLastError) OK(cudaPeekAtLastError) OK(cudaGetDeviceProperties)
OK(cudaEventCreate) OK(cudaEventDestroy) OK(cudaEventElapsedTime) OK(cudaEventRecord)
OK(cudaEventSynchronize) OK(cudaGraphDestroy) OK(cudaGraphExecDestroy) OK(cudaMemGetInfo)
OK(cudaMemcpyPeerAsync) OK(cudaStreamCreate) OK(cudaStreamCreateWithFlags) OK(cudaStreamDestroy)
OK(cudaStreamSynchronize) OK(cudaStreamWaitEvent)
#endif
