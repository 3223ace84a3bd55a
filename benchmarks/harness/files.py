"""Writing files. Needs nothing but the standard library, so that a report works where torch does not."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(name, 0o644)
    os.replace(name, path)


def write_text(path: Path, text: str) -> None:
    """Replace `path` in one step."""
    write_bytes(path, text.encode())


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace `path` in one step; each of the `rows` is a line, of six digits."""
    rows = [json.dumps(rounded(row)) for row in data.get("rows", [])]
    head = json.dumps({key: value for key, value in data.items() if key != "rows"}, indent=1)
    lines = ",\n  ".join(rows)
    body = f',\n "rows": [\n  {lines}\n ]\n}}' if rows else "\n}"
    write_text(path, head.removesuffix("\n}") + body + "\n")


def rounded(value: Any) -> Any:
    """The value with its floating-point numbers to six significant digits, all that a measurement tells."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value
