// Numbers that the kernels of every backend share; kernels/constants.py has the same for Python.
#pragma once

#include <cstdint>

namespace deqfast {

enum Status : int8_t { kRunning = 0, kConverged = 1, kNonfinite = 2, kStalled = 3, kMaxIter = 6, kEscaped = 7 };

// Bits of the verdict on a row: z is the best iterate; go back to the best one; take the step.
constexpr int8_t kImproved = 1;
constexpr int8_t kBroken = 2;
constexpr int8_t kAdvances = 4;

// In low precision a sample stalls after this many iterations in which no relative residual fell below this factor.
constexpr int kStallIterations = 5;
constexpr double kStallGain = 0.95;

// A sample that met its tolerance has converged in two cases. Either |f(z)| is at most kGrowth times the size of the
// start, or |f(z) - z| has fallen below min(kReduction, kReductionPerTol tol) of the first one.
constexpr double kGrowth = 2.0;
constexpr double kReduction = 0.1;
constexpr double kReductionPerTol = 100.0;
// The rounding unit of a low-precision f is the stall floor over this.
constexpr double kRoundingsOfStallFloor = 8.0;

// Evaluations are counted in int32.
constexpr int64_t kMaxIterations = 2147483647;

enum Method : int64_t { kBroydenGood = 0, kBroydenBad = 1, kAndersonI = 2, kAndersonII = 3 };

// Pivots of the equilibrated window matrix below this carry no information.
constexpr double kPivotFloor = 1e-7;
// The most pairs in a GPU kernel: their window is in registers and shared memory.
constexpr int kMaxGpuHistory = 32;

enum Activation : int64_t { kIdentity = 0, kRelu = 1, kTanh = 2, kGelu = 3 };

// Grouped rows whose class sums are formed by one program.
constexpr int64_t kChunkRows = 256;

}  // namespace deqfast
