// How a step goes over the samples, and how threads share them. It sweeps over a sample's elements, decides from the sums
// it has taken, and sweeps again. A sweep goes chunk by chunk, and the sums of the chunks are added in order, so that the
// bits do not depend on the threads.
//
// A step is a class with
//   batch, dim             as everywhere
//   rows()                 rows of `dim` elements that a sweep reads: the work on a sample
//   slots(part)            sums of a sweep, of the first and of the second
//   Sample                 what is kept of a sample between its sweeps, made from the step
//   runs(row)              whether the sample takes part
//   first(row, chunk, sums), decide(row, sums, sample), second(row, chunk, sample, sums), finish(row, sums, sample)
// and `void run(const Step&, Split<Step>*, int64_t begin, int64_t end)`, which is `work` for every instruction set.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "sweeps.h"

namespace deqfast {

struct Chunk {
  static constexpr int64_t size = 4096;  // elements
  int64_t begin, count;

  static int64_t number(int64_t dim) { return std::max<int64_t>((dim + size - 1) / size, 1); }
  static Chunk at(int64_t index, int64_t dim) { return {index * size, std::min(size, dim - index * size)}; }
};

// The parts of the work on a sample; sweeps are done chunk by chunk.
enum Part { kFirstSweep, kDecision, kSecondSweep, kEnd };
inline bool is_sweep(int part) { return part == kFirstSweep || part == kSecondSweep; }

template <class Step>
int slots_of(const Step& step) {
  return std::max(step.slots(kFirstSweep), step.slots(kSecondSweep));
}

// Samples whose chunks the threads share, one part after the other.
template <class Step>
struct Split {
  const int64_t chunks;
  const int slots;
  int part = kFirstSweep;
  std::vector<char> runs;
  std::vector<typename Step::Sample> samples;
  std::vector<double> memory;

  explicit Split(const Step& step)
      : chunks(Chunk::number(step.dim)),
        slots(slots_of(step)),
        samples(step.batch, typename Step::Sample(step)),
        memory(step.batch * chunks * slots * Sums::W) {
    for (int64_t row = 0; row < step.batch; ++row) runs.push_back(step.runs(row));
  }

  Sums sums(int64_t chunk) { return {memory.data() + chunk * slots * Sums::W}; }
  DEQFAST_INLINE Sums total(int64_t row, int used) {
    const Sums total = sums(row * chunks);
    for (int64_t i = 1; i < chunks; ++i) total.add(sums(row * chunks + i), used);
    return total;
  }
};

// All parts of the samples `begin` to `end`; or, where they are split, the present part of these chunks or samples.
template <class Step>
DEQFAST_INLINE void work(const Step& step, Split<Step>* split, int64_t begin, int64_t end) {
  const int64_t chunks = Chunk::number(step.dim);
  const bool one_chunk = split && is_sweep(split->part);
  const int first_part = split ? split->part : kFirstSweep, last_part = split ? split->part : kEnd;
  typename Step::Sample own(step);
  std::vector<double> memory(2 * slots_of(step) * Sums::W);
  const Sums own_total{memory.data()}, own_sums{own_total.at(slots_of(step))};
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = one_chunk ? i / chunks : i;
    if (split ? !split->runs[row] : !step.runs(row)) continue;
    typename Step::Sample& sample = split ? split->samples[row] : own;
    for (int part = first_part; part <= last_part; ++part) {
      if (!is_sweep(part)) {
        const Sums total = split ? split->total(row, step.slots(part - 1)) : own_total;
        part == kDecision ? step.decide(row, total, sample) : step.finish(row, total, sample);
        continue;
      }
      const int slots = step.slots(part);
      const int64_t from = one_chunk ? i % chunks : 0, to = one_chunk ? from + 1 : chunks;
      for (int64_t c = from; c < to; ++c) {
        const Sums sums = one_chunk ? split->sums(i) : c ? own_sums : own_total;
        sums.clear(slots);
        const Chunk chunk = Chunk::at(c, step.dim);
        part == kFirstSweep ? step.first(row, chunk, sums) : step.second(row, chunk, sample, sums);
        if (!one_chunk && c) own_total.add(sums, slots);
      }
    }
  }
}

// Samples as a whole, which a thread's second sweep may find in its cache, but where that would leave threads idle.
template <class Step>
void share_out(const Step& step) {
  constexpr int64_t least = 16384;  // elements for which a thread is worth its start
  const int64_t batch = step.batch, elements = std::max<int64_t>(step.dim * step.rows(), 1);
  const int64_t threads = torch::stable::get_num_threads();
  const auto grain = [](int64_t size) { return std::max<int64_t>(least / size, 1); };
  if (batch % threads == 0 || batch > 4 * threads || step.dim <= Chunk::size || batch * elements <= least) {
    torch::stable::parallel_for(0, batch, grain(elements),
                                [&](int64_t begin, int64_t end) { run(step, nullptr, begin, end); });
    return;
  }
  Split<Step> split(step);
  for (split.part = kFirstSweep; split.part <= kEnd; ++split.part) {
    if (!is_sweep(split.part)) {
      run(step, &split, 0, batch);
      continue;
    }
    torch::stable::parallel_for(0, batch * split.chunks, grain(Chunk::size * step.rows()),
                                [&](int64_t begin, int64_t end) { run(step, &split, begin, end); });
  }
}

}  // namespace deqfast
