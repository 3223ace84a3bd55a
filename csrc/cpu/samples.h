// Iteration of a step over the samples, and its distribution over threads. A sweep proceeds chunk by chunk. The sums of
// the chunks are added in order, so that the bits do not depend on the threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <type_traits>
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

enum Part { kSweep1, kSolve, kSweep2, kCommit };
inline bool is_sweep(int part) { return part == kSweep1 || part == kSweep2; }

// The base of a step over samples (B, D), which `share_out` runs. A step defines the following; sweeps are inlined.
//
//   struct Sample;                                data of a sample kept between the parts, made from the step
//   int rows() const;                             rows of D elements that a sweep reads: the work per sample
//   int slots(int part) const;                    number of sums that a sweep takes
//   bool runs(int64_t row) const;                 whether the sample takes part
//   void sweep1(row, chunk, sums) const;          read a chunk of the sample; add to the sums
//   void solve(row, sums, sample) const;          fill `sample` from the sums of all chunks
//   void sweep2(row, chunk, sample, sums) const;  write a chunk; add to other sums
//   void commit(row, sums, sample) const;         write results of these sums over all chunks; default: nothing
struct SampleStep {
  const int64_t batch, dim;

  SampleStep(int64_t batch, int64_t dim) : batch(batch), dim(dim) {}
  template <class Sample>
  void commit(int64_t, Sums, const Sample&) const {}
};

// The chunks of a sample that are swept together, the data kept of the sample, and the place of the sums of its sweeps.
template <class Step>
struct Portion {
  int64_t row, begin, end;
  typename Step::Sample& sample;
  Sums total, spare;
};

// The work to do. Either all parts of whole samples, with memory for one sample, or one part, of the samples or of
// their chunks, with memory for all.
template <class Step>
struct Work {
  const Step& step;
  const std::vector<int64_t>& rows;  // samples that take part
  const bool whole;
  const int64_t chunks;
  const int slots;
  int part = kSweep1, last_part = kCommit;
  std::vector<typename Step::Sample> samples;
  std::vector<double> memory;

  Work(const Step& step, const std::vector<int64_t>& rows, bool whole)
      : step(step),
        rows(rows),
        whole(whole),
        chunks(Chunk::number(step.dim)),
        slots(std::max(step.slots(kSweep1), step.slots(kSweep2))),
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
    if (part == kSweep1) {
      step.sweep1(portion.row, chunk, sums);
    } else {
      step.sweep2(portion.row, chunk, portion.sample, sums);
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
      if (part == kSolve) {
        work.step.solve(portion.row, portion.total, portion.sample);
      } else {
        work.step.commit(portion.row, portion.total, portion.sample);
      }
    }
  }
}

// The threads take whole samples, which the second sweep may find in the cache. If samples are few and long, threads
// share the chunks of all samples.
template <class Step>
void share_out(const Step& step) {
  static_assert(std::is_base_of_v<SampleStep, Step>, "a step derives from SampleStep");
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
  for (int part = kSweep1; part <= kCommit; ++part) {
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
