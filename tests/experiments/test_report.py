"""The report as a whole: the numbers of its tables against those of the results, its files, and its errors."""

from __future__ import annotations

import html
import re
import statistics

import pytest
from nc_study.config import StudyError
from nc_study.protocol import ARMS, choose
from nc_study.record import RunResult, read_record
from nc_study.reporting import tables
from nc_study.reporting.document import Source, markdown_table, to_html
from nc_study.reporting.report import write
from nc_study.reporting.runs import collect
from nc_study.reporting.verdicts import progress
from study_helpers import EXPERIMENTS, made_up_trials, run_script

NASTY = 'a|b <script>alert("x")</script> & *c* `d` [e](f) _g_ K_A'
STUDY_PAGE = EXPERIMENTS.parent / "docs" / "pages" / "study.md"


def text_of(page):
    """What a browser shows of a page."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def group_of(path):
    """The group of the runs that are in one folder with this one."""
    (group,) = collect([path.parent]).groups
    return group


def test_the_tables_hold_the_results_numbers_beside_the_papers(made_up):
    paths = [made_up(seed=seed, shift=1.0 + seed) for seed in range(3)]
    for seed in range(3):
        made_up(seed=seed, model="explicit")
    group = group_of(paths[0])
    _, deq = tables.result_rows(group)
    networks = [read_record(RunResult, path / "result.json").network for path in paths]
    for classes, paper in (("overall", "73.84±0.72"), ("majority", "96.68±0.87"), ("minority", "64.06±0.66")):
        means = [network.curves[classes][-1] for network in networks]
        assert deq[classes] == f"{statistics.fmean(means):.2f}±{statistics.stdev(means):.2f}"
        assert deq[f"{classes}, paper"] == paper
    assert deq["overall, last epochs"] != deq["overall"] and deq["NC2 centred"] == "0.80±0.10"
    (apart,) = tables.difference_rows(group)
    assert apart["arm"] == "DEQ, JFB" and apart["overall"] == "+2.00 [-0.48, +4.48]"
    assert apart["NC1"] == "×1.00 [×1.00, ×1.00]" and apart["NC2 centred"] == "-0.200 [-0.448, +0.048]"
    assert "width 16 instead of 64" in group.not_the_papers
    assert tables.missing(group)[1:3] == ["(3,7) R = 50", "(3,7) R = 100"]


@pytest.mark.parametrize("arm", ["once", "deq-implicit"])
def test_the_protocols_runs_of_one_arm_alone(arm):
    (path,) = (EXPERIMENTS / "results" / "protocol").glob(f"cifar10-k3-r100-study-{arm}-seed0-*")
    groups = collect([path]).groups
    assert groups[0].first_recipe and tables.findings(groups)[0].startswith("No verdict yet: 0 of the 48")
    assert tables.control_rows(groups[0]) == []


def test_a_run_that_broke_down_is_named(made_up):
    group = group_of(made_up(seed=3))
    assert tables.broken(group, group.settings) == []
    (network,) = group.networks(*next(iter(group.runs))).values()
    network.curves["loss"] = (*network.curves["loss"][:-1], 1.6)
    (said,) = tables.broken(group, group.settings)
    assert said.startswith("DEQ, JFB, (3,7) R = 10, seed 3 (after epoch ")
    assert tables.broken(group, []) == tables.broken(group, group.settings, ["once"]) == []


def test_the_values_chosen_come_with_the_other_trials():
    rows = {row["arm"]: row for row in tables.chosen_rows(choose(made_up_trials(9)))}
    assert len(rows) == len(ARMS) and rows["DEQ, JFB"] == {
        **{"arm": "DEQ, JFB", "rate": "0.3", "weight decay": "0.0005", "gain": "0.3", "at the edge": "rate"},
        **{"best trial, %": "51.00", "other trials, %": "50.00 to 50.00"},
    }
    (row, *_) = tables.chosen_rows(choose(made_up_trials(5)))
    assert row["rate"] == "0.1" and row["at the edge"] == "–"


def test_what_cannot_be_compared_is_not(made_up):
    group = group_of(made_up(dataset="shapes"))
    assert group.drawn and not any("paper" in name for row in tables.result_rows(group) for name in row)
    group = group_of(made_up("papers/one", preset="paper", epochs=100, model="explicit"))
    assert not group.not_the_papers and tables.result_rows(group)[0]["overall, paper"] == "72.57±0.25"


def test_tables_escape_what_they_hold_and_align_numbers():
    names = {NASTY: "1.0", "x": "not run", Source("**bold**"): "–"}
    text = markdown_table([{"name": name, "n": value} for name, value in names.items()])
    lines = text.splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3} and len({len(line) for line in lines}) == 1
    assert re.fullmatch(r"\|:-+\|-+:\|", lines[1]) and "**bold**" in text and "<script>" not in text
    assert NASTY in text_of(to_html("title", text, EXPERIMENTS)), "HTML shows what was written"


def test_the_documentation_says_what_the_committed_results_do():
    groups = collect([EXPERIMENTS / "results" / "protocol"]).groups
    _, said, _ = re.split("<!-- (?:end of )?findings -->", STUDY_PAGE.read_text())
    quoted = " ".join(said.replace("\\", "").split()).removeprefix("- ").split(" - ")
    assert quoted == tables.findings(groups)
    done, needed = progress(groups[0])
    assert f"{done} of the {needed} preregistered runs are finished" in (EXPERIMENTS.parent / "README.md").read_text()


def test_the_committed_report_is_of_the_committed_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(EXPERIMENTS.parent)
    monkeypatch.setattr("nc_study.figures.features_figure", lambda *_: "a t-SNE takes seconds")
    monkeypatch.setattr("nc_study.reporting.report.png", lambda figure: b"as does drawing")
    assert run_script("report.py", "experiments/results/protocol", "--out", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert f"markdown: {tmp_path / 'report.md'}\n" in printed and "first recipe, tuned arm by arm" in printed
    committed = EXPERIMENTS / "results" / "report"
    assert (tmp_path / "report.md").read_text() == (committed / "report.md").read_text()
    names = {path.name for path in (committed / "figures").iterdir()}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == names
    page = (tmp_path / "report.html").read_text()
    links = re.findall(r"""(?:src|href|srcset|data)=["']([^"']*)""", page)
    assert sum(link.startswith("data:image/png;base64,") for link in links) == len(names)
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links), "the page needs nothing else"
    assert not re.search("<(script|link|iframe|object|embed)|@import|url\\(|http", page)


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
