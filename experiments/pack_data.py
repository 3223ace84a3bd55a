"""CIFAR files in small pieces, without loss: pack them where they are, carry the pieces over, unpack them there.

A piece is a zip archive with some thousands of a file's images as one lossless WebP mosaic; the first piece of a file
also holds what surrounds the pixels. Unpacked files are compared with the checksums of the originals.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import math
import pickle
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from nc_study.config import StudyError
from nc_study.rundir import write_atomically
from PIL import Image
from torchvision import datasets
from tqdm import tqdm

SIZE, CHANNELS = 32, 3
PIXELS = SIZE * SIZE * CHANNELS
COLUMNS = 100
IMAGES_PER_PIECE = 10_000
KINDS = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}
Array = np.ndarray[Any, np.dtype[np.uint8]]


def pack(root: Path, out: Path, dataset: str, limit: int) -> list[Path]:
    """Write the pieces of a data set under `root`, none above `limit` bytes; their paths."""
    names = _files(KINDS[dataset])
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise StudyError(f"{root / missing[0]} is missing: {root} does not hold {dataset}")
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name in tqdm(names, desc="packing", unit="file", disable=None):
        for piece in _pieces(name, (root / name).read_bytes(), limit):
            path = out / f"{dataset}-{len(written):02}.zip"
            write_atomically(path, piece)
            written.append(path)
    return written


def unpack(pieces: Path, root: Path) -> list[Path]:
    """Write the files whose pieces are in the folder `pieces` under `root`, each checked; their paths."""
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    facts: dict[str, dict[str, Any]] = {}
    for path in sorted(pieces.glob("*.zip")):
        fact = _fact(path)
        found[fact["file"]][fact["first"]] = path
        facts[fact["file"]] = fact
    if not found:
        raise StudyError(f"{pieces} holds no pieces (*.zip)")
    for kind in KINDS.values():
        names = _files(kind)
        lost = [name for name in names if name not in found]
        if 0 < len(lost) < len(names):
            raise StudyError(f"{pieces} has no piece of {lost[0]}: not all of the data set is there")
    written = []
    for name, parts in tqdm(found.items(), desc="unpacking", unit="file", disable=None):
        content = _join([parts[first] for first in sorted(parts)], facts[name])
        if hashlib.md5(content).hexdigest() != facts[name]["md5"]:
            raise StudyError(f"{name} is not what was packed: a piece is missing or damaged in {pieces}")
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
        written.append(path)
    return written


def _files(kind: Any) -> list[str]:
    names = [name for name, _ in (*kind.train_list, *kind.test_list)] + [kind.meta["filename"]]
    return [f"{kind.base_folder}/{name}" for name in names]


def _pieces(name: str, content: bytes, limit: int) -> list[bytes]:
    pixels, offset = _pixels(content)
    around = lzma.compress(content[:offset] + content[offset + pixels.size :])
    fact = {"file": name, "md5": hashlib.md5(content).hexdigest(), "offset": offset, "images": len(pixels)}
    step = IMAGES_PER_PIECE
    while True:
        starts = range(0, max(1, len(pixels)), step)
        pieces = [_piece(fact | {"first": a}, pixels[a : a + step], around if a == 0 else b"") for a in starts]
        if max(map(len, pieces)) <= limit:
            return pieces
        if step == 1 or len(pixels) == 0:
            raise StudyError(f"--limit {limit / 1e6:g}: what surrounds the pixels of {name} alone takes more")
        step = -(-step // 2)


def _pixels(content: bytes) -> tuple[Array, int]:
    """A batch's images (N, 3072), none for a file without images, and where they lie in the file's bytes."""
    try:
        data = pickle.loads(content, encoding="latin1").get("data")
    except Exception as error:  # a damaged pickle raises whatever its opcodes happen to
        raise StudyError(f"a file is damaged, no CIFAR batch ({error})") from error
    if data is None:
        return np.empty((0, PIXELS), np.uint8), len(content)
    offset = content.find(np.ascontiguousarray(data).tobytes())
    if offset < 0:
        raise StudyError("the pixels do not lie in the file as one block: it is not a CIFAR file as published")
    return data, offset


def _piece(fact: dict[str, Any], pixels: Array, around: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:  # stored: the members are compressed already
        members.writestr("fact.json", json.dumps(fact | {"count": len(pixels)}))
        members.writestr("around.xz", around)
        if len(pixels):
            image = io.BytesIO()
            Image.fromarray(_mosaic(pixels)).save(image, "WEBP", lossless=True, quality=60, method=4, exact=True)
            members.writestr("images.webp", image.getvalue())
    return archive.getvalue()


def _mosaic(pixels: Array) -> Array:
    """Images (N, 3072), channel by channel, as one RGB picture with COLUMNS images a row, black where there is none."""
    rows = -(-len(pixels) // COLUMNS)
    padded = np.zeros((rows * COLUMNS, PIXELS), np.uint8)
    padded[: len(pixels)] = pixels
    tiles = padded.reshape(rows, COLUMNS, CHANNELS, SIZE, SIZE)
    return tiles.transpose(0, 3, 1, 4, 2).reshape(rows * SIZE, COLUMNS * SIZE, CHANNELS)


def _images(mosaic: Array, count: int) -> Array:
    """The inverse of `_mosaic`."""
    tiles = mosaic.reshape(-1, SIZE, COLUMNS, SIZE, CHANNELS).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(-1, PIXELS)[:count]


def _fact(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as members:
            fact = json.loads(members.read("fact.json"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise StudyError(f"{path} is no piece, or damaged ({error})") from error
    if fact.get("file") not in {name for kind in KINDS.values() for name in _files(kind)}:
        raise StudyError(f"{path} holds {fact.get('file')!r}, which is no file of CIFAR")
    return fact


def _join(paths: list[Path], fact: dict[str, Any]) -> bytes:
    around, parts = b"", []
    for path in paths:
        try:
            with zipfile.ZipFile(path) as members:
                around += members.read("around.xz")
                if "images.webp" in members.namelist():
                    picture = np.asarray(Image.open(io.BytesIO(members.read("images.webp"))).convert("RGB"))
                    parts.append(_images(picture, _fact(path)["count"]).tobytes())
        except (OSError, zipfile.BadZipFile) as error:
            raise StudyError(f"{path} is damaged ({error})") from error
    rest = lzma.decompress(around) if around else b""
    return rest[: fact["offset"]] + b"".join(parts) + rest[fact["offset"] :]


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, 1 for an error, told in a line, 2 for bad arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    packing = actions.add_parser("pack", help="files to pieces")
    packing.add_argument("root", type=Path, help="the --data-root that holds the CIFAR files")
    packing.add_argument("out", type=Path, help="folder for the pieces")
    packing.add_argument("--dataset", choices=KINDS, default="cifar10", help="(default: cifar10)")
    packing.add_argument("--limit", type=float, default=25, metavar="MB", help="largest piece (default: 25 MB)")
    unpacking = actions.add_parser("unpack", help="pieces to files")
    unpacking.add_argument("pieces", type=Path, help="folder with the pieces")
    unpacking.add_argument("root", type=Path, help="the --data-root that receives the files")
    asked = parser.parse_args(argv)
    try:
        if asked.action == "pack":
            if not 0 < asked.limit < math.inf:
                parser.error(f"--limit {asked.limit:g}: a number of MB above 0")
            written = pack(asked.root, asked.out, asked.dataset, int(asked.limit * 1e6))
        else:
            written = unpack(asked.pieces, asked.root)
    except (StudyError, OSError) as error:
        print(f"pack_data.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; whole pieces or files that are written stay", file=sys.stderr)
        return 130
    for path in written:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
