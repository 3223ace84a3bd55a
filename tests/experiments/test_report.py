"""The report as a whole: numbers of its tables compared with the results, its files, and its errors."""

from __future__ import annotations

import html
import re

import pytest
from nc_study.reporting import tables
from nc_study.reporting.document import Source, markdown_table, to_html
from nc_study.reporting.report import findings, write
from nc_study.reporting.runs import Collection, collect
from runs.options import StudyError
from study_helpers import EXPERIMENTS, run_script

NASTY = 'a|b <script>alert("x")</script> & *c* `d` [e](f) _g_ K_A'


def text_of(page):
    """Text that a browser shows of a page."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def group_of(path):
    """Return the group of the runs that are in one folder with this one."""
    (group,) = collect([path.parent]).groups
    return group


@pytest.mark.parametrize("arm", ["once", "deq-implicit"])
def test_the_protocols_runs_of_only_one_arm(arm, tmp_path):
    (path,) = (EXPERIMENTS / "results" / "protocol").glob(f"cifar10-k3-r100-study-{arm}-seed0-*")
    groups = collect([path]).groups
    (said,) = findings(groups)
    assert groups[0].first_recipe and said.startswith("No verdict: 0 of the 48")
    text = report_of(groups[0], tmp_path)
    assert "## Controls" not in text and "## By setting" not in text and "courses.png" in text


def test_a_run_that_broke_down_is_named(made_up):
    group = group_of(made_up(seed=3))
    assert list(tables.broken_rows(group)) == []
    (network,) = group.networks(*next(iter(group.runs))).values()
    network.curves["loss"] = (*network.curves["loss"][:-1], 1.6)
    (row,) = tables.broken_rows(group)
    assert (row["arm"], row["seed"], row["epoch"]) == ("DEQ, JFB", 3, 4)
    assert (row["loss"], row["converged, %"]) == ("1 to 1.6", "90.0")


def report_of(group, folder):
    """The Markdown of a group's report."""
    return (write(Collection([group], []), folder).parent / "report.md").read_text()


def test_what_cannot_be_compared_is_not(made_up, tmp_path):
    group = group_of(made_up(dataset="shapes"))
    assert group.drawn and "of the paper" not in report_of(group, tmp_path)
    path = made_up("papers/one", preset="paper", epochs=100, model="explicit")
    made_up("papers/two", preset="paper", epochs=100, model="explicit", seed=1)
    group = group_of(path)
    first, *others = tables.paper_rows(group, "2")
    # The mean over epochs 91 to 100 of 40 + seed + epoch / 10.
    expected = {"explicit, paper": "72.57±0.25", "explicit, ours": "50.05±0.71 (2)", "DEQ, ours": "not run"}
    assert not group.not_the_papers and first.items() >= (expected | {"DEQ, paper": "73.84±0.72"}).items()
    assert {row["explicit, ours"] for row in others[2:]} == {"not run"} and len(others) == 8
    assert next(tables.paper_rows(group, "3"))["explicit, paper"] == "80.73±0.48†"
    assert "Tables 1 to 4 of the paper" in report_of(group, tmp_path)


def test_tables_escape_what_they_hold_and_align_numbers():
    names = {NASTY: "1.0", "x": "not run", Source("**bold**"): "–"}
    text = markdown_table([{"name": name, "n": value} for name, value in names.items()])
    lines = text.splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3} and len({len(line) for line in lines}) == 1
    assert re.fullmatch(r"\|:-+\|-+:\|", lines[1]) and "**bold**" in text and "<script>" not in text
    assert NASTY in text_of(to_html("title", text, EXPERIMENTS)), "HTML shows what was written"


@pytest.mark.tier("full")
def test_the_committed_report_is_of_the_committed_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(EXPERIMENTS.parent)
    monkeypatch.setattr("nc_study.figures.features_figure", lambda *_: "a t-SNE takes seconds")
    monkeypatch.setattr("nc_study.reporting.report.png", lambda figure: b"as does drawing")
    assert run_script("report.py", "experiments/results/protocol", "--out", str(tmp_path)) == 0
    assert f"markdown: {tmp_path / 'report.md'}\n" in capsys.readouterr().out
    committed = EXPERIMENTS / "results" / "report"
    for name in ("report.md", "appendix.md", "provenance.md"):
        assert (tmp_path / name).read_text() == (committed / name).read_text()


def test_errors_are_told_in_a_line(made_up, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match="cannot write there"):
        write(collect([made_up().parent]), tmp_path / "file" / "out")
    empty = tmp_path / "empty"
    empty.mkdir()
    for root, reason in (
        (tmp_path / "absent", f"{tmp_path / 'absent'}: no such folder"),
        (empty, f"no runs under {empty}"),
    ):
        assert run_script("report.py", str(root)) == 1
        assert capsys.readouterr() == ("", f"report.py: error: {reason}\n")
    assert run_script("report.py") == 2
