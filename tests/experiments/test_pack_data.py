"""CIFAR files in pieces and back: the same bytes, pieces small enough, and trouble told in a line."""

from __future__ import annotations

import json
import zipfile

import pytest
from pack_data import main
from study_helpers import write_cifar
from torchvision import datasets


@pytest.fixture(params=["cifar10", "cifar100"])
def packed(request, tmp_path, monkeypatch):
    """A data set with made-up pictures, and the folder with its pieces of at most 150 kB."""
    root, pieces = tmp_path / "root", tmp_path / "pieces"
    kind = getattr(datasets, request.param.upper())
    write_cifar(root, kind, 13 if request.param == "cifar10" else 2, monkeypatch)
    assert main(["pack", str(root), str(pieces), "--dataset", request.param, "--limit", "0.15"]) == 0
    return root, pieces


def files(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_unpacked_files_are_the_originals_byte_for_byte(packed, tmp_path, capsys):
    root, pieces = packed
    assert all(path.stat().st_size <= 150_000 for path in pieces.iterdir())
    assert len(list(pieces.iterdir())) > len(files(root))  # noise does not shrink: a file takes several pieces
    capsys.readouterr()
    assert main(["unpack", str(pieces), str(tmp_path / "back")]) == 0
    assert files(tmp_path / "back") == files(root)
    assert len(capsys.readouterr().out.splitlines()) == len(files(root))


def error_of(capsys, *arguments):
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 1
    printed, errors = capsys.readouterr()
    lines = [line for line in errors.splitlines() if line.startswith("pack_data.py: error:")]
    assert printed == "" and len(lines) == 1
    return lines[0]


def test_a_missing_or_damaged_piece_is_noticed(packed, tmp_path, capsys):
    _, piece, *rest = sorted(packed[1].iterdir())
    content = bytearray(piece.read_bytes())
    content[len(content) // 2] ^= 0xFF
    for damaged in (content, b"half"):
        piece.write_bytes(damaged)
        assert f"{piece} is no piece, or damaged" in error_of(capsys, "unpack", packed[1], tmp_path / "back")
    piece.unlink()
    assert "a piece is missing or damaged" in error_of(capsys, "unpack", packed[1], tmp_path / "back")
    rest[-1].unlink()  # the only piece of the file with the classes' names
    assert "has no piece of" in error_of(capsys, "unpack", packed[1], tmp_path / "back")


def test_what_holds_no_data_set_is_an_error(tmp_path, capsys):
    assert "does not hold cifar10" in error_of(capsys, "pack", tmp_path, tmp_path / "out")
    assert "holds no pieces" in error_of(capsys, "unpack", tmp_path, tmp_path / "back")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as members:  # a piece cannot write elsewhere
        members.writestr("fact.json", json.dumps({"file": "../elsewhere", "first": 0}))
    assert "no file of CIFAR" in error_of(capsys, "unpack", tmp_path, tmp_path / "back")


def test_a_limit_below_what_cannot_be_split_is_an_error(packed, tmp_path, capsys):
    dataset = next(packed[1].iterdir()).name.split("-")[0]
    message = error_of(capsys, "pack", packed[0], tmp_path / "out", "--dataset", dataset, "--limit", "0.0001")
    assert "--limit 0.0001" in message
