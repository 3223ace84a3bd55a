"""The report as a whole: the numbers of its tables against those of the results, its files, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import EXPERIMENTS
from nc_study.config import StudyError
from nc_study.reporting.report import build, main, write
from PIL import Image
from test_report_page import Checker


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing is tested elsewhere; the tables do not depend on it."""
    monkeypatch.setattr("nc_study.reporting.pictures.plan_pictures", lambda group: iter(()))


def tables(text):
    """The rows of each table of a Markdown text, by its caption."""
    found, caption = {}, ""
    for line in text.splitlines():
        if line.startswith("**"):
            caption = line.strip("*")
            found[caption] = []
        elif line.startswith("| "):
            found[caption].append([cell.strip() for cell in line.strip("|").split(" | ")])
    return {caption: rows[2:] for caption, rows in found.items()}


def table(text, start):
    """The rows of the one table whose caption starts so."""
    (rows,) = [rows for caption, rows in tables(text).items() if caption.startswith(start)]
    return rows


def report_on(root, out):
    return build([root], out).with_name("report.md").read_text()


def result_of(path):
    return json.loads((path / "result.json").read_text())


def test_the_tables_hold_the_results_numbers(made_up, tmp_path, no_pictures):
    paths = [made_up(seed=seed, shift=1.0 + seed) for seed in range(3)]
    rows = table(report_on(paths[0].parent, tmp_path / "out"), "Table 2 of the paper, K_A = 3: quick preset on cifar10")
    deq = {row[2]: row for row in rows if row[:2] == ["(3,7) R = 10", "DEQ"]}
    for classes, paper in (("overall", "73.84±0.72"), ("majority", "96.68±0.87"), ("minority", "64.06±0.66")):
        spreads = [result_of(path)["models"]["deq"]["accuracy"][classes] for path in paths]
        means = [spread["mean"] for spread in spreads]
        mean = sum(means) / 3
        deviation = (sum((one - mean) ** 2 for one in means) / 2) ** 0.5
        first = f"{means[0]:.2f}±{spreads[0]['std']:.2f} (seed 0)"
        difference = f"{mean - float(paper.split('±')[0]):+.2f} ‡"
        assert deq[classes][3:] == [paper, first, f"{mean:.2f}±{deviation:.2f}", "3", difference]


def test_cells_that_were_not_run_say_so(made_up, tmp_path, no_pictures):
    text = report_on(made_up().parent, tmp_path / "out")
    assert table(text, "Table 1 of the paper, balanced classes")[0] == (
        ["balanced", "explicit", "overall", "93.05±0.17", "not run", "not run", "0", "–"]
    )
    not_run = [row for number in (2, 3, 4) for row in table(text, f"Table {number} of the paper") if "not run" in row]
    assert len(not_run) == 16, "two networks in eight of the nine cells"


def test_entries_that_do_not_add_up_are_marked(made_up, tmp_path, no_pictures):
    text = report_on(made_up().parent, tmp_path / "out")
    marked = [(row[0], row[1]) for row in table(text, "Table 3 of the paper") if "†" in row[3]]
    assert marked == [("(5,5) R = 10", "explicit"), ("(5,5) R = 100", "DEQ")]
    assert "† as printed" in text


def test_other_settings_are_named_and_drawn_images_are_not_compared(made_up, tmp_path, no_pictures):
    root = made_up("a").parent
    made_up("b", dataset="shapes")
    made_up("c", preset="paper", epochs=100, model="explicit")
    text = report_on(root, tmp_path / "out")
    assert "Not comparable with the paper (‡): width 16 instead of 64" in text
    assert "these are drawn images, not CIFAR" in text
    drawn = table(text, "Table 2 of the paper, K_A = 3: quick preset on shapes")
    assert {row[-1] for row in drawn if row[-2] == "1"} == {"not comparable"}
    whole = table(text, "Table 2 of the paper, K_A = 3: paper preset on cifar10")
    assert all("‡" not in row[-1] for row in whole) and whole[0][-1].startswith("-")


def test_an_imbalance_that_the_paper_lacks_has_a_table(made_up, tmp_path, no_pictures):
    text = report_on(made_up(majority=2, ratio=20).parent, tmp_path / "out")
    rows = table(text, "Imbalances that are not in the paper")
    assert {row[0] for row in rows} == {"(2,8) R = 20"} and {row[-1] for row in rows} == {"no entry"}


def test_groups_have_tables_of_their_own(made_up, tmp_path, no_pictures):
    root = made_up("a", shift=1.0).parent
    made_up("b", shift=5.0, seed=1, lr=0.5)
    text = report_on(root, tmp_path / "out")
    captions = [caption for caption in tables(text) if caption.startswith("Table 2")]
    assert len(captions) == 2 and sum("lr 0.5" in caption for caption in captions) == 1
    for caption in captions:
        assert {row[6] for row in tables(text)[caption] if "not run" not in row} == {"1"}


def test_verdicts_and_the_paired_differences(made_up, tmp_path, no_pictures):
    for seed, shift in enumerate((1.0, 1.2, 1.4)):
        path = made_up(seed=seed, shift=shift)
    text = report_on(path.parent, tmp_path / "out")
    verdicts = {row[0]: row[1] for row in table(text, "Verdict on each claim")}
    assert verdicts["Imbalanced: the DEQ's overall accuracy is higher"] == "holds"
    assert verdicts["Balanced: the DEQ's accuracy is higher, if marginally"] == "not enough runs (0)"
    assert {row[0]: row[1] for row in table(text, "The paper's claims")} == verdicts
    overall, *_ = table(text, "Paired differences by cell")
    assert overall[:4] == ["accuracy, overall", "(3,7) R = 10", "3", "+1.20"]
    assert overall[4:] == ["+0.70 to +1.70", "+1.00 (0), +1.20 (1), +1.40 (2)", "holds"]
    assert "deviates by 1.10 points over seeds and by 0.13 points over the last epochs" in text


def test_provenance_names_every_run(made_up, tmp_path, no_pictures):
    root = made_up().parent
    made_up(seed=1, adjoint="implicit")
    rows = table(report_on(root, tmp_path / "out"), "Every run that counts")
    assert [row[0] for row in rows] == ["1", "2"] and {row[6] for row in rows} == {"jfb", "implicit"}
    for row in rows:
        result = result_of(root / os.path.basename(row[13]))
        assert row[7] == "cpp" and row[12] == result["finished"] and row[11] == result["commit"][:12]
        assert row[5] == "1000 and 100" and row[8] == "14", "two networks, four epochs of 1.75 s"
        assert f"torch {result['versions']['torch']}" in row[10]


def test_what_counts_in_no_table_is_listed_with_its_reason(made_up, tmp_path, no_pictures):
    root = made_up("good").parent
    (made_up("cut", seed=1) / "result.json").write_text("{")
    (root / "<b>bad|name").mkdir()
    (root / "<b>bad|name" / "failed.json").write_text(json.dumps({"error": "no space"}))
    page = write([root], tmp_path / "out")
    rows = table(page.markdown.read_text(), "Folders without a result of use")
    assert [row[1] for row in rows] == ["failed", "unreadable"]
    assert rows[0][0].endswith("&lt;b&gt;bad\\|name") and rows[0][2] == "no space"
    assert str(root / "<b>bad|name") in Checker(page.html.read_text()).texts
    assert any(line.startswith("failed: ") for line in page.summary)


def test_theory_has_a_section(tmp_path, no_pictures):
    claim = {"claim": "NC1 = 0", "source": "theorem 3.1", "verdict": "holds", "text": "in all", "model": "deq"}
    other = claim | {"verdict": "does not hold", "model": None, "e_w": 0.01}
    content = {"kind": "layer_peeled", "claims": [claim | {"numbers": {"NC1": 1.5e-9, "runs": [1, 2]}}, other]}
    (tmp_path / "layer_peeled.json").write_text(json.dumps(content))
    (tmp_path / "layer_peeled.md").write_text("# more")
    Image.new("RGB", (8, 8)).save(tmp_path / "layer_peeled_limit.png")
    (tmp_path / "layer_peeled_limit.svg").write_text("<svg/>")
    text = report_on(tmp_path, tmp_path / "out")
    short = table(text, "Layer-peeled problems solved numerically, in short")
    assert short == [["NC1 = 0", "1", "1", "theorem 3.1"]]
    assert table(text, "Layer-peeled problems solved numerically, case by case") == [
        ["NC1 = 0", "model deq", "holds", "in all", "NC1 1.5e-09, runs (1, 2)", "theorem 3.1"],
        ["NC1 = 0", "e_w 0.01", "does not hold", "in all", "–", "theorem 3.1"],
    ]
    assert "layer_peeled.md" in text and "No finished run" in text and "](figures/layer_peeled_limit.png)" in text
    copies = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert copies == {"layer_peeled_limit.png", "layer_peeled_limit.svg"}


def test_the_report_and_its_figures_are_files_of_the_same_bytes_every_time(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr("nc_study.figures.DPI", 30)
    root = made_up(ratio=100).parent

    def files(out):
        page = write([root], out)
        assert page.pictures == 4
        return {path.relative_to(out): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}

    first = files(tmp_path / "out")
    names = {str(name) for name in first}
    assert {"report.html", "report.md", "figures/figure4.png", "figures/figure4.svg"} <= names
    pngs = [name for name in names if name.endswith("png")]
    assert len(pngs) == 4 and all(name[:-3] + "svg" in names for name in pngs)
    page = Checker(first[next(name for name in first if name.name == "report.html")].decode())
    assert sum(link.startswith("data:image/png;base64,") for link in page.links) == 4
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)
    assert files(tmp_path / "again") == first
    plain = write([root], tmp_path / "plain", vector=False)
    assert len(list((tmp_path / "plain").rglob("*.png"))) == 4 and not list((tmp_path / "plain").rglob("*.svg"))
    assert ".svg" in first[next(name for name in first if name.name == "report.md")].decode()
    assert ".svg" not in plain.markdown.read_text()


def test_features_that_cannot_be_drawn_are_told_in_their_place(made_up, tmp_path):
    path = made_up(features=True, model="explicit")
    (path / "features.npz").write_bytes(b"PK damaged")
    text = report_on(path.parent, tmp_path / "out")
    assert "Not drawn: " in text and "features.npz cannot be read" in text
    assert (tmp_path / "out" / "figures" / "k3-r10-confusion.png").exists()


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(StudyError, match="no runs under"):
        build([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_out_that_cannot_be_written_is_an_error(made_up, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match="cannot write there"):
        build([made_up().parent], tmp_path / "file" / "out")


def test_errors_are_told_in_a_line(tmp_path, capsys):
    assert main(None, [str(tmp_path / "absent")]) == 1
    assert capsys.readouterr() == ("", f"report.py: error: {tmp_path / 'absent'}: no such folder\n")
    with pytest.raises(SystemExit, match="2"):
        main(None, [])


def test_verdicts_and_paths_are_printed(made_up, capsys):
    root = made_up(model="explicit").parent
    assert main(None, [str(root)]) == 0
    printed = capsys.readouterr().out
    assert f"report:   {root / 'report' / 'report.html'}" in printed and "not enough runs (0)" in printed
    assert (root / "report" / "figures" / "k3-r10-course.svg").exists()


def test_the_script_tells_what_it_does():
    command = [sys.executable, str(EXPERIMENTS / "report.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "RUNS" in done.stdout and "report.html" in done.stdout
