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
import operator
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

SHAPE = (3, 32, 32)
PIXELS = math.prod(SHAPE)
COLUMNS = 100
EMPTY = lzma.compress(b"")
KINDS = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}
Array = np.ndarray[Any, np.dtype[np.uint8]]


def pack(root: Path, out: Path, dataset: str, limit: int) -> list[Path]:
    """Write the pieces of a data set under `root`, none above `limit` bytes; their paths."""
    written: list[Path] = []
    out.mkdir(parents=True, exist_ok=True)
    for name in tqdm(_files(dataset), desc="packing", unit="file", disable=None):
        if not (root / name).is_file():
            raise StudyError(f"{root / name} is missing: {root} does not hold {dataset}")
        for piece in _pieces(name, (root / name).read_bytes(), limit):
            if len(piece) > limit:
                raise StudyError(f"--limit {limit / 1e6:g}: what surrounds the pixels of {name} alone takes more")
            path = out / f"{dataset}-{len(written):02}.zip"
            write_atomically(path, piece)
            written.append(path)
    return written


def unpack(pieces: Path, root: Path) -> list[Path]:
    """Write the files whose pieces are in the folder `pieces` under `root`, each checked; their paths."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in tqdm(sorted(pieces.glob("*.zip")), desc="unpacking", unit="piece", disable=None):
        piece = _read(path)
        found[piece["file"]].append(piece)
    if not found:
        raise StudyError(f"{pieces} holds no pieces (*.zip)")
    for dataset in KINDS:
        lost = [name for name in _files(dataset) if name not in found]
        if 0 < len(lost) < len(_files(dataset)):
            raise StudyError(f"{pieces} has no piece of {lost[0]}: not all of the data set is there")
    for name, parts in found.items():
        parts.sort(key=operator.itemgetter("first"))
        rest, offset = lzma.decompress(b"".join(part["around"] for part in parts) or EMPTY), parts[0]["offset"]
        content = rest[:offset] + b"".join(part["pixels"] for part in parts) + rest[offset:]
        if hashlib.md5(content).hexdigest() != parts[0]["md5"]:
            raise StudyError(f"{name} is not what was packed: a piece is missing or damaged in {pieces}")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(root / name, content)
    return [root / name for name in found]


def _files(dataset: str) -> list[str]:
    kind: Any = KINDS[dataset]
    names = [name for name, _ in (*kind.train_list, *kind.test_list)] + [kind.meta["filename"]]
    return [f"{kind.base_folder}/{name}" for name in names]


def _pieces(name: str, content: bytes, limit: int) -> list[bytes]:
    pixels, offset = _pixels(content)
    around = lzma.compress(content[:offset] + content[offset + pixels.size :])
    fact = {"file": name, "md5": hashlib.md5(content).hexdigest(), "offset": offset}
    # Lossless WebP even of noise takes hardly more than the pixels themselves.
    step = max(1, int((limit - len(around)) / (1.1 * PIXELS)))
    return [
        _piece(fact | {"first": first}, pixels[first : first + step], b"" if first else around)
        for first in range(0, max(1, len(pixels)), step)
    ]


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
    tiles = np.zeros((rows * COLUMNS, PIXELS), np.uint8)
    tiles[: len(pixels)] = pixels
    return tiles.reshape(rows, COLUMNS, *SHAPE).transpose(0, 3, 1, 4, 2).reshape(rows * 32, COLUMNS * 32, 3)


def _read(path: Path) -> dict[str, Any]:
    """The fact of a piece with what it holds of its file: `around`, still compressed, and `pixels`."""
    try:
        with zipfile.ZipFile(path) as members:
            piece: dict[str, Any] = json.loads(members.read("fact.json"))
            if not any(piece["file"] in _files(dataset) for dataset in KINDS):
                raise StudyError(f"{path} holds {piece['file']!r}, which is no file of CIFAR")
            piece |= {"around": members.read("around.xz"), "pixels": b""}
            if piece["count"]:
                mosaic = np.asarray(Image.open(io.BytesIO(members.read("images.webp"))).convert("RGB"))
                tiles = mosaic.reshape(-1, 32, COLUMNS, 32, 3).transpose(0, 2, 4, 1, 3)
                piece["pixels"] = tiles.reshape(-1, PIXELS)[: piece["count"]].tobytes()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise StudyError(f"{path} is no piece, or damaged ({error})") from error
    return piece


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
    if asked.action == "pack" and not 0 < asked.limit < math.inf:
        parser.error(f"--limit {asked.limit:g}: a number of MB above 0")
    try:
        if asked.action == "pack":
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
