"""benchmarks/report.py: tables from rows, targets judged by the data, checked numbers in sentences."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import report
from harness import tables

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"gpu": None, "processor": "Made Up", "cores": 2, "threads": 2, "commit": "a" * 40}
MACHINE |= {"deqfast": "0.1", "torch": "9.9", "triton": None, "python": "3.99"}
README = "# A\n\n<!-- numbers: solvers in short -->\n<!-- end of numbers -->\n\nafter\n"


def record(rows, **machine):
    return report.Record(Path("a.json"), MACHINE | machine, "measure", "2026-01-02T03:04+00:00", None, rows)


def solve_rows(gain):
    """Rows of the four solvers by deqfast and torchdeq; deqfast `gain` times as fast as torchdeq."""
    rows = []
    for case in report.SHOWN["solvers"]:
        row = {"section": "solves", "case": case, "floor_x": 1.1}
        rows += [row | {"provider": "cpp", "solver_ms": 2.0, "peak_bytes": 1e7, "gains": {"torchdeq": gain}}]
        rows += [row | {"provider": "torchdeq", "solver_ms": 2.0 * gain, "peak_bytes": 2e7}]
    return rows


def judged(*records):
    """Text on each target."""
    rows = report.targets(report.Results([*records])).rows
    return {row["target"]: (row["measured"], row["state"]) for row in rows}


def test_a_number_of_several_runs_is_all_of_theirs():
    rows = [{"row": "a", "time": time, "waits": "9"} for time in ("2.71 ms", "2.37 ms")]
    assert tables.Table("T", rows).facts() == {"t.a.time": "2.71 ms and 2.37 ms", "t.a.waits": "9"}


def test_of_several_runs_all_with_the_most_threads_must_meet_a_target():
    records = [record(solve_rows(gain)) for gain in (10.0, 24.0, 20.0)]
    records.append(record(solve_rows(gain=2.0), threads=1))
    assert ("10.0 to 24.0×", "missed in 1 of 3 runs") in judged(*records).values()
    runs = report.Results(records).cases("solves")["broyden-n20-128x8192"]
    line = {title: text(runs) for title, text in report.columns("Solves").items()}
    assert line["gain over torchdeq"] == "20.0× (10.0 to 24.0×)" and line["memory relative to torchdeq"] == "0.500×"
    assert (line["deqfast"], line["torchdeq"]) == ("2.00 ms", "40.0 ms")


def test_of_several_runs_on_a_gpu_the_newest_is_shown_and_all_are_judged():
    row = {"section": "ops", "case": "anderson-m6-bf16-step-128x8192", "provider": "cuda", "ms": 0.019}
    other = row | {"provider": "triton", "ms": 0.03}
    untimed = {"section": "profile", "case": "picard", "provider": "cuda-graph"}  # without a time
    newest = replace(record([row, untimed], gpu="NVIDIA H200", threads=1), date="2026-11-27")
    older = replace(record([row | {"ms": 0.021}, other], gpu="NVIDIA H200"), date="2026-11-26")
    (table,) = report.on_gpus(report.Results([newest, older]))
    assert table.title == "NVIDIA H200" and {line["time"] for line in table.rows} == {"19.0 µs", "30.0 µs"}
    (judgement,) = (state for what, (_, state) in judged(newest, older).items() if what.startswith(row["case"]))
    assert judgement == "missed in 1 of 2 runs"


def test_a_race_of_several_runs_has_medians_and_is_reached_in_all_of_them():
    row = {"section": "residual", "case": "digits", "provider": "a", "tol": 1e-3, "reached": True}
    rows = [[row | {"ms": ms, "gain": ms / 2}, row | {"tol": 1e-5, "reached": ms < 9}] for ms in (1.0, 9.0, 3.0)]
    runs = [*map(record, rows), record([row | {"ms": 20.0}], threads=1)]  # those with the most threads count
    loose, tight = report.raced(report.Results(runs))
    assert (loose["ms"], loose["gain"], loose["reached"], tight["reached"]) == (3.0, 1.5, True, False)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with the committed records, whose tables and figures are not yet made."""
    committed, benchmarks = ROOT / "benchmarks", tmp_path / "benchmarks"
    shutil.copytree(committed / "results", benchmarks / "results", ignore=shutil.ignore_patterns("*.png"))
    blocks = re.findall("<!-- numbers: .* -->\n", (committed / "RESULTS.md").read_text())
    (benchmarks / "RESULTS.md").write_text("<!-- end of numbers -->\n".join([*blocks, ""]))
    (tmp_path / "README.md").write_text(README)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    return tmp_path


def check(*arguments):
    """Output of the script; "" if nothing is wrong."""
    try:
        report.main(arguments)
    except SystemExit as stop:
        return str(stop.code)
    return ""


def test_the_committed_page_is_what_the_committed_records_give():
    assert check("--check") == ""


def test_check_fails_until_all_is_written_and_once_the_data_change(root):
    assert "README.md differs from the records" in check("--check")
    assert check() == check("--check") == ""
    text = (root / "README.md").read_text()
    assert "| Picard | " in text and text.endswith("<!-- end of numbers -->\n\nafter\n")
    for name, outdated in (("training_step_cpu", "RESULTS.md"), ("suite_cpu", "gradient_error.png")):
        path = root / "benchmarks" / "results" / f"{name}.json"
        data = json.loads(path.read_text())
        path.write_text(json.dumps(data | {"date": "2001-01-01T00:00+00:00", "rows": data["rows"][:-1]}))
        assert f"{outdated} differs from the records" in check("--check")
    (root / "docs").mkdir()
    (root / "docs" / "faq.md").write_text("A\n34<!-- targets.all -->\n")
    assert "faq.md, line 2: targets.all is 51" in check("--check")


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("It is 20.0×<!-- a.gain --> as fast.", ""),
        ("It is 18.6 to 22.4×<!-- a.gain --> as fast.", ""),
        ("It is 120.0×<!-- a.gain --> as fast.", "is 20.0× (18.6 to 22.4×), the text says"),
        ("It misses 0 of\n2<!-- a.missed -->.", ""),
        ("It misses -0<!-- a.missed -->.", "is 0 of 2, the text says"),
        ("Of 5<!-- no.such.number -->.", "no number is called no.such.number"),
    ],
)
def test_numbers_in_sentences_are_guarded(sentence, wrong):
    said = list(report.wrong_numbers(f"A\n{sentence}\n", {"a.gain": "20.0× (18.6 to 22.4×)", "a.missed": "0 of 2"}))
    assert len(said) == bool(wrong) and all(wrong in text and text.startswith("line 2") for text in said)


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("benchmarks/results/odd.json", "{", "odd.json: no record: "),
        ("benchmarks/results/odd.json", '{"rows": []}', "odd.json: no record: .*machine"),
        ("benchmarks/results/training_step_cpu*.json", None, "no record .* has rows of section 'training step"),
        ("README.md", "<!-- numbers: solves -->\n", "README.md: <!-- numbers: solves .*needs an .*"),
        ("README.md", "<!-- numbers: a -->\n<!-- end of numbers -->\n", "README.md: .* one of the names targets, "),
    ],
)
def test_what_is_no_record_missing_or_no_block_is_named(root, path, content, said):
    if content:
        (root / path).write_text(content)
    for record in [] if content else root.glob(path):
        record.unlink()
    assert re.search(said, check("--check"))
