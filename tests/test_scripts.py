"""Every script answers --help, and writes nothing then."""

from __future__ import annotations

import re
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [ROOT / name for name in ("benchmarks", "docs", "experiments", "tests")]
MAIN = re.compile(r"^if __name__ == .__main__.:", re.MULTILINE)
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in folder.rglob("*.py")
    if MAIN.search(path.read_text())
)


def state_of(folders: list[Path]) -> dict[Path, tuple[int, int]]:
    """Time and size of every file in these folders, except compiled modules."""
    found = {}
    for path in (path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts):
        with suppress(FileNotFoundError):  # a temporary file of another test
            if path.is_file():
                found[path] = path.stat().st_mtime_ns, path.stat().st_size
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_writes_nothing(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str((ROOT / script).parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    before, pipe = state_of([*FOLDERS, tmp_path]), signal.getsignal(signal.SIGPIPE)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    signal.signal(signal.SIGPIPE, pipe)
    assert stop.value.code in (0, None) and capsys.readouterr().out.startswith("usage: ")
    assert state_of([*FOLDERS, tmp_path]) == before
