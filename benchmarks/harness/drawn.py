"""Figures that tell what they were drawn from, by a digest of the data in the PNG's metadata."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

KEY = "deqfast data"


def stamp(data: Any) -> dict[str, str]:
    """The metadata of a PNG drawn from `data`, which JSON can hold; the same for data that JSON has held."""
    return {KEY: hashlib.sha256(json.dumps(data).encode()).hexdigest()}


def drawn_from(path: Path, data: Any) -> bool | None:
    """Whether the PNG at `path` was drawn from `data`; None where it does not tell: no PNG, or one without digest."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            digest = image.info.get(KEY)
    except (FileNotFoundError, UnidentifiedImageError):
        return None
    return None if digest is None else digest == stamp(data)[KEY]
