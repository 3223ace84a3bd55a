"""The documentation: its Python runs, its links lead somewhere, and its commands name files that exist."""

import re
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
FOLDERS = (".", "docs", "docs/pages", "benchmarks")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]
PAGES += [ROOT / "experiments" / "README.md"]  # the protocol next to it names what stood there when it was written
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^()\s#]*)#?([^()\s]*)\)")
COMMAND = r"(?:^|[ /`])(?:python3?|bash|torchrun|pytest)"
SCRIPT = re.compile(COMMAND + r" (?:-\S+ (?:\d+ )?)*((?:benchmarks|experiments)/[\w./]+)")
LONG = ("collapse", "compile", "control", "looped", "migrate", "tutorial")  # their code takes over five seconds

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass(frozen=True)
class Block:
    """The Python of a fenced block, and the line of the page on which it begins."""

    text: str
    line: int


def python_of(page: Path) -> list[Block]:
    text = page.read_text()
    fenced = (block for block in FENCED.finditer(text) if block[1] == "python")
    return [Block(block[2], text.count("\n", 0, block.start()) + 2) for block in fenced]


def anchors(page: Path) -> set[str]:
    """Names of a page's headings in the form of links."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.filterwarnings("ignore:deqfast. in ")  # pages also show solves that do not converge
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.tier("full")] * (page.stem in LONG)) for page in PAGES if python_of(page)],
    ids=lambda page: page.name,
)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    # Blocks of several processes run in tests/test_processes.py.
    left_out = ("# torchrun",) if torch.cuda.is_available() else ("# torchrun", "# needs a GPU")
    with torch.random.fork_rng(devices=[]):
        for block in python_of(page):
            padded = "\n" * (block.line - 1) + block.text  # a traceback names the line of the page
            code = compile(padded, str(page), "exec")
            if not block.text.startswith(left_out):
                exec(code, names)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {path}"
        if anchor and file in PAGES:
            assert anchor in anchors(file), f"{page.name}: {path}#{anchor} has no such heading"


@every_page
def test_commands_name_files_that_exist(page: Path) -> None:
    for script in SCRIPT.findall(page.read_text()):
        assert (ROOT / script).exists(), f"{page.name}: {script}"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "docs" / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs" / "pages").glob("*.md"))


def test_the_notebook_is_made_of_its_page() -> None:
    """The page's Python runs above; `python docs/notebook.py` writes the notebook."""
    script = runpy.run_path(str(ROOT / "docs" / "notebook.py"))
    assert script["PAGE"].with_suffix(".ipynb").read_text() == script["notebook"](script["PAGE"].read_text())


def test_readme_fits_and_its_test_command_is_found() -> None:
    """CI runs what stands between the marker and the end of the block."""
    text = README.read_text()
    assert len(text.splitlines()) <= 105
    assert re.search(r"^<!-- tests -->\n```bash\npython3 -m venv .*\n```$", text, re.MULTILINE)
    assert text.count("<!-- numbers: layers in short -->") == text.count("<!-- end of numbers -->") == 1


def test_the_textbooks_code_on_the_page_is_what_the_benchmarks_time() -> None:
    code = (ROOT / "benchmarks" / "harness" / "textbook.py").read_text()
    function = code[code.index("def anderson(") :].partition("\n\n\n")[0]
    assert function in (ROOT / "benchmarks" / "MEASURED.md").read_text()
