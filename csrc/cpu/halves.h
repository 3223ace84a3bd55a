// The halves of a step on the CPU, as steps over the samples of their own.
//
// The step has, in addition:
//
//   void put_sums(row, sums, to) const;      write the sums of the first sweep as the op returns them
//   void take_sums(row, from, sample) const; fill `sample`, which has its verdict, from the sums of all parts
#pragma once

#include "../common/halves.h"
#include "judged.h"

namespace deqfast {

// Only the first sweep.
template <class Step, class T>
struct FirstHalf : SampleStep {
  struct Sample {
    explicit Sample(const FirstHalf&) {}
  };

  const Step& step;
  const RowSums<T>& half;

  FirstHalf(const Step& step, const RowSums<T>& half) : SampleStep(step.batch, step.dim), step(step), half(half) {}
  int rows() const { return step.rows(); }
  int slots(int part) const { return part == kSweep1 ? step.slots(part) : 0; }
  bool runs(int64_t row) const { return step.runs(row); }
  DEQFAST_INLINE void sweep1(int64_t row, Chunk chunk, Sums sums) const { step.sweep1(row, chunk, sums); }
  void solve(int64_t row, Sums sums, Sample&) const { step.put_sums(row, sums, half.sums + row * half.width); }
  DEQFAST_INLINE void sweep2(int64_t, Chunk, const Sample&, Sums) const {}
};

// All that follows the judgement.
template <class Step, class T>
struct SecondHalf : SampleStep {
  struct Sample : Step::Sample {
    explicit Sample(const SecondHalf& half) : Step::Sample(half.step) {}
  };

  const Step& step;
  const RowSums<T>& half;

  SecondHalf(const Step& step, const RowSums<T>& half) : SampleStep(step.batch, step.dim), step(step), half(half) {}
  int rows() const { return step.rows(); }
  int slots(int part) const { return part == kSweep2 ? step.slots(part) : 0; }
  bool runs(int64_t row) const { return half.verdict[row] != 0; }
  DEQFAST_INLINE void sweep1(int64_t, Chunk, Sums) const {}
  void solve(int64_t row, Sums, Sample& sample) const {
    sample.verdict = verdict_of(half.verdict[row]);
    if (sample.verdict.advance) step.take_sums(row, half.sums + row * half.width, sample);
  }
  DEQFAST_INLINE void sweep2(int64_t row, Chunk chunk, const Sample& sample, Sums sums) const {
    step.sweep2(row, chunk, sample, sums);
  }
  void commit(int64_t row, Sums sums, const Sample& sample) const { step.commit(row, sums, sample); }
};

// The halves of the steps that `Step<Params>` makes from their parameters.
template <template <class...> class Step>
struct Halves {
  template <template <class...> class Params, class T, class... More>
  static void sums(const Params<T, More...>& params, const RowSums<T>& half, const Tensor&) {
    share_out(FirstHalf<Step<T, More...>, T>(Step<T, More...>(params), half));
  }
  template <template <class...> class Params, class T, class... More>
  static void apply(const Params<T, More...>& params, const RowSums<T>& half, const Tensor&) {
    share_out(SecondHalf<Step<T, More...>, T>(Step<T, More...>(params), half));
  }
};

}  // namespace deqfast
