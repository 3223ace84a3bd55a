"""Writes the tutorial's notebook from its page.

    python docs/notebook.py

The blocks of Python become cells of code, the text between them cells of Markdown. The notebook holds no outputs.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

PAGE = Path(__file__).parent / "pages" / "tutorial.md"
BLOCK = re.compile(r"^```python\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> str:
    """The text of the notebook (nbformat 4.5) with the content of `page`."""
    cells = []
    for i, text in enumerate(BLOCK.split(page)):  # every second part is code
        code = {"cell_type": "code", "execution_count": None, "outputs": []}
        kind = code if i % 2 else {"cell_type": "markdown"}
        cells.append({**kind, "id": f"part-{i}", "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.with_suffix(".ipynb").write_bytes(notebook(PAGE.read_text()).encode())
