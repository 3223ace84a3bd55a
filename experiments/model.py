"""An example model as a fixed point, beside explicit twins: its arms under several seeds, then a table and a figure."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from models import frame

MODELS = ("cells", "graphs", "images", "restoration", "sudoku", "text")


def main(argv: Sequence[str] | None = None) -> int:
    """Train a model; the exit status is 0, 1 if a run failed or none could be begun, 2 for bad arguments, 130 after
    Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s MODEL [options]")
    parser.add_argument("model", choices=MODELS, help="which; its options: %(prog)s MODEL --help")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    module = import_module(f"models.{asked.model}")
    return frame.main(asked.model, module.__doc__, module.EXAMPLE, asked.options)


if __name__ == "__main__":
    sys.exit(main())
