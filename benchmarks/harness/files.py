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


def write_json(path: Path, data: Any) -> None:
    """Replace `path` in one step."""
    write_text(path, json.dumps(data, indent=1) + "\n")
