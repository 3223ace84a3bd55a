"""The report as a whole: the numbers of its tables against those of the results, its files, and its errors."""

from __future__ import annotations

import json
import os
import re
import statistics
from html.parser import HTMLParser

import pytest
from nc_study.config import StudyError
from nc_study.record import Failure, RunResult, read_record, to_json
from nc_study.reporting.document import Source, markdown_table, to_html
from nc_study.reporting.report import build, main
from PIL import Image
from study_helpers import EXPERIMENTS, python

NASTY = 'a|b <script>alert("x")</script> & *c* `d` [e](f) _g_ K_A'
VOID = {"meta", "img", "br", "hr"}


class Page(HTMLParser):
    """Collects tags, texts and links; an end tag that fits no open tag is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.texts, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], "tags that are never closed"

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing is tested elsewhere; the tables do not depend on it."""
    monkeypatch.setattr("nc_study.reporting.pictures.plan_pictures", lambda group: iter(()))


def tables(text):
    """The rows of each table of a Markdown text, by the last caption or heading before it."""
    found, caption = {}, ""
    for line in text.splitlines():
        if line.startswith(("**", "#")):
            caption = line.strip("*# ")
        elif line.startswith("|"):
            found.setdefault(caption, []).append([entry.strip() for entry in re.split(r"(?<!\\)\|", line)[1:-1]])
    return {caption: rows[2:] for caption, rows in found.items()}


def table(text, start):
    """The rows of the one table whose caption starts so."""
    (rows,) = [rows for caption, rows in tables(text).items() if caption.startswith(start)]
    return rows


def report_on(root, out):
    return build([root], out).with_name("report.md").read_text()


def test_the_tables_hold_the_results_numbers(made_up, tmp_path, no_pictures):
    paths = [made_up(seed=seed, shift=1.0 + seed) for seed in range(3)]
    rows = table(report_on(paths[0].parent, tmp_path / "out"), "Table 2 of the paper, K_A = 3")
    deq = {row[2]: row for row in rows if row[:2] == ["(3,7) R = 10", "DEQ"]}
    networks = [read_record(RunResult, path / "result.json").networks["deq"] for path in paths]
    for classes, paper in (("overall", "73.84±0.72"), ("majority", "96.68±0.87"), ("minority", "64.06±0.66")):
        spreads = [getattr(network.accuracy, classes) for network in networks]
        means = [spread.mean for spread in spreads]
        mean, deviation = statistics.fmean(means), statistics.stdev(means)
        first = f"{means[0]:.2f}±{spreads[0].std:.2f} (seed 0)"
        difference = f"{mean - float(paper.split('±')[0]):+.2f} ‡"
        assert deq[classes][3:] == [paper, first, f"{mean:.2f}±{deviation:.2f}", "3", difference]


def test_settings_that_were_not_run_and_entries_that_do_not_add_up_are_marked(made_up, tmp_path, no_pictures):
    text = report_on(made_up().parent, tmp_path / "out")
    first = ["balanced", "explicit", "overall", "93.05±0.17", "not run", "not run", "0", "–"]
    assert table(text, "Table 1 of the paper, balanced classes")[0] == first
    not_run = [row for number in (2, 3, 4) for row in table(text, f"Table {number} of the paper") if "not run" in row]
    assert len(not_run) == 16, "two networks in eight of the nine settings"
    marked = [(row[0], row[1]) for row in table(text, "Table 3 of the paper") if "†" in row[3]]
    assert marked == [("(5,5) R = 10", "explicit"), ("(5,5) R = 100", "DEQ")] and "† as printed" in text


def test_drawn_images_are_not_compared(made_up, tmp_path, no_pictures):
    text = report_on(made_up(dataset="shapes").parent, tmp_path / "out")
    assert "these are drawn images, not CIFAR" in text
    assert {row[-1] for row in table(text, "Table 2 of the paper") if row[-2] == "1"} == {"not comparable"}


def test_the_papers_experiment_is_compared_without_a_mark(made_up, tmp_path, no_pictures):
    text = report_on(made_up(preset="paper", epochs=100, model="explicit").parent, tmp_path / "out")
    rows = table(text, "Table 2 of the paper")
    assert "‡" not in text.split("## How")[0] and rows[0][-1].startswith("-")


def test_an_imbalance_that_the_paper_lacks_has_a_table(made_up, tmp_path, no_pictures):
    rows = table(report_on(made_up(majority=2, ratio=20).parent, tmp_path / "out"), "Imbalances that are not in")
    assert {row[0] for row in rows} == {"(2,8) R = 20"} and {row[-1] for row in rows} == {"no entry"}


def test_groups_have_sections_of_their_own(made_up, tmp_path, no_pictures):
    root = made_up("a", shift=1.0).parent
    made_up("b", shift=5.0, seed=1, lr=0.5)
    text = report_on(root, tmp_path / "out")
    sections = text.split("## Results: ")[1:]
    assert [section.partition("\n")[0].endswith("lr 0.5") for section in sections] == [False, True]
    for section in sections:
        assert {row[6] for row in table(section, "Table 2") if "not run" not in row} == {"1"}
        assert "Not comparable with the paper (‡): width 16 instead of 64" in section


def test_verdicts_stand_beside_the_papers_own_numbers(made_up, tmp_path, no_pictures):
    for seed, shift in enumerate((1.0, 1.2, 1.4)):
        path = made_up(seed=seed, shift=shift)
    text = report_on(path.parent, tmp_path / "out")
    verdicts = {row[0]: row for row in table(text, "Verdict on each claim")}
    assert len(verdicts) == 12
    overall = verdicts["Imbalanced: the DEQ's overall accuracy is higher"]
    assert overall[1] == "holds" and overall[3] == "higher in 9 of 9, +1.72 points on average"
    assert verdicts["Balanced: the DEQ's accuracy is higher, if marginally"][1] == "not enough runs (0)"
    assert "deviates by 1.10 points over seeds and by 0.13 points over the last epochs" in text


def test_provenance_names_every_run(made_up, tmp_path, no_pictures):
    root = made_up().parent
    made_up(seed=1, adjoint="implicit")
    text = report_on(root, tmp_path / "out")
    rows = table(text, "Provenance")
    assert [row[0] for row in rows] == ["1", "2"] and ["implicit" in row[4] for row in rows] == [False, True]
    for row in rows:
        result = read_record(RunResult, root / os.path.basename(row[-1]) / "result.json")
        assert row[6] == "cpp" and row[9] == result.finished and row[8] == (result.commit or "unknown")[:12]
        assert row[5] == "500 and 50" and row[7] == "14", "two networks, four epochs of 1.75 s"
        assert f"torch {result.versions['torch']}" in dict(table(text, "What was run"))["versions"]


def test_what_counts_in_no_table_is_listed_with_its_reason(made_up, tmp_path, no_pictures):
    root = made_up("good").parent
    (made_up("cut", seed=1) / "result.json").write_text("{")
    (root / "<b>bad|name").mkdir()
    (root / "<b>bad|name" / "failed.json").write_bytes(to_json(Failure("no space", "x", "y")))
    rows = table(report_on(root, tmp_path / "out"), "Runs that count in no table")
    assert [row[1] for row in rows] == ["failed", "unreadable"]
    assert rows[0][0].endswith("&lt;b&gt;bad\\|name") and rows[0][2] == "no space"
    assert str(root / "<b>bad|name") in Page((tmp_path / "out/report.html").read_text()).texts


def test_theory_has_a_section_and_its_figures_stay_where_they_are(tmp_path, no_pictures):
    claim = {"claim": "NC1 = 0", "source": "theorem 3.1", "verdict": "holds", "text": "in all", "model": "deq"}
    content = {"kind": "layer_peeled", "claims": [claim, claim | {"verdict": "does not hold"}]}
    (tmp_path / "layer_peeled.json").write_text(json.dumps(content))
    (tmp_path / "layer_peeled.md").write_text("# more")
    Image.new("RGB", (8, 8)).save(tmp_path / "layer_peeled_limit.png")
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "layer_peeled.json").write_text(json.dumps(content))
    text = report_on(tmp_path, tmp_path / "out")
    assert table(text, "Theory") == [["NC1 = 0", "1", "1", "theorem 3.1"]]
    assert "../again/layer_peeled.json: 1 holds, 1 does not hold." in text, "without an account: a line"
    assert "](../layer_peeled.md)" in text and "No finished run" in text and "](../layer_peeled_limit.png)" in text
    assert list((tmp_path / "out" / "figures").iterdir()) == []
    assert any(link.startswith("data:image") for link in Page((tmp_path / "out/report.html").read_text()).links)


def test_the_page_needs_nothing_else_and_is_the_same_every_time(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr("nc_study.figures.DPI", 30)
    root = made_up(ratio=100).parent

    def files(out):
        build([root], out)
        return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}

    first = files(tmp_path / "out")
    drawn = {f"figures/{name}.png" for name in ("figure4", "solver", "radius", "confusion")}
    assert set(first) == {"report.html", "report.md"} | drawn
    text = first["report.html"].decode()
    page = Page(text)
    assert sum(link.startswith("data:image/png;base64,") for link in page.links) == 4
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.seen)
    assert "@import" not in text and "url(" not in text and "http" not in text
    assert files(tmp_path / "again") == first


def test_tables_escape_what_they_hold_and_align_numbers():
    names = {NASTY: "1.0", "x": "not run", Source("**bold**"): "–"}
    text = markdown_table([{"name": name, "n": value} for name, value in names.items()])
    lines = text.splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3} and len({len(line) for line in lines}) == 1
    assert re.fullmatch(r"\|:-+\|-+:\|", lines[1]) and "**bold**" in text and "<script>" not in text
    assert NASTY in "".join(Page(to_html("title", text, EXPERIMENTS)).texts), "HTML shows what was written"


def test_features_that_cannot_be_drawn_are_told_in_their_place(made_up, tmp_path):
    path = made_up(features=True, model="explicit")
    (path / "features.npz").write_bytes(b"PK damaged")
    text = report_on(path.parent, tmp_path / "out")
    assert "Not drawn: " in text and "features.npz cannot be read" in text
    assert (tmp_path / "out" / "figures" / "confusion.png").exists()


def test_errors_are_told_in_a_line(made_up, tmp_path, capsys):
    with pytest.raises(StudyError, match="no runs under"):
        build([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()
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
