"""CIFAR files in pieces and back: the same bytes, pieces small enough, and trouble told in a line."""

from __future__ import annotations

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


def test_unpacked_files_are_the_originals_byte_for_byte(packed, tmp_path):
    root, pieces = packed
    assert all(path.stat().st_size <= 150_000 for path in pieces.iterdir()) and len(list(pieces.iterdir())) > 1
    assert main(["unpack", str(pieces), str(tmp_path / "back")]) == 0
    assert files(tmp_path / "back") == files(root)


def test_a_missing_or_damaged_piece_and_what_holds_no_data_set_are_errors(packed, tmp_path, capsys, monkeypatch):
    def error_of(*arguments):
        assert main([str(argument) for argument in arguments]) == 1
        printed, errors = capsys.readouterr()
        assert printed == "" and errors.startswith("pack_data.py: error:") and errors.count("\n") == 1
        return errors

    capsys.readouterr()
    pieces, back = packed[1], tmp_path / "back"
    *_, piece, last = sorted(pieces.iterdir())
    whole = piece.read_bytes()
    for damaged in (b"half", whole[:-1] + bytes([whole[-1] ^ 0xFF])):
        piece.write_bytes(damaged)
        error_of("unpack", pieces, back)
    piece.write_bytes(whole)
    assert "does not hold cifar10" in error_of("pack", tmp_path, tmp_path / "out")
    assert "holds no pieces" in error_of("unpack", tmp_path, back) and not list(back.iterdir())
    monkeypatch.undo()  # the sums are those of the published files again
    assert "not the published ones" in error_of("unpack", pieces, back)
    last.unlink()
    assert "a piece is missing" in error_of("unpack", pieces, back)
