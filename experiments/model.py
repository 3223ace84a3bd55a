"""Example models as fixed points, next to explicit twins: arms under several seeds, then a table and a figure."""

import sys
from collections.abc import Sequence
from importlib import import_module

from models import frame
from runs.options import Parser, choice

MODELS = ("graphs", "restoration", "rnn", "scf", "sudoku", "text")


def main(argv: Sequence[str] | None = None) -> int:
    """Train a model. The exit status is 0, 1 for an error (a line each), 2 for bad arguments, 130 after Ctrl-C."""
    examples = "model.py sudoku --size 4 --seeds 1", "model.py text --data-root FILE --width 256"
    parser = Parser(__doc__, examples, "MODEL [options]")
    parser.add_argument("model", choices=MODELS, type=choice(MODELS), help="%(prog)s MODEL --help lists its options")
    words = list(sys.argv[1:] if argv is None else argv)
    name = parser.parse(words[:1]).model
    module = import_module(f"models.{name}")
    return frame.main(name, module.__doc__, module.EXAMPLE, words[1:])


if __name__ == "__main__":
    sys.exit(main())
