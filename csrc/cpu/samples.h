// How a step goes over the samples, and how threads share them. It sweeps over a sample's elements, decides from the sums
// it has taken, and sweeps again. A sweep goes chunk by chunk, and the sums of the chunks are added in order, so that the
// bits do not depend on the threads.
//
// A step is a class with
//   batch, dim             as everywhere
//   rows()                 rows of `dim` elements that a sweep reads: the work on a sample
//   slots(part)            sums of a sweep
//   Sample                 what is kept of a sample between its sweeps, made from the step
//   runs(row)              whether the sample takes part
//   first(row, chunk, sums), decide(row, sums, sample), second(row, chunk, sample, sums), finish(row, sums, sample)
// where the two sweeps are to be inlined.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "grain.h"
#include "sweeps.h"

namespace deqfast {

struct Chunk {
  static constexpr int64_t size = 4096;  // elements
  int64_t begin, count;

  static int64_t number(int64_t dim) { return std::max<int64_t>((dim + size - 1) / size, 1); }
  static Chunk at(int64_t index, int64_t dim) { return {index * size, std::min(size, dim - index * size)}; }
};

enum Part { kFirst, kDecide, kSecond, kFinish };
inline bool is_sweep(int part) { return part == kFirst || part == kSecond; }

// The chunks of a sample that are swept at once, what is kept of the sample, and where the sums of its sweeps go.
template <class Step>
struct Portion {
  int64_t row, begin, end;
  typename Step::Sample& sample;
  Sums total, spare;
};

// What there is to do: all parts of whole samples, which need the memory of one; or one part, of the samples or of their
// chunks, with the memory of all.
template <class Step>
struct Work {
  const Step& step;
  const std::vector<int64_t>& rows;  // the samples that take part
  const bool whole;
  const int64_t chunks;
  const int slots;
  int part = kFirst, last_part = kFinish;
  std::vector<typename Step::Sample> samples;
  std::vector<double> memory;

  Work(const Step& step, const std::vector<int64_t>& rows, bool whole)
      : step(step),
        rows(rows),
        whole(whole),
        chunks(Chunk::number(step.dim)),
        slots(std::max(step.slots(kFirst), step.slots(kSecond))),
        samples(whole ? 1 : rows.size(), typename Step::Sample(step)),
        memory((whole ? 2 : rows.size() * chunks) * slots * Sums::W) {}

  Sums sums(int64_t index) { return {memory.data() + index * slots * Sums::W}; }
  Portion<Step> at(int64_t index) {
    if (whole) return {rows[index], 0, chunks, samples[0], sums(0), sums(1)};
    if (!is_sweep(part)) return {rows[index], 0, 0, samples[index], sums(index * chunks), sums(0)};
    const int64_t sample = index / chunks, chunk = index % chunks;
    return {rows[sample], chunk, chunk + 1, samples[sample], sums(index), sums(0)};
  }
};

template <class Step>
DEQFAST_INLINE void sweep(const Step& step, int part, const Portion<Step>& portion) {
  for (int64_t i = portion.begin; i < portion.end; ++i) {
    const Sums sums = i == portion.begin ? portion.total : portion.spare;
    const Chunk chunk = Chunk::at(i, step.dim);
    sums.clear(step.slots(part));
    if (part == kFirst) {
      step.first(portion.row, chunk, sums);
    } else {
      step.second(portion.row, chunk, portion.sample, sums);
    }
    if (i != portion.begin) portion.total.add(sums, step.slots(part));
  }
}

// One loop for all kinds of work, so that the sweeps are compiled once.
template <class Step>
void do_work(Work<Step>& work, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    const Portion<Step> portion = work.at(index);
    for (int part = work.part; part <= work.last_part; ++part) {
      if (is_sweep(part)) {
        sweep(work.step, part, portion);
        continue;
      }
      for (int64_t i = 1; !work.whole && i < work.chunks; ++i) {
        portion.total.add(work.sums(index * work.chunks + i), work.step.slots(part - 1));
      }
      if (part == kDecide) {
        work.step.decide(portion.row, portion.total, portion.sample);
      } else {
        work.step.finish(portion.row, portion.total, portion.sample);
      }
    }
  }
}

// The threads take whole samples, which a second sweep may find in the cache, but where few are left and some threads
// would be idle.
template <class Step>
void share_out(const Step& step) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < step.batch; ++row) {
    if (step.runs(row)) rows.push_back(row);
  }
  const int64_t samples = rows.size(), threads = torch::stable::get_num_threads();
  const int64_t elements = step.dim * step.rows();
  const auto share = [](int64_t count, int64_t elements, const auto& body) {
    torch::stable::parallel_for(0, count, grain_of(elements), body);
  };
  if (samples % threads == 0 || samples > 4 * threads || step.dim <= Chunk::size ||
      samples * elements <= kLeastElements) {
    share(samples, elements, [&](int64_t begin, int64_t end) {
      Work<Step> work(step, rows, true);
      do_work(work, begin, end);
    });
    return;
  }
  Work<Step> work(step, rows, false);
  for (int part = kFirst; part <= kFinish; ++part) {
    work.part = work.last_part = part;
    if (is_sweep(part)) {
      share(samples * work.chunks, Chunk::size * step.rows(),
            [&](int64_t begin, int64_t end) { do_work(work, begin, end); });
    } else {
      do_work(work, 0, samples);
    }
  }
}

}  // namespace deqfast
