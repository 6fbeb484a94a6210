// A CUDA driver in which a chosen call fails, for crates/cuda/tests/conformance/faults.rs.
//
//     cc -shared -fPIC -o libcuda.so driver.c -ldl        then LD_LIBRARY_PATH=<its folder>
//
// It forwards every function that the library calls to the real driver, libcuda.so.1 of the system. A call that must fail returns
// CUDA_ERROR_UNKNOWN and does nothing.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#define FUNCTIONS(X) \
  X(cuCtxDestroy_v2) X(cuCtxGetCurrent) X(cuCtxSetCurrent) X(cuCtxSynchronize) X(cuDeviceGet) X(cuDeviceGetAttribute) X(cuDeviceGetCount) X(cuDeviceGetName) \
  X(cuDevicePrimaryCtxRelease_v2) X(cuDevicePrimaryCtxRetain) X(cuDeviceTotalMem_v2) X(cuEventCreate) X(cuEventDestroy_v2) \
  X(cuEventElapsedTime) X(cuEventQuery) X(cuEventRecord) X(cuEventSynchronize) X(cuFuncGetAttribute) X(cuFuncSetAttribute) X(cuGetErrorName) \
  X(cuGetErrorString) X(cuInit) X(cuLaunchKernel) X(cuLaunchKernelEx) X(cuMemAddressFree) X(cuMemAddressReserve) X(cuMemAlloc_v2) X(cuMemCreate) \
  X(cuMemFreeHost) X(cuMemFree_v2) X(cuMemGetAllocationGranularity) X(cuMemGetInfo_v2) X(cuMemHostAlloc) X(cuMemHostGetDevicePointer_v2) \
  X(cuMemMap) X(cuMemRelease) X(cuMemSetAccess) X(cuMemUnmap) X(cuMemcpyDtoDAsync_v2) X(cuMemcpyDtoH_v2) X(cuMemcpyHtoD_v2) X(cuMemsetD8Async) \
  X(cuMemsetD8_v2) X(cuModuleGetFunction) X(cuModuleLoadData) X(cuModuleUnload) X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
  X(cuStreamCreate) X(cuStreamCreateWithPriority) X(cuStreamDestroy_v2) X(cuStreamGetPriority) X(cuStreamQuery) X(cuStreamSynchronize) \
  X(cuStreamWaitEvent) X(cuDriverGetVersion) X(cuCtxGetStreamPriorityRange) X(cuMemcpyDtoHAsync_v2) X(cuMemcpyHtoDAsync_v2) X(cuMemFreeAsync) \
  X(cuMemAllocAsync) X(cuCtxGetDevice) X(cuModuleLoad) X(cuModuleLoadDataEx) X(cuModuleGetGlobal_v2) X(cuLibraryLoadData) X(cuLibraryGetKernel)

enum {
#define NUMBER(name) N_##name,
  FUNCTIONS(NUMBER) COUNT
};
static const char* const names[COUNT] = {
#define NAME(name) #name,
    FUNCTIONS(NAME)};
void* sok_real[COUNT];

static long calls_left = -1;
static int failed = -1;

// Makes one of the following calls fail: the one after `calls` other calls. None fails if `calls` is negative.
void sok_fault_arm(long calls) {
  __atomic_store_n(&failed, -1, __ATOMIC_SEQ_CST);
  __atomic_store_n(&calls_left, calls, __ATOMIC_SEQ_CST);
}

// Disarms, and returns the name of the function that has failed since `sok_fault_arm`, or null.
const char* sok_fault_disarm(void) {
  __atomic_store_n(&calls_left, -1, __ATOMIC_SEQ_CST);
  return failed < 0 ? NULL : names[failed];
}

int sok_fault_check(int number) {
  if (__atomic_load_n(&calls_left, __ATOMIC_SEQ_CST) < 0) return 0;
  if (__atomic_sub_fetch(&calls_left, 1, __ATOMIC_SEQ_CST) != -1) return 0;
  failed = number;
  return 999;
}

__attribute__((constructor)) static void load(void) {
  const char* path = getenv("SOK_REAL_CUDA");
  void* driver = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver) {
    fprintf(stderr, "no CUDA driver: %s\n", dlerror());
    return;
  }
  for (int i = 0; i < COUNT; ++i) sok_real[i] = dlsym(driver, names[i]);
}

// A forwarding function. It restores the argument registers, so that it works for any signature.
#define FUNCTION(name) __asm__( \
    ".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n" \
    "push %rdi\npush %rsi\npush %rdx\npush %rcx\npush %r8\npush %r9\nsub $8, %rsp\n" \
    "mov $SOK_N_" #name ", %edi\ncall sok_fault_check@PLT\n" \
    "add $8, %rsp\npop %r9\npop %r8\npop %rcx\npop %rdx\npop %rsi\npop %rdi\n" \
    "test %eax, %eax\njz 1f\nret\n" \
    "1: mov sok_real@GOTPCREL(%rip), %r11\njmp *(SOK_N_" #name " * 8)(%r11)\n");
#define CONSTANT(name) __asm__(".set SOK_N_" #name ", %c0" ::"i"(N_##name));
static __attribute__((used)) void constants(void) { FUNCTIONS(CONSTANT) }
FUNCTIONS(FUNCTION)
