// The machine that emulates a GPU, see machine.cpp, as cuda_runtime.h uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>

struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};
struct dim3 : uint3 {
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : uint3{x_, y_, z_} {}
};

namespace emulation {

constexpr int kWarp = 32;

// A place in the source: as a default argument, where the function is called.
struct Site {
  const char* file = nullptr;
  int line = 0;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// Run a kernel, whose call is `body`; `together`: a cooperative launch. Throws what the kernel does wrong.
void launch(const char* kernel, dim3 grid, dim3 threads, size_t dynamic, bool together,
            const std::function<void()>& body);
[[noreturn]] void fail(const std::string& message);

// Of the running thread, which is always the same for a function.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) dim3 block_size();
__attribute__((const)) dim3 grid_size();

// The block's barrier; whether any of its threads has a vote.
bool meet(bool vote, Site site);
// Every lane of the mask gives a value, and sees those of all.
const uint64_t* exchange(unsigned mask, uint64_t value, Site site);
void yield();
void fence();
// Before an atomic operation.
void atomic(const void* address);
// The block's variable of this key, filled with bytes that read as NaN.
void* shared(const void* key, size_t bytes);
void* dynamic_shared();
uint32_t shared_address(const void* pointer);
// An instruction of PTX and its operands.
void ptx(const std::string& instruction, std::initializer_list<uint64_t> operands);

extern int multiprocessors, shared_memory;  // of the device; tests may change them

}  // namespace emulation
