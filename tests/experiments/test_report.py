"""The report as a whole: numbers of its tables compared with the results, its files, and its errors."""

from __future__ import annotations

import html
import re

import pytest
from nc_study.reporting.document import Source, markdown_table, to_html
from nc_study.reporting.report import write
from nc_study.reporting.runs import collect
from runs.options import StudyError
from study_helpers import EXPERIMENTS, run_script

NASTY = 'a|b <script>alert("x")</script> & *c* `d` [e](f) _g_ K_A'


def text_of(page):
    """Text that a browser shows of a page."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


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
    monkeypatch.setattr("nc_study.reporting.pictures.features_figure", lambda *_: "a t-SNE takes seconds")
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
