// A GPU on one thread of a CPU. Every CUDA thread is a fiber, which runs until it waits for others. The order in which
// fibers resume can be set, and blocks run in a random one: results that depend on the order show a missing barrier.
// If blocks share samples, the accesses of a block to global memory are compared with those of other blocks. Two
// accesses are in order if a fence and an atomic operation follow the first, and an atomic or volatile read and a fence
// precede the second. Anything else is an error, in whichever order they came this time. The kernels are compiled with
// -fsanitize=thread, which calls a function here at every access.
// The destination of cp.async reads as NaN until the thread has waited for it.
// Not emulated: time, caches, launch limits, streams, capture of graphs.
#include "machine.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace emulation {

int multiprocessors = 4, shared_memory = 99 * 1024;

namespace {

constexpr size_t kStack = 256 * 1024, kMostFibers = 1 << 14;
constexpr size_t kArena = 256 * 1024, kMostBlocks = 64;  // shared memory of a block, and blocks side by side
constexpr size_t kSideBySide = 4;                        // of a launch in which several blocks share a sample
constexpr int kMostSpins = 10'000'000;

using Time = uint32_t;                    // counts barriers and fences
using Clocks = std::map<uint32_t, Time>;  // by thread, or by all threads of a block: earlier accesses are in order

void join(Clocks& clocks, const Clocks& others) {
  for (const auto& [who, time] : others) clocks[who] = std::max(clocks[who], time);
}

// A thread's number in the grid, which is also its key; and the number of all threads of its block.
constexpr uint32_t kThreads = 2048;
constexpr uint32_t all_of(uint32_t thread) { return thread / kThreads * kThreads + kThreads - 1; }

// Knowledge of a thread since the block's last barrier, or of the block until then.
struct Knowledge {
  Clocks seen;       // what others gave to the atomics that were read
  Clocks known;      // the same before a fence: later accesses come after it
  Clocks published;  // own accesses before a fence: later atomics give them to others
};

// Lanes that meet with one mask.
struct Group {
  unsigned waiting = 0;
  int round = 0;
  Site site;
  uint64_t slots[2][kWarp];  // values that the lanes exchange, alternately
};

struct Warp {
  unsigned alive = 0, waiting = 0;  // lanes
  Group all;                         // lanes, in one group
  std::map<unsigned, Group> others;  // by mask

  Group& group(unsigned mask) { return mask == ~0u ? all : others[mask]; }
  // A group that waits for some of these lanes, if there is one.
  const Group* holding(unsigned lanes) const {
    if (all.waiting) return &all;
    for (const auto& [mask, group] : others) {
      if (group.waiting && (mask & lanes)) return &group;
    }
    return nullptr;
  }
};

struct Block {
  int number;
  uint3 index;
  char* arena;
  size_t used = 0, dynamic = 0;
  int alive, arrived = 0, round = 0;
  bool votes[2] = {};
  Site site;
  std::vector<int> waiting, learned;  // fibers
  std::vector<Warp> warps;
  std::vector<std::pair<const void*, void*>> variables;
  Knowledge knowledge;
  Time barrier = 0;  // the last one
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  int group;
};

struct Fiber {
  Block* block;
  unsigned thread;
  bool done = false, started = false;
  Knowledge knowledge;
  std::vector<Copy> copies;
  int groups = 0;  // of copies, committed
  jmp_buf resume;

  uint32_t number() const { return block->number * kThreads + thread; }
  Warp& warp() const { return block->warps[thread / kWarp]; }
  unsigned bit() const { return 1u << thread % kWarp; }
};

struct Access {
  Time time;
  uint32_t thread;  // Fiber::number

  int block() const { return thread / kThreads; }
};
struct Cell {
  Access write, read;  // the last ones
};
constexpr uintptr_t kPage = 4096;

std::vector<Fiber> fibers;
std::deque<int> runnable;
int current = -1, order = 0;  // 0: first come first served, 1: last come, otherwise the seed of a random order
std::mt19937 random_bits;
uint64_t launches = 0;
jmp_buf scheduler;
const std::function<void()>* body;
dim3 grid, threads;
std::string error;
int spins = 0;
char *stacks = nullptr, *arenas = nullptr;

Time now = 1, begun = 1;
bool watched = false;  // global memory: where blocks share samples
std::unordered_map<uintptr_t, Clocks> atomics;  // by address
std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> shadow;
struct {
  uintptr_t page = 0;
  Cell* cells = nullptr;
} recent[1024];
struct {
  uintptr_t begin = 0;
  size_t size = SIZE_MAX;
} own;  // addresses that the running thread may use; all while no kernel runs

Fiber& fiber() { return fibers[current]; }

std::string name_of(uint32_t thread) {
  return "thread " + std::to_string(thread % kThreads) + " of block " + std::to_string(thread / kThreads);
}

std::string name_of(Site site) {
  const char* base = strrchr(site.file, '/');
  return std::string(base ? base + 1 : site.file) + ":" + std::to_string(site.line);
}

bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0); }

// Leave the running fiber; it continues when something makes it runnable.
void suspend() {
  if (_setjmp(fiber().resume) == 0) _longjmp(scheduler, 1);
}

void release(Block& block) {
  for (int waiting : block.waiting) runnable.push_back(waiting);
  block.waiting.clear();
  block.arrived = spins = 0;
  block.votes[++block.round % 2] = false;
  block.barrier = ++now;
  for (int index : block.learned) {
    Knowledge& of_thread = fibers[index].knowledge;
    join(block.knowledge.known, of_thread.known);
    join(block.knowledge.seen, of_thread.seen);
    join(block.knowledge.published, of_thread.published);
    of_thread = {};
  }
  block.learned.clear();
}

// A thread that has ended no longer holds up the barrier of its block, as on a GPU.
void entry() {
  (*body)();
  Fiber& self = fiber();
  Block& block = *self.block;
  self.done = true;
  self.warp().alive &= ~self.bit();
  if (const Group* group = self.warp().holding(self.bit())) {
    fail(name_of(self.number()) + " has ended, and lanes wait for it at " + name_of(group->site));
  }
  if (--block.alive > 0 && block.arrived == block.alive) release(block);
  _longjmp(scheduler, 1);
}

int take() {
  if (order > 1) std::swap(runnable[random_bits() % runnable.size()], runnable.back());
  const int index = order == 0 ? runnable.front() : runnable.back();
  order == 0 ? runnable.pop_front() : runnable.pop_back();
  return index;
}

void run_fibers() {
  volatile size_t left = fibers.size();
  while (left > 0) {
    if (runnable.empty()) {
      error = "deadlock: threads wait at";
      for (const Fiber& f : fibers) {
        if (!f.done && f.block->arrived) return void(error += " " + name_of(f.block->site));
        if (const Group* group = f.warp().holding(~0u)) return void(error += " " + name_of(group->site));
      }
      return;
    }
    current = take();
    Fiber& f = fiber();
    own = {reinterpret_cast<uintptr_t>(f.block->arena), f.block->used};
    if (_setjmp(scheduler) == 0) {
      if (f.started) _longjmp(f.resume, 1);
      f.started = true;
      static ucontext_t context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks + current * kStack;
      context.uc_stack.ss_size = kStack;
      makecontext(&context, &entry, 0);
      setcontext(&context);
    }
    if (!error.empty()) return;
    if (fiber().done) left = left - 1;
  }
}

// Run blocks concurrently.
void run_blocks(std::vector<Block>& blocks) {
  current = -1;
  if (blocks.size() > kMostBlocks || blocks.size() * threads.x > kMostFibers) fail("too many threads side by side");
  fibers = std::vector<Fiber>(blocks.size() * threads.x);
  runnable.clear();
  int index = 0;
  for (Block& block : blocks) {
    block.arena = arenas + (&block - blocks.data()) * kArena;
    memset(block.arena, 0xff, block.dynamic);
    block.used = block.dynamic;
    block.alive = threads.x;
    block.warps.resize((threads.x + kWarp - 1) / kWarp);
    for (unsigned t = 0; t < threads.x; ++t, ++index) {
      Fiber& f = fibers[index];
      f.block = &block;
      f.thread = t;
      f.warp().alive |= f.bit();
      runnable.push_back(index);
    }
  }
  run_fibers();
}

Cell* cells_of(uintptr_t page) {
  auto& entry = recent[page % 1024];
  if (entry.page != page) {
    auto& cells = shadow[page];
    if (!cells) cells = std::make_unique<Cell[]>(kPage);
    entry = {page, cells.get()};
  }
  return entry.cells;
}

Cell& cell(uintptr_t at) { return cells_of(at / kPage)[at % 4 * (kPage / 4) + at % kPage / 4]; }

bool knows(const Clocks& clocks, uint32_t who, Time time) {
  const auto found = clocks.find(who);
  return found != clocks.end() && found->second > time;
}

// Check an access of another block before an access of the running thread.
void check(const Access& before, bool written, bool writes) {
  for (const Clocks* known : {&fiber().knowledge.known, &fiber().block->knowledge.known}) {
    if (knows(*known, before.thread, before.time) || knows(*known, all_of(before.thread), before.time)) return;
  }
  fail(name_of(fiber().number()) + (writes ? " writes" : " reads") + " global memory that " + name_of(before.thread) +
       (written ? " has written" : " has read") + ", without fences and an atomic in between");
}

void touch_global(uintptr_t at, size_t bytes, bool writes) {
  const Access access{now, fiber().number()};
  const auto is_of_others = [&](const Access& before) {
    return before.time >= begun && before.block() != access.block();
  };
  for (const uintptr_t end = at + bytes; at < end; at += 4) {
    Cell& c = cell(at);
    if (is_of_others(c.write)) check(c.write, true, writes);
    if (writes && is_of_others(c.read)) check(c.read, false, true);
    (writes ? c.write : c.read) = access;
  }
}

void touch_elsewhere(uintptr_t at, size_t bytes, bool writes) {
  if (at - reinterpret_cast<uintptr_t>(stacks) < kMostFibers * kStack) return;
  if (at - reinterpret_cast<uintptr_t>(arenas) < kMostBlocks * kArena) {
    fail(name_of(fiber().number()) + (writes ? " writes" : " reads") + " beyond the shared memory of its block");
  }
  if (watched) touch_global(at, bytes, writes);
}

inline void touch(const void* address, size_t bytes, bool writes) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (at - own.begin >= own.size) touch_elsewhere(at, bytes, writes);
}

// Take part in the order that an atomic or volatile variable makes.
void synchronise(const void* address, bool reads, bool writes) {
  const Fiber& f = fiber();
  Knowledge &own = fiber().knowledge, &of_block = f.block->knowledge;
  Clocks& clocks = atomics[reinterpret_cast<uintptr_t>(address)];
  f.block->learned.push_back(current);
  if (reads) join(own.seen, clocks);
  if (!writes) return;
  for (const Clocks* given : {&own.known, &of_block.known, &own.published, &of_block.published}) join(clocks, *given);
  spins = 0;
}

void finish_copies(int left) {
  auto& copies = fiber().copies;
  size_t done = 0;
  for (; done < copies.size() && copies[done].group <= fiber().groups - left; ++done) {
    const Copy& copy = copies[done];
    memcpy(copy.to, copy.from, copy.bytes);  // not checked: others may write what the thread will not use
  }
  copies.erase(copies.begin(), copies.begin() + done);
}

}  // namespace

void fail(const std::string& message) {
  error = message;
  if (current >= 0) _longjmp(scheduler, 1);
  throw std::runtime_error(message);
}

void launch(const char* kernel, dim3 grid_, dim3 threads_, size_t dynamic, bool together,
            const std::function<void()>& body_) {
  if (!stacks) {
    const size_t bytes = kMostFibers * kStack + kMostBlocks * kArena;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("the emulation cannot reserve stacks");
    stacks = static_cast<char*>(memory);
    arenas = stacks + kMostFibers * kStack;
  }
  ++launches;
  body = &body_;
  grid = grid_;
  threads = threads_;
  random_bits.seed(order);
  begun = ++now;
  if (shadow.size() > 4096) {
    shadow.clear();
    for (auto& entry : recent) entry = {};
  }
  atomics.clear();
  std::vector<Block> blocks;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        Block block;
        block.number = blocks.size();
        block.index = {x, y, z};
        block.dynamic = dynamic;
        blocks.push_back(block);
      }
    }
  }
  watched = together || grid.y > 1;
  for (size_t left = blocks.size(); left > 1; --left) std::swap(blocks[random_bits() % left], blocks[left - 1]);
  const size_t size = together ? blocks.size() : grid.y > 1 ? kSideBySide : 1;
  error.clear();
  spins = 0;
  for (size_t first = 0; first < blocks.size() && error.empty(); first += size) {
    const auto end = blocks.begin() + std::min(first + size, blocks.size());
    std::vector<Block> wave(blocks.begin() + first, end);
    run_blocks(wave);
  }
  current = -1;
  own = {0, SIZE_MAX};
  if (!error.empty()) throw std::runtime_error(std::string("emulation of ") + kernel + ": " + error);
}

uint3 thread_index() { return {fiber().thread, 0, 0}; }
uint3 block_index() { return fiber().block->index; }
dim3 block_size() { return threads; }
dim3 grid_size() { return grid; }

bool meet(bool vote, Site site) {
  Block& block = *fiber().block;
  if (block.arrived && !same(block.site, site)) {
    fail("threads of a block are at " + name_of(block.site) + " and at " + name_of(site));
  }
  block.site = site;
  bool& result = block.votes[block.round % 2];
  result = result || vote;
  if (++block.arrived == block.alive) {
    release(block);
  } else {
    block.waiting.push_back(current);
    suspend();
  }
  return result;
}

const uint64_t* exchange(unsigned mask, uint64_t value, Site site) {
  Fiber& self = fiber();
  Warp& warp = self.warp();
  Group& group = warp.group(mask);
  const bool apart = group.waiting && !same(group.site, site);
  if (!(mask & self.bit()) || (mask & ~warp.alive) || (warp.waiting & mask & ~group.waiting) || apart) {
    const char* what = !(mask & self.bit())   ? ": its mask leaves itself out"
                       : mask & ~warp.alive ? ": its mask names lanes that have ended"
                       : apart              ? ": other lanes are elsewhere with its mask"
                                            : ": its mask names lanes that wait with another mask";
    fail(name_of(site) + ", " + name_of(self.number()) + what);
  }
  group.site = site;
  uint64_t* slots = group.slots[group.round % 2];
  slots[self.thread % kWarp] = value;
  group.waiting |= self.bit();
  warp.waiting |= self.bit();
  if (group.waiting != mask) {
    suspend();
    return slots;
  }
  ++group.round;
  group.waiting = 0;
  warp.waiting &= ~mask;
  const int first = current - self.thread % kWarp;
  for (int lane = 0; lane < kWarp; ++lane) {
    if (first + lane != current && (mask >> lane & 1)) runnable.push_back(first + lane);
  }
  return slots;
}

// Let the others run first, as a spinning thread must.
void yield() {
  if (++spins > kMostSpins) fail("threads spin for ever");
  order == 1 ? runnable.push_front(current) : runnable.push_back(current);
  suspend();
}

void fence() {
  Fiber& f = fiber();
  f.block->learned.push_back(current);
  f.knowledge.published[f.number()] = ++now;
  f.knowledge.published[all_of(f.number())] = f.block->barrier;
  join(f.knowledge.known, f.knowledge.seen);
  join(f.knowledge.known, f.block->knowledge.seen);
}

void atomic(const void* address) {
  yield();
  synchronise(address, true, true);
}

void* shared(const void* key, size_t bytes) {
  Block& block = *fiber().block;
  for (const auto& [known, variable] : block.variables) {
    if (known == key) return variable;
  }
  const size_t begin = (block.used + 63) / 64 * 64;
  if (begin + bytes > kArena) fail("the shared memory of a block is full");
  void* variable = memset(block.arena + begin, 0xff, bytes);
  block.variables.push_back({key, variable});
  own.size = block.used = begin + bytes;
  return variable;
}

void* dynamic_shared() { return fiber().block->arena; }

uint32_t shared_address(const void* pointer) { return static_cast<const char*>(pointer) - arenas; }

void ptx(const std::string& instruction, std::initializer_list<uint64_t> operands) {
  const auto is = [&](const char* start) { return instruction.rfind(start, 0) == 0; };
  const auto operand = [&](int i) { return operands.begin()[i]; };
  Fiber& f = fiber();
  if (is("st.global.v4.u32 ")) {
    const auto to = reinterpret_cast<unsigned*>(operand(0));
    if (operand(0) % 16) fail("a store of 16 bytes that does not start on them");
    touch(to, 16, true);
    for (int i = 0; i < 4; ++i) to[i] = static_cast<unsigned>(operand(1 + i));
  } else if (is("cp.async.ca.shared.global ") || is("cp.async.cg.shared.global ")) {
    const size_t bytes = operand(2);
    const Copy copy{arenas + operand(0), reinterpret_cast<const void*>(operand(1)), bytes, f.groups + 1};
    if (bytes != 16 && (is("cp.async.cg") || (bytes != 4 && bytes != 8))) fail("cp.async copies 4, 8 or 16 bytes, and .cg only 16");
    if (operand(0) % bytes || operand(1) % bytes) fail("cp.async that is not aligned");
    touch(copy.to, bytes, true);
    memset(copy.to, 0xff, bytes);
    f.copies.push_back(copy);
  } else if (is("cp.async.commit_group;")) {
    ++f.groups;
  } else if (is("cp.async.wait_all;")) {
    ++f.groups;
    finish_copies(0);
  } else if (is("cp.async.wait_group ")) {
    finish_copies(operands.size() ? static_cast<int>(operand(0)) : atoi(instruction.c_str() + 20));
  } else {
    fail("unknown instruction " + instruction);
  }
}

}  // namespace emulation

#define EXPORT extern "C" __attribute__((visibility("default"), used))

EXPORT void emulation_set_order(int order) { emulation::order = order; }
EXPORT uint64_t emulation_launches() { return emulation::launches; }
EXPORT void emulation_set_device(int processors, int shared) {
  emulation::multiprocessors = processors;
  emulation::shared_memory = shared;
}

// What the compiler calls before an access to memory.
#define ACCESS(bytes)                                                                                      \
  EXPORT void __tsan_read##bytes(void* at) { emulation::touch(at, bytes, false); }                         \
  EXPORT void __tsan_write##bytes(void* at) { emulation::touch(at, bytes, true); }                         \
  EXPORT void __tsan_unaligned_read##bytes(void* at) { emulation::touch(at, bytes, false); }               \
  EXPORT void __tsan_unaligned_write##bytes(void* at) { emulation::touch(at, bytes, true); }               \
  EXPORT void __tsan_volatile_read##bytes(void* at) {                                                      \
    if (emulation::current < 0) return;                                                                    \
    emulation::yield();                                                                                    \
    emulation::synchronise(at, true, false);                                                               \
  }                                                                                                        \
  EXPORT void __tsan_volatile_write##bytes(void* at) {                                                     \
    if (emulation::current >= 0) emulation::synchronise(at, false, true);                                  \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
EXPORT void __tsan_read_range(void* at, size_t bytes) { emulation::touch(at, bytes, false); }
EXPORT void __tsan_write_range(void* at, size_t bytes) { emulation::touch(at, bytes, true); }
EXPORT void __tsan_vptr_update(void**, void*) {}
EXPORT void __tsan_vptr_read(void**) {}
EXPORT void __tsan_init() {}

// Atomic operations in the host's code, which are otherwise done directly.
#define ATOMIC(bits)                                                                                              \
  EXPORT int##bits##_t __tsan_atomic##bits##_load(const volatile int##bits##_t* at, int) {                        \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                                 \
  }                                                                                                               \
  EXPORT int##bits##_t __tsan_atomic##bits##_fetch_add(volatile int##bits##_t* at, int##bits##_t by, int) {       \
    return __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST);                                                          \
  }
ATOMIC(8)
ATOMIC(32)
ATOMIC(64)
