// CUDA's language and runtime, as far as deqfast's kernels use them, on the CPU; see machine.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "machine.h"

#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// Replacement of reinterpret_cast: vectors are loaded and stored through it, so it checks their alignment.
template <class To, class From>
To checked_cast(From from) {
  if constexpr (std::is_pointer_v<To>) {
    constexpr size_t alignment = alignof(std::remove_pointer_t<To>);
    if (reinterpret_cast<uintptr_t>(from) % alignment) emulation::fail("an address that is not aligned");
  }
  return reinterpret_cast<To>(from);
}

// Code whose accesses do not belong to a kernel.
#define UNCHECKED () __attribute__((no_sanitize("thread")))

#define threadIdx (emulation::thread_index())
#define blockIdx (emulation::block_index())
#define blockDim (emulation::block_size())
#define gridDim (emulation::grid_size())

using emulation::Site;
constexpr unsigned kAllLanes = 0xffffffffu;

inline void __syncthreads(Site site = Site::here()) { emulation::meet(false, site); }
inline int __syncthreads_or(int predicate, Site site = Site::here()) { return emulation::meet(predicate, site); }
inline int __syncthreads_and(int predicate, Site site = Site::here()) { return !emulation::meet(!predicate, site); }
inline void __syncwarp(unsigned mask = kAllLanes, Site site = Site::here()) { emulation::exchange(mask, 0, site); }
inline void __threadfence() { emulation::fence(); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulation::yield(); }

// The value of another lane.
template <class T>
T of_lane(unsigned mask, T value, int lane, Site site) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  if (!(mask >> lane & 1)) emulation::fail("a shuffle reads a lane that its mask leaves out");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = emulation::exchange(mask, bits, site)[lane];
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, Site site = Site::here()) {
  return of_lane(mask, value, threadIdx.x % emulation::kWarp ^ lanes, site);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, Site site = Site::here()) {
  return of_lane(mask, value, lane % emulation::kWarp, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int delta, Site site = Site::here()) {
  const int lane = threadIdx.x % emulation::kWarp, from = lane + delta;
  return of_lane(mask, value, from < emulation::kWarp ? from : lane, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, Site site = Site::here()) {
  const uint64_t* slots = emulation::exchange(mask, predicate != 0, site);
  unsigned votes = 0;
  for (int lane = 0; lane < emulation::kWarp; ++lane) votes |= (mask >> lane & 1 & unsigned(slots[lane])) << lane;
  return votes;
}
inline int __any_sync(unsigned mask, int predicate, Site site = Site::here()) {
  return __ballot_sync(mask, predicate, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, Site site = Site::here()) {
  return __ballot_sync(mask, predicate, site) == mask;
}

inline uint64_t __cvta_generic_to_shared(const void* pointer) { return emulation::shared_address(pointer); }
inline uint64_t __cvta_generic_to_global(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// Atomic, because no fiber is interrupted; its accesses are not plain ones.
#define DEQFAST_ATOMIC __attribute__((no_sanitize("thread"), noinline))
template <class T>
DEQFAST_ATOMIC T atomicAdd(T* address, T value) {
  emulation::atomic(address);
  const T before = *address;
  *address = before + value;
  emulation::yield();
  return before;
}
template <class T>
T atomicSub(T* address, T value) {
  return atomicAdd(address, T(-value));
}
template <class T>
DEQFAST_ATOMIC T atomicExch(T* address, T value) {
  emulation::atomic(address);
  const T before = *address;
  *address = value;
  emulation::yield();
  return before;
}
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stcg(T* address, T value) {
  *address = value;
}

using std::max;
using std::min;
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

typedef int cudaError_t;
typedef void* cudaStream_t;
constexpr cudaError_t cudaSuccess = 0;
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrCooperativeLaunch,
};
namespace emulation {
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
}  // namespace emulation
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
template <class F>
cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount           ? emulation::multiprocessors
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? emulation::shared_memory
                                                                  : 1;
  return cudaSuccess;
}
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
template <class P>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(P), dim3 grid, dim3 threads, void** arguments, size_t dynamic,
                                        cudaStream_t) {
  auto& params = *static_cast<std::remove_const_t<P>*>(arguments[0]);
  emulation::launch("a cooperative kernel", grid, threads, dynamic, true, [&] UNCHECKED { kernel(params); });
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  memset(address, value, bytes);
  return cudaSuccess;
}

// The stream of a torch that runs on the CPU.
inline int32_t emulated_current_stream(int32_t, void** stream) { return *stream = nullptr, 0; }
#define aoti_torch_get_current_cuda_stream emulated_current_stream
