"""The report as a whole: the numbers of its tables against those of the results, its files, and its errors."""

from __future__ import annotations

import html
import re
import statistics

import msgspec
import pytest
from nc_study import protocol
from nc_study.config import StudyError
from nc_study.protocol import choose
from nc_study.record import RunResult, read_record
from nc_study.reporting import tables
from nc_study.reporting.document import Source, markdown_table, to_html
from nc_study.reporting.report import write
from nc_study.reporting.runs import collect
from nc_study.reporting.verdicts import progress
from study_helpers import EXPERIMENTS, made_up_trials, python, run_script

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
    return write(collect([root]), out).with_name("report.md").read_text()


def test_the_table_holds_the_results_numbers_beside_the_papers(made_up, tmp_path, no_pictures):
    paths = [made_up(seed=seed, shift=1.0 + seed) for seed in range(3)]
    for seed in range(3):
        made_up(seed=seed, model="explicit")
    text = report_on(paths[0].parent, tmp_path / "out")
    _, deq = results(text, "(3,7) R = 10,")
    networks = [read_record(RunResult, path / "result.json").network for path in paths]
    for classes, paper in (("overall", "73.84±0.72"), ("majority", "96.68±0.87"), ("minority", "64.06±0.66")):
        means = [network.curves[classes][-1] for network in networks]
        assert deq[classes] == f"{statistics.fmean(means):.2f}±{statistics.stdev(means):.2f}"
        assert deq[f"{classes}, paper"] == paper
    assert deq["overall, last epochs"] != deq["overall"] and deq["NC2 centred"] == "0.80±0.10"
    (apart,) = table(text, "Differences from")
    assert apart["arm"] == "DEQ, JFB" and apart["overall"] == r"+2.00 \[-0.48, +4.48\]"
    assert apart["NC1"] == r"×1.00 \[×1.00, ×1.00\]" and apart["NC2 centred"] == r"-0.200 \[-0.448, +0.048\]"
    assert "Not comparable with the paper: width 16 instead of 64" in text and "(3,7) R = 50; (3,7) R = 100;" in text


def test_the_protocols_runs_come_with_the_values_chosen(made_up, tmp_path, no_pictures, monkeypatch):
    found = choose(made_up_trials(9))
    monkeypatch.setattr(protocol, "TUNING", tmp_path / "tuning.json")
    protocol.TUNING.write_bytes(msgspec.json.encode(found))
    path = made_up(preset="study", epochs=30, precision="bf16", **found.chosen["deq-jfb"])
    text = report_on(path.parent, tmp_path / "out")
    rows = {row["arm"]: row for row in table(text, "Hyper-parameters")}
    assert len(rows) == len(found.chosen) and rows["DEQ, JFB"] == {
        **{"arm": "DEQ, JFB", "rate": "0.3", "weight decay": "0.0005", "gain": "0.3", "at the edge": "rate"},
        **{"best trial, %": "51.00", "other trials, %": "50.00 to 50.00"},
    }
    (row, *_) = tables.chosen_rows(choose(made_up_trials(5)))
    assert row["rate"] == "0.1" and row["at the edge"] == "–"


def test_what_cannot_be_compared_is_not(made_up, tmp_path, no_pictures):
    path = made_up(dataset="shapes")
    made_up(majority=2, ratio=20, dataset="shapes")
    text = report_on(path.parent, tmp_path / "out")
    assert "these are drawn images, not CIFAR" in text and "paper's ±" not in text
    assert [[name for name in row if "paper" in name] for row in table(text, "Results\n")] == [[], []]
    text = report_on(made_up("papers", preset="paper", epochs=100, model="explicit"), tmp_path / "out")
    assert "Not comparable" not in text and results(text, "(3,7) R = 10,")[0]["overall, paper"] == "72.57±0.25"


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
    assert f"{done} of the {needed} runs that count are finished" in (EXPERIMENTS.parent / "README.md").read_text()


def test_the_committed_report_is_of_the_committed_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(EXPERIMENTS.parent)
    monkeypatch.setattr("nc_study.figures.features_figure", lambda *_: "a t-SNE takes seconds")
    monkeypatch.setattr("nc_study.reporting.report.png", lambda figure: b"as does drawing")
    assert run_script("report.py", "experiments/results/protocol", "--out", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert f"markdown: {tmp_path / 'report.md'}\n" in printed and "main runs of the protocol" in printed
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
    # Nothing that takes seconds to import stands before the check.
    program = (
        "import runpy, sys; sys.argv[:] = ['report.py', sys.argv[1]]\ntry: runpy.run_path(%r, run_name='__main__')\n"
    )
    program += "except SystemExit: print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    assert python("-c", program % str(EXPERIMENTS / "report.py"), str(empty)).stdout == "False False\n"
