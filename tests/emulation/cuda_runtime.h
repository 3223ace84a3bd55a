// CUDA's language and runtime, as far as deqfast's kernels use them, on the CPU: every CUDA thread is a fiber, which runs
// until it waits for others. Blocks run one after another, those of a cooperative launch side by side. Fibers are
// resumed in an order that can be set: a result that depends on it shows a missing barrier.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <typeindex>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};
struct dim3 : uint3 {
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : uint3{x_, y_, z_} {}
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulation {

constexpr int kWarp = 32;
constexpr size_t kStack = 256 * 1024;

struct Barrier {
  int expected = 0, arrived = 0;
  std::vector<int> waiting;
};

struct Warp {
  Barrier barrier;
  uint64_t slots[2][kWarp];  // what the lanes exchange, in turns
};

struct Block {
  uint3 index;
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<char> dynamic;
  std::map<std::pair<int, std::type_index>, std::shared_ptr<void>> shared;
};

struct Fiber {
  Block* block;
  uint3 thread;
  int turn = 0;  // of the warp's slots
  bool done = false, started = false;
  ucontext_t context;
  jmp_buf resume;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<int> runnable;
  std::vector<char*> stacks;
  int current = -1;
  int order = 0;  // 0: first come first served, 1: last come, otherwise the seed of a random order
  std::mt19937 random;
  uint64_t launches = 0;
  jmp_buf scheduler;
  std::function<void()> body;
};

inline Machine machine;
inline uint3 thread_index, block_index;
inline dim3 block_size, grid_size;

inline Fiber& fiber() { return machine.fibers[machine.current]; }

// Leave the running fiber; it goes on when something makes it runnable.
inline void suspend() {
  if (_setjmp(fiber().resume) == 0) _longjmp(machine.scheduler, 1);
}

// Let the others run first, as a spinning thread must.
inline void yield() {
  auto& queue = machine.runnable;
  queue.insert(machine.order == 1 ? queue.begin() : queue.end(), machine.current);
  suspend();
}

inline void release(Barrier& barrier) {
  barrier.arrived = 0;
  for (int waiting : barrier.waiting) machine.runnable.push_back(waiting);
  barrier.waiting.clear();
}

inline void wait(Barrier& barrier) {
  if (++barrier.arrived == barrier.expected) {
    release(barrier);
    return;
  }
  barrier.waiting.push_back(machine.current);
  suspend();
}

// A thread that has ended no longer holds up the barriers of its block, as on a GPU.
inline void retire(Barrier& barrier) {
  --barrier.expected;
  if (barrier.expected > 0 && barrier.arrived == barrier.expected) release(barrier);
}

inline void entry() {
  machine.body();
  Fiber& self = fiber();
  self.done = true;
  retire(self.block->barrier);
  retire(self.block->warps[self.thread.x / kWarp].barrier);
  _longjmp(machine.scheduler, 1);
}

inline void start(int index) {
  Fiber& f = machine.fibers[index];
  if (static_cast<size_t>(index) >= machine.stacks.size()) {
    void* stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) abort();
    machine.stacks.push_back(static_cast<char*>(stack));
  }
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = machine.stacks[index];
  f.context.uc_stack.ss_size = kStack;
  f.context.uc_link = nullptr;
  makecontext(&f.context, &entry, 0);
}

inline int take() {
  auto& queue = machine.runnable;
  size_t at = 0;
  if (machine.order == 1) at = queue.size() - 1;
  if (machine.order > 1) at = machine.random() % queue.size();
  const int index = queue[at];
  queue.erase(queue.begin() + at);
  return index;
}

inline void run_fibers() {
  volatile size_t left = machine.fibers.size();
  while (left > 0) {
    if (machine.runnable.empty()) {
      fprintf(stderr, "emulation: deadlock, threads wait at a barrier that others never reach\n");
      abort();
    }
    machine.current = take();
    Fiber& f = fiber();
    thread_index = f.thread;
    block_index = f.block->index;
    if (_setjmp(machine.scheduler) == 0) {
      if (f.started) _longjmp(f.resume, 1);
      f.started = true;
      setcontext(&f.context);
    }
    if (fiber().done) left = left - 1;
  }
}

// Run `blocks` side by side.
inline void run_blocks(std::vector<Block>& blocks, unsigned threads) {
  machine.fibers = std::vector<Fiber>(blocks.size() * threads);
  machine.runnable.clear();
  int index = 0;
  for (Block& block : blocks) {
    for (unsigned t = 0; t < threads; ++t, ++index) {
      machine.fibers[index].block = &block;
      machine.fibers[index].thread.x = t;
      start(index);
      machine.runnable.push_back(index);
    }
  }
  run_fibers();
}

inline Block make_block(uint3 index, unsigned threads, size_t dynamic) {
  Block block;
  block.index = index;
  block.barrier.expected = static_cast<int>(threads);
  block.warps.resize((threads + kWarp - 1) / kWarp);
  for (size_t w = 0; w < block.warps.size(); ++w) {
    block.warps[w].barrier.expected = static_cast<int>(std::min<size_t>(kWarp, threads - w * kWarp));
  }
  block.dynamic.assign(dynamic + 64, static_cast<char>(0xff));
  return block;
}

inline void launch(dim3 grid, dim3 threads, size_t dynamic, bool together, std::function<void()> body) {
  ++machine.launches;
  machine.body = std::move(body);
  machine.random.seed(machine.order);
  grid_size = grid;
  block_size = threads;
  std::vector<Block> blocks;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blocks.push_back(make_block({x, y, z}, threads.x, dynamic));
        if (together) continue;
        run_blocks(blocks, threads.x);
        blocks.clear();
      }
    }
  }
  if (together) run_blocks(blocks, threads.x);
}

// A __shared__ variable: one per block, filled with bytes that read as NaN.
template <class T>
T& shared(int number) {
  auto& slot = fiber().block->shared[{number, std::type_index(typeid(T*))}];
  if (!slot) {
    slot = std::shared_ptr<void>(aligned_alloc(64, (sizeof(T) + 63) / 64 * 64), free);
    memset(slot.get(), 0xff, sizeof(T));
  }
  return *static_cast<T*>(slot.get());
}

template <class T>
T* dynamic_shared() {
  auto address = reinterpret_cast<uintptr_t>(fiber().block->dynamic.data());
  return reinterpret_cast<T*>((address + 63) / 64 * 64);
}

inline Warp& warp() { return fiber().block->warps[thread_index.x / kWarp]; }

// Every lane gives a value and sees those of all lanes. One rendezvous: the slots alternate.
template <class T>
const uint64_t* exchange(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  auto& slots = warp().slots[fiber().turn];
  fiber().turn ^= 1;
  memcpy(&slots[thread_index.x % kWarp], &value, sizeof value);
  wait(warp().barrier);
  return slots;
}

template <class T>
T read(const uint64_t* slots, int lane) {
  T value;
  memcpy(&value, &slots[lane], sizeof value);
  return value;
}

}  // namespace emulation

#define threadIdx (emulation::thread_index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)

inline void __syncthreads() { emulation::wait(emulation::fiber().block->barrier); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulation::wait(emulation::warp().barrier); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulation::yield(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::read<T>(emulation::exchange(value), (threadIdx.x % emulation::kWarp) ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::read<T>(emulation::exchange(value), lane);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int delta) {
  const int lane = threadIdx.x % emulation::kWarp, from = lane + delta;
  return emulation::read<T>(emulation::exchange(value), from < emulation::kWarp ? from : lane);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const uint64_t* slots = emulation::exchange(predicate != 0);
  unsigned votes = 0;
  for (int lane = 0; lane < emulation::kWarp; ++lane) votes |= unsigned(emulation::read<bool>(slots, lane)) << lane;
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }
inline int __syncthreads_or(int predicate) {
  int& any = emulation::shared<int>(-1);
  __syncthreads();
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  if (predicate) any = 1;
  __syncthreads();
  return any;
}
inline int __syncthreads_and(int predicate) { return !__syncthreads_or(!predicate); }

// Atomic, because no fiber is interrupted; a thread that spins on one lets the others run.
template <class T>
T atomicAdd(T* address, T value) {
  emulation::yield();
  const T before = *address;
  *address = before + value;
  return before;
}
template <class T>
T atomicSub(T* address, T value) {
  return atomicAdd(address, T(-value));
}
template <class T>
T atomicExch(T* address, T value) {
  emulation::yield();
  const T before = *address;
  *address = value;
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
inline int multiprocessors = 4, shared_memory = 99 * 1024;  // of the device that is emulated; tests may change them

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
  emulation::launch(grid, threads, dynamic, true, [&] { kernel(params); });
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  memset(address, value, bytes);
  return cudaSuccess;
}

extern "C" __attribute__((visibility("default"), used)) inline void emulation_set_order(int order) {
  emulation::machine.order = order;
}
extern "C" __attribute__((visibility("default"), used)) inline uint64_t emulation_launches() {
  return emulation::machine.launches;
}
extern "C" __attribute__((visibility("default"), used)) inline void emulation_set_device(int processors, int shared) {
  emulation::multiprocessors = processors;
  emulation::shared_memory = shared;
}
// The stream of a torch that runs on the CPU.
inline int32_t emulated_current_stream(int32_t, void** stream) { return *stream = nullptr, 0; }
#define aoti_torch_get_current_cuda_stream emulated_current_stream
