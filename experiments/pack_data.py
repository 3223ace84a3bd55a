"""CIFAR files in small pieces: pack them where they are, carry the pieces over, unpack them there.

The pieces, put together in the order of their names, are a .tar.gz. Every file is compared with its published checksum.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

from nc_study.config import StudyError
from nc_study.rundir import write_atomically
from torchvision import datasets

KINDS = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}


def pack(root: Path, out: Path, dataset: str, limit: int) -> list[Path]:
    """Write the pieces of a data set under `root`, none above `limit` bytes; their paths."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as members:
        for name, checksum in checksums(dataset).items():
            if not (root / name).is_file():
                raise StudyError(f"{root / name} is missing: {root} does not hold {dataset}")
            if hashlib.md5((root / name).read_bytes()).hexdigest() != checksum:
                raise StudyError(f"{root / name} is not the published file")
            members.add(root / name, name)
    out.mkdir(parents=True, exist_ok=True)
    content = archive.getvalue()
    written: list[Path] = []
    for start in range(0, len(content), limit):
        written.append(out / f"{dataset}-{len(written):04}.piece")
        write_atomically(written[-1], content[start : start + limit])
    return written


def unpack(pieces: Path, root: Path) -> list[Path]:
    """Write the files whose pieces are in the folder `pieces` under `root`, each checked; their paths."""
    written = []
    for dataset in KINDS:
        if not (found := sorted(pieces.glob(f"{dataset}-*.piece"))):
            continue
        try:
            with tarfile.open(fileobj=io.BytesIO(b"".join(piece.read_bytes() for piece in found))) as members:
                for name, checksum in checksums(dataset).items():
                    if (member := members.extractfile(name)) is None:
                        raise KeyError(f"{name} is not a file")
                    content = member.read()
                    if hashlib.md5(content).hexdigest() != checksum:
                        raise StudyError(f"{name} in {pieces} is not the published file")
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(root / name, content)
                    written.append(root / name)
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, KeyError, zlib.error) as error:
            raise StudyError(f"{pieces}: a piece of {dataset} is missing or damaged ({error})") from error
    if not written:
        raise StudyError(f"{pieces} holds no pieces (*.piece)")
    return written


def checksums(dataset: str) -> dict[str, str]:
    """The published MD5 sum of each file of a data set, by its path under the root."""
    kind: Any = KINDS[dataset]
    files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    return {f"{kind.base_folder}/{name}": checksum for name, checksum in files}


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
    if asked.action == "pack" and not 0.1 <= asked.limit <= 2000:
        parser.error(f"--limit {asked.limit:g}: a number of MB from 0.1 to 2000")
    try:
        if asked.action == "pack":
            written = pack(asked.root, asked.out, asked.dataset, int(asked.limit * 1e6))
        else:
            written = unpack(asked.pieces, asked.root)
    except (StudyError, OSError) as error:
        print(f"pack_data.py: error: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
