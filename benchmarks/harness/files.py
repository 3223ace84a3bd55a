"""Writing text and JSON, each file in one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deqfast.testing.records import write_bytes


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
