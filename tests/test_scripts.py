"""Every script answers --help, and writes nothing then; CI names tests that exist."""

import re
import runpy
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [ROOT / name for name in ("benchmarks", "docs", "experiments", "tests")]
MAIN = re.compile(r"^if __name__ == .__main__.:", re.MULTILINE)
SCRIPTS = sorted(path for folder in FOLDERS for path in folder.rglob("*.py") if MAIN.search(path.read_text()))


def files() -> set[Path]:
    return {path for folder in FOLDERS for path in folder.rglob("*.*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_help_writes_nothing(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    before, pipe = files(), signal.getsignal(signal.SIGPIPE)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    signal.signal(signal.SIGPIPE, pipe)
    assert stop.value.code in (0, None) and capsys.readouterr().out.startswith("usage: ")
    assert files() == before and not list(tmp_path.iterdir())


def test_ci_names_tests_that_exist():
    lists = re.findall(r"tests/test_\{([\w,]+)\}\.py", (ROOT / ".ci" / "run").read_text())
    assert lists and not [
        name for names in lists for name in names.split(",") if not (ROOT / f"tests/test_{name}.py").is_file()
    ]
