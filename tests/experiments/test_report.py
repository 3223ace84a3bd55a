"""The report as a whole: the numbers of its tables against those of the results, its files, and its errors."""

from __future__ import annotations

import html
import re
import statistics
from pathlib import Path

import pytest
from nc_study.config import StudyError
from nc_study.record import Failure, RunResult, read_record, to_json
from nc_study.reporting import tables
from nc_study.reporting.document import Source, markdown_table, to_html
from nc_study.reporting.report import build, main
from nc_study.reporting.runs import collect
from study_helpers import EXPERIMENTS, python

NASTY = 'a|b <script>alert("x")</script> & *c* `d` [e](f) _g_ K_A'
STUDY_PAGE = EXPERIMENTS.parent / "docs" / "pages" / "study.md"


def text_of(page):
    """What a browser shows of a page."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing is tested elsewhere; the tables do not depend on it."""
    monkeypatch.setattr("nc_study.reporting.report.pictures", lambda group: iter(()))


def table(text, heading):
    """The rows, by column, of the first table after a heading."""
    lines = text[text.index(f" {heading}") :].splitlines()
    lines = [[entry.strip() for entry in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]
    width = next((i for i, line in enumerate(lines) if i > 1 and set("".join(line)) <= set(":-")), len(lines) + 1) - 1
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:width]]


def results(text, setting):
    """The rows of the networks in a setting."""
    return [row for row in table(text, "Results beside") if row["setting, number of seeds"].startswith(setting)]


def report_on(root, out):
    return build([root], out).with_name("report.md").read_text()


def test_the_table_holds_the_results_numbers_beside_the_papers(made_up, tmp_path, no_pictures):
    paths = [made_up(seed=seed, shift=1.0 + seed) for seed in range(3)]
    text = report_on(paths[0].parent, tmp_path / "out")
    _, deq = results(text, "(3,7) R = 10,")
    networks = [read_record(RunResult, path / "result.json").networks["deq"] for path in paths]
    for classes, paper in (("overall", "73.84±0.72"), ("majority", "96.68±0.87"), ("minority", "64.06±0.66")):
        means = [getattr(network.accuracy, classes).mean for network in networks]
        assert deq[classes] == f"{statistics.fmean(means):.2f}±{statistics.stdev(means):.2f}"
        assert deq[f"{classes}, paper"] == paper
    overall = [network.accuracy.overall for network in networks]
    assert deq["overall, one run over epochs"] == str(overall[0])
    assert deq["ours - paper"] == f"{statistics.fmean(one.mean for one in overall) - 73.84:+.2f} ‡"
    assert "Not comparable with the paper (‡): width 16 instead of 64" in text
    not_run = [row for row in table(text, "Results beside") if "not run" in row["setting, number of seeds"]]
    assert len(not_run) == 18, "two networks in nine of the ten settings"
    assert not_run[0]["overall, paper"] == "93.05±0.17" and not_run[0]["overall"] == "–"
    assert [row["network"] for row in table(text, "Results beside") if "†" in row["overall, paper"]] == [
        "explicit",
        "DEQ",
    ]


def test_what_cannot_be_compared_is_not(made_up, tmp_path, no_pictures):
    path = made_up(dataset="shapes")
    made_up(majority=2, ratio=20, dataset="shapes")
    text = report_on(path.parent, tmp_path / "out")
    assert "these are drawn images, not CIFAR" in text
    rows = results(text, "(3,7) R = 10,") + results(text, "(2,8) R = 20,")
    assert len(rows) == 4 and {row["ours - paper"] for row in rows} == {"–"}
    assert {row["overall, paper"] for row in rows[2:]} == {"–"}, "an imbalance that the paper lacks"


def test_the_papers_experiment_is_compared_without_a_mark(made_up, tmp_path, no_pictures):
    text = report_on(made_up(preset="paper", epochs=100, model="explicit").parent, tmp_path / "out")
    assert "‡" not in text.split("## How")[0] and results(text, "(3,7) R = 10,")[0]["ours - paper"].startswith("-")


def test_verdicts_stand_beside_the_papers_own_numbers(made_up, tmp_path, no_pictures):
    for seed, shift in enumerate((1.0, 1.2, 1.4)):
        path = made_up(seed=seed, shift=shift)
    made_up("other", lr=0.5)
    text = report_on(path.parent, tmp_path / "out")
    verdicts = {row["claim of the paper"]: row for row in table(text, "Verdict on each claim")}
    assert len(verdicts) == 12
    overall = verdicts["Imbalanced: the DEQ's overall accuracy is higher"]
    assert overall["verdict"] == "holds"
    assert overall["the paper's own numbers"] == "higher in 9 of 9, +1.72 points on average"
    assert verdicts["Balanced: the DEQ's accuracy is higher, if marginally"]["verdict"] == "not enough runs (0)"
    sections = text.split("## Results: ")[1:]
    assert [section.partition("\n")[0].endswith("lr 0.5") for section in sections] == [False, True]


def test_provenance_names_every_run(made_up, tmp_path, no_pictures):
    root = made_up().parent
    made_up(seed=1, adjoint="implicit")
    rows = table(report_on(root, tmp_path / "out"), "Provenance")
    assert [row["group"].split(", ")[2] for row in rows] == ["implicit", "jfb"]
    for row in rows:
        result = read_record(RunResult, root / Path(row["folder"]).name / "result.json")
        assert row["kernel"] == "cpp" and row["finished"] == result.finished
        assert (
            row["commit"] == (result.commit or "unknown")[:12]
            and f"torch {result.versions['torch']}" in row["versions"]
        )
        assert row["images a class"] == "500 and 50" and row["seconds in all"] == "14", "two networks, 4 x 1.75 s"


def test_what_counts_in_no_table_is_listed_with_its_reason(made_up, tmp_path, no_pictures):
    root = made_up("good").parent
    (made_up("cut", seed=1) / "result.json").write_text("{")
    (root / "<b>bad|name").mkdir()
    (root / "<b>bad|name" / "failed.json").write_bytes(to_json(Failure("no space", "x", "y")))
    failed, cut = table(report_on(root, tmp_path / "out"), "Runs that count in no table")
    assert failed["state"] == "failed" and failed["reason"] == "no space" and cut["state"] == "unreadable"
    assert failed["folder"].endswith("&lt;b&gt;bad\\|name")
    assert str(root / "<b>bad|name") in text_of((tmp_path / "out/report.html").read_text())


def test_the_page_needs_nothing_else_and_is_the_same_every_time(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr("nc_study.figures.DPI", 30)
    root = made_up(ratio=100, features=True).parent
    (made_up("damaged", ratio=50, features=True) / "features.npz").write_bytes(b"PK damaged")

    def files(out):
        build([root], out)
        return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}

    first = files(tmp_path / "out")
    drawn = {f"figures/{name}.png" for name in ("figure4", "courses", "k3-r100-features", "solver", "confusion")}
    assert set(first) == {"report.html", "report.md"} | drawn
    assert "Not drawn: " in first["report.md"].decode() and "features.npz cannot be read" in first["report.md"].decode()
    text = first["report.html"].decode()
    links = re.findall(r"""(?:src|href|srcset|data)=["']([^"']*)""", text)
    assert sum(link.startswith("data:image/png;base64,") for link in links) == 5
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert not re.search("<(script|link|iframe|object|embed)", text)
    assert "@import" not in text and "url(" not in text and "http" not in text
    assert files(tmp_path / "again") == first


def test_tables_escape_what_they_hold_and_align_numbers():
    names = {NASTY: "1.0", "x": "not run", Source("**bold**"): "–"}
    text = markdown_table([{"name": name, "n": value} for name, value in names.items()])
    lines = text.splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3} and len({len(line) for line in lines}) == 1
    assert re.fullmatch(r"\|:-+\|-+:\|", lines[1]) and "**bold**" in text and "<script>" not in text
    assert NASTY in text_of(to_html("title", text, EXPERIMENTS)), "HTML shows what was written"


def test_the_documentation_quotes_the_committed_results():
    (group,) = collect([EXPERIMENTS / "results" / "cifar10-quick"]).groups
    rows = {tuple(row.values())[:2]: row for row in tables.result_rows(group)}
    quoted = table(STUDY_PAGE.read_text(), "A reduced study")
    assert len(quoted) == 12
    for row in quoted:
        assert {name: rows[tuple(row.values())[:2]][name] for name in row} == row


def test_errors_are_told_in_a_line(made_up, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match="cannot write there"):
        build([made_up().parent], tmp_path / "file" / "out")
    capsys.readouterr()
    assert main(None, [str(tmp_path / "absent")]) == 1
    assert capsys.readouterr() == ("", f"report.py: error: {tmp_path / 'absent'}: no such folder\n")
    with pytest.raises(SystemExit, match="2"):
        main(None, [])


def test_the_script_prints_verdicts_and_paths(made_up, no_pictures, capsys):
    root = made_up(model="explicit").parent
    assert main(None, [str(root)]) == 0
    printed = capsys.readouterr().out
    assert f"report:   {root / 'report' / 'report.html'}" in printed and "not enough runs (0)" in printed
    done = python(str(EXPERIMENTS / "report.py"), "--help")
    assert done.returncode == 0 and "RUNS" in done.stdout and "report.html" in done.stdout
