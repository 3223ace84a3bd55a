"""Files and calls of deqfast that one training step of a small block passes: the way through the code.

    python tests/calls.py jfb        files and calls of the third step, and each call in order with --list
    python tests/calls.py implicit   the same, with a backward solve; both may be given

The cell is tanh(Linear(z) + x) for 4 samples of 8 numbers, the solver Picard with five evaluations, the kernel cpp.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from types import FrameType
from typing import Any

import torch
from torch import nn

import deqfast

FOLDER = os.path.dirname(deqfast.__file__)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(0.1 * self.linear(z) + x)


def calls(adjoint: str) -> list[tuple[str, str]]:
    """File and function of each call in the third step, by the thread that runs the backward pass too."""
    solver = deqfast.Picard(1e-30, max_iter=5)
    given: Any = deqfast.Implicit(solver) if adjoint == "implicit" else adjoint
    block, x = deqfast.DEQBlock(Cell(), solver, given, kernel="cpp"), torch.randn(4, 8, requires_grad=True)
    passed: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            passed.append((os.path.relpath(frame.f_code.co_filename, FOLDER), frame.f_code.co_name))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the solves do not converge; their checks are part of a step
        for step in range(3):
            if step == 2:
                sys.setprofile(note)
            block(x).square().sum().backward()
        sys.setprofile(None)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adjoint", choices=("jfb", "implicit"), nargs="+")
    parser.add_argument("--list", action="store_true", help="each call")
    asked = parser.parse_args()
    for adjoint in asked.adjoint:
        passed = calls(adjoint)
        print(len({file for file, _ in passed}), "files", len(passed), "calls")
        if asked.list:
            print(*(f"{file} {function}" for file, function in passed), sep="\n")


if __name__ == "__main__":
    main()
