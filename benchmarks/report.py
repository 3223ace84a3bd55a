"""Write benchmarks/RESULTS.md, its figures, and README's performance section from the JSON under benchmarks/results.

    python benchmarks/report.py
    python benchmarks/report.py --check

Nothing is measured; takes some seconds. What has not been measured is named as such, with the command that measures it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from harness.files import write_text
from reporting.files import ReportError, Results, read
from reporting.page import page
from reporting.pictures import draw_figures, stale_figures
from reporting.readme import performance

BENCHMARKS = Path(__file__).resolve().parent
BEGIN = "<!-- performance: written by benchmarks/report.py -->"
END = "<!-- end of performance -->"
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def between_markers(text: str, section: str, path: Path) -> str:
    """`text` with `section` between the two markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ReportError(f"{path}: needs once, in this order, the lines {BEGIN} and {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{section}{END}{rest.split(END)[1]}"


def broken_links(text: str, folder: Path) -> list[str]:
    """Links and images of `text`, which is kept in `folder`, whose file is not there."""
    targets = [target for target in LINK.findall(text) if "://" not in target]
    return [target for target in targets if not (folder / target).exists()]


def texts(results: Results, root: Path) -> dict[Path, str]:
    """What the two files should hold."""
    readme = root / "README.md"
    return {
        root / "benchmarks" / "RESULTS.md": page(results),
        readme: between_markers(readme.read_text(), performance(results), readme),
    }


def differing(wanted: dict[Path, str]) -> list[Path]:
    return [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a text or figure is outdated")
    parser.add_argument("--no-figures", action="store_true", help="write the texts only")
    parser.add_argument("--root", type=Path, default=BENCHMARKS.parent, help="the checkout (default: this one)")
    given = parser.parse_args()
    if not (given.root / "README.md").is_file():
        parser.error(f"--root {given.root}: holds no README.md")
    return given


def run(given: argparse.Namespace) -> list[str]:
    """What is wrong, if anything."""
    folder = given.root / "benchmarks"
    results = read(folder / "results", folder / "baselines")
    wanted = texts(results, given.root)
    if given.check:
        outdated = differing(wanted) + stale_figures(results)
        stale = [f"{path} is not what the JSON gives: run python benchmarks/report.py" for path in outdated]
    else:
        stale = []
        if not given.no_figures:
            for path in draw_figures(results):
                print(f"drawn: {path}", flush=True)
        for path in differing(wanted):
            write_text(path, wanted[path])
            print(f"written: {path}")
    broken = [f"{path}: no file {name}" for path, text in wanted.items() for name in broken_links(text, path.parent)]
    return stale + broken


def main() -> None:
    given = arguments()
    try:
        problems = run(given)
    except ReportError as error:
        problems = [str(error)]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
