#!/usr/bin/env python
"""Check of an installed wheel, outside of a checkout: import, backends, forward and backward passes on the CPU.

    python tests/installed.py cpp torch     # the wheel with the CPU kernels
    python tests/installed.py torch         # the wheel without compiled parts: kernel="cpp" must be absent

The exit status is 1 if anything is wrong.
"""

import argparse
import platform
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import deqfast

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from correctness import after_solve, assert_close  # noqa: E402  (after the path above)

TOLERANCE = 1e-6  # of the solve, and of the backward solve


class Cell(nn.Module):
    """tanh(W z + x) with a W of norm `NORM`."""

    NORM = 0.5

    def __init__(self, features: int):
        super().__init__()
        weight = torch.linalg.qr(torch.randn(features, features, dtype=torch.float64)).Q
        self.weight = nn.Parameter(self.NORM * weight)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight.T + x)


def answer(kernel: str) -> list[Tensor]:
    """Solve and differentiate a small block by this kernel; z*, then the gradients of W and of x."""
    torch.manual_seed(0)
    cell, x = Cell(8), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    block = deqfast.DEQBlock(cell, deqfast.Broyden(rtol=TOLERANCE), deqfast.Implicit(), kernel=kernel)
    z, solution = block(x, return_solution=True)
    assert solution.converged.all(), f"kernel {kernel!r}: {solution}"
    return [z, *torch.autograd.grad(z.square().sum(), [cell.weight, x])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+", choices=("cpp", "torch"), help="kernels that must serve the CPU")
    kernels = parser.parse_args().kernels
    backends, folder = deqfast.backends(), Path(deqfast.__file__).parent
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, deqfast {deqfast.__version__}"
    print(f"{versions} from {folder}", *(f"{name}: {state}" for name, state in backends.items()), sep="\n")
    if (folder.parent / "setup.py").exists():
        raise SystemExit(f"{folder} is a checkout, not an installed wheel")
    if wrong := [name for name in ("cpp", "torch") if bool(backends[name]) != (name in kernels)]:
        raise SystemExit(f"{', '.join(wrong)}: must serve if and only if it is named, got {' '.join(kernels)}")
    expected = answer("torch")
    for kernel in kernels:
        for value, other in zip(answer(kernel), expected, strict=True):
            assert_close(value, other, after_solve(TOLERANCE, 1 / (1 - Cell.NORM), derivatives=1), kernel)
    print("right:", *kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
