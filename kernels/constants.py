"""Numbers that the kernels of every backend share; csrc/common/constants.h holds the same for C++."""

# Status of a sample, see ``deqfast.Status``, which has two more.
RUNNING, CONVERGED, NONFINITE, STALLED = range(4)
MAX_ITER, ESCAPED = 6, 7

# Bits of the verdict on a row: z is the best iterate; go back to the best one; take the step.
IMPROVED, BROKEN, ADVANCES = 1, 2, 4

# In low precision a sample stalls after STALL_ITERATIONS without a relative residual below STALL_GAIN times the best.
STALL_ITERATIONS = 5
STALL_GAIN = 0.95

# A sample that met its tolerance has converged in two cases. Either |f(z)| is at most GROWTH times the size of the
# start, or |f(z) - z| has fallen below min(REDUCTION, REDUCTION_PER_TOL tol) of the first one.
GROWTH = 2.0
REDUCTION = 0.1
REDUCTION_PER_TOL = 100.0
# The unit of rounding of a low-precision f is the stall floor over this.
ROUNDINGS_OF_STALL_FLOOR = 8.0

# Evaluations are counted in int32.
MAX_ITERATIONS = 2147483647

BROYDEN_GOOD, BROYDEN_BAD, ANDERSON_I, ANDERSON_II = range(4)
# Pivots of the equilibrated window matrix below this carry no information.
PIVOT_FLOOR = 1e-7
# The most pairs that a GPU kernel supports: their window lives in registers and shared memory.
MAX_GPU_HISTORY = 32

IDENTITY, RELU, TANH, GELU = range(4)

# Grouped rows whose class sums are formed by one program.
CHUNK_ROWS = 256
