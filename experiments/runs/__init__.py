"""Runs that are recorded and resumed: their options, files, records and processes.

Without the packages that the scripts need, importing it ends the program with a line that says how to install them.
"""

import sys
from importlib.util import find_spec

PACKAGES = (
    *("jinja2", "markdown", "matplotlib", "msgspec", "PIL", "scipy", "sklearn", "tabulate", "torchvision", "tqdm"),
)
MISSING = [name for name in PACKAGES if find_spec(name) is None]

if MISSING:
    sys.exit(f'{sys.argv[0]}: error: {", ".join(MISSING)}: not installed; pip install "deqfast[experiments]"')
