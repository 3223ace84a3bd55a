"""CIFAR files in small pieces: pack them where they are, carry the pieces over, unpack them there.

The pieces, put together in the order of their names, are a .tar.gz. Files are compared with their published checksums.
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path

from nc_study.config import StudyError
from nc_study.data import find_source
from nc_study.rundir import write_atomically
from torchvision import datasets

KINDS = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}


def pack(root: Path, out: Path, dataset: str, limit: int) -> list[Path]:
    """Write the pieces of a data set under `root`, none above `limit` bytes; their paths."""
    if not (root / KINDS[dataset].base_folder).is_dir():
        raise StudyError(f"{root} does not hold {dataset}")
    find_source(dataset, root)  # an error where a file is damaged
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as members:
        members.add(root / KINDS[dataset].base_folder, KINDS[dataset].base_folder)
    out.mkdir(parents=True, exist_ok=True)
    content = archive.getvalue()
    written: list[Path] = []
    for start in range(0, len(content), limit):
        written.append(out / f"{dataset}-{len(written):04}.piece")
        write_atomically(written[-1], content[start : start + limit])
    return written


def unpack(pieces: Path, root: Path) -> list[Path]:
    """Write the files whose pieces are in the folder `pieces` under `root`, checked; the data sets' folders."""
    found = {dataset: sorted(pieces.glob(f"{dataset}-*.piece")) for dataset in KINDS}
    if not any(found.values()):
        raise StudyError(f"{pieces} holds no pieces (*.piece)")
    root.mkdir(parents=True, exist_ok=True)
    written = []
    for dataset in filter(found.get, KINDS):
        folder = KINDS[dataset].base_folder
        with tempfile.TemporaryDirectory(dir=root) as temporary:  # so that half a data set never looks like one
            try:
                with tarfile.open(fileobj=io.BytesIO(b"".join(map(Path.read_bytes, found[dataset])))) as members:
                    members.extractall(temporary, filter="data")
                if not (Path(temporary) / folder).is_dir():
                    raise StudyError(f"{folder} is not in it")
                find_source(dataset, Path(temporary))
            except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, StudyError) as error:
                reason = "a piece is missing or damaged, or its files are not the published ones"
                raise StudyError(f"{pieces}, {dataset}: {reason}") from error
            written.append((Path(temporary) / folder).rename(root / folder))
    return written


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
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
