"""benchmarks/report.py: tables from rows, targets judged by the data alone, numbers in sentences that are checked."""

import json
import re
from pathlib import Path

import pytest
import report
from harness import tables
from harness.targets import GPU_TARGETS, TARGETS

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"gpu": None, "processor": "Made Up", "cores": 2, "threads": 2, "commit": "a" * 40}
MACHINE |= {"deqfast": "0.1", "torch": "9.9", "triton": None, "python": "3.99"}
README = "# A\n\n<!-- numbers: solvers in short -->\n<!-- end of numbers -->\n\nafter\n"


def rows_of(section, case, providers=("cpp",), **columns):
    """A row of each provider with the same columns."""
    return [{"section": section, "case": case, "provider": name, **columns} for name in providers]


def solve_rows(gain=20.0, floor_x=1.1):
    """Rows of the four solvers by deqfast and torchdeq; deqfast `gain` times as fast as torchdeq."""
    rows = []
    for case in report.SOLVERS:
        both = {"ms_min": 44.0, "floor_x": floor_x, "residual": 1e-3}
        rows += rows_of("solves", case, **both, solver_ms=2.0, peak_bytes=1e7, gains={"torchdeq": gain})
        rows += rows_of("solves", case, ("torchdeq",), **both, solver_ms=2.0 * gain, peak_bytes=2e7)
    return rows


def residual_rows():
    """Two problems of the suite, one of which torchdeq misses, and a trained cell."""
    rows, reached = [], {"tol": 1e-5, "evaluations": 12, "most_evaluations": 60, "reached": True, "ms": 2.0}
    for case in ("even 0.9, b 1", "even 0.9, b 0.01", "digits cell"):
        rows += rows_of("residual", case, ("deqfast picard",), **reached, gain=3.0)
        theirs = reached | {"reached": case == "even 0.9, b 1"}
        rows += rows_of("residual", case, ("torchdeq fixed_point_iter",), **theirs)
    course = {"batch": 2, "dim": 3, "course": {"ms": [1.0, 2.0], "residual": [0.1, None]}}
    return [*rows, *rows_of("residual course", report.SHOWN[0], ("deqfast picard",), **course)]


def other_rows():
    """Rows of every other section, at least one of each; of the training step those of two runs."""
    step = {"device": "cpu", "paper_hours": 3.0, "nc_share": 0.001, "evaluations": 9.0}
    step |= {"times_explicit": 1.5, "flop_ratio": 1.6, "over_flop": 0.94}
    model = {"ms": 1.0, "gpus": [1, 8], "images_per_second": [1e3, 8e3], "internet_s": 36e5}
    return [
        *rows_of("nc", "nc1-2000x8192-K100-fp64", ms_min=10.0, error=0.0, gains={"pinv": 600.0}),
        *(row for name in ("ops", "training", "fc", "rivals") for row in rows_of(name, name, ms_min=1.0)),
        *rows_of("training step", "width 16, batch 32, jfb", ("explicit", "deq"), ms=2.0, **step),
        *rows_of("training step", "width 16, batch 32, jfb", ("explicit", "deq"), ms=4.0, **step),
        *rows_of("options", "trace", evaluations=20.0, peak_bytes=71e6),
        *rows_of("internet scale (model)", "MDEQ, jfb, broyden", ("torchdeq", "deqfast"), **model),
        *rows_of("ops", "step", ("torchdeq",), fault="residual nan"),
    ]


def write(root, name, rows, **machine):
    data = {"machine": MACHINE | machine, "command": f"measure {name}", "date": "2026-01-02T03:04+00:00"}
    path = root / "benchmarks" / "results" / f"{name}.json"
    path.write_text(json.dumps(data | {"remark": "made up", "rows": rows}))


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with made-up records of every section, and the tables of the results page not yet written."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    pages = [ROOT / "benchmarks" / "RESULTS.md", *(ROOT / "docs" / "pages").glob("*.md")]
    blocks = re.findall("<!-- numbers: .* -->\n", "".join(page.read_text() for page in pages))
    page = "".join(f"{block}<!-- end of numbers -->\n" for block in blocks)
    (tmp_path / "benchmarks" / "RESULTS.md").write_text(page)
    (tmp_path / "README.md").write_text(README)
    write(tmp_path, "others", [*residual_rows(), *other_rows()])
    write(tmp_path, "suite", solve_rows())
    monkeypatch.setattr(report, "ROOT", tmp_path)
    return tmp_path


def written(root):
    """The results page of the records."""
    check(root, [])
    return (root / "benchmarks" / "RESULTS.md").read_text()


def check(root, arguments=("--check",)):
    """What it says; "" where all is as it should be."""
    try:
        report.main(arguments)
    except SystemExit as stop:
        return str(stop.code)
    return ""


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (tables.digits, 9.996, "10.0"),
        (tables.digits, 5e-5, "5.0e-5"),
        (tables.duration, 0.0123, "12.3 µs"),
        (tables.duration, 0.9996, "1.00 ms"),
        (tables.scientific, 0.0, "below 2.2e-16"),
        (tables.percent, 0.0348, "3.48 %"),
        (tables.span, [], ""),
        (tables.span, [3.9, 5.1, 4.0], "3.90 to 5.10×"),
        (tables.span, [4.001, 4.002], "4.00×"),
    ],
)
def test_numbers_have_three_digits_and_a_unit_and_ranges_ends_that_differ(form, value, text):
    assert form(value) == text


def test_tables_leave_out_empty_columns_and_escape_bars():
    rows = [{"case": "a|b", "empty": "", "ms": "1"}, {"case": "c", "empty": "", "ms": "2"}]
    table = tables.Table("T", rows)
    assert table.lines() == ["| case | ms |", "| --- | ---: |", "| a\\|b | 1 |", "| c | 2 |"]
    assert table.lines(names={"c": "C"})[2:] == ["| C | 2 |"]
    assert table.facts() == {"t.a-b.ms": "1", "t.c.ms": "2"}
    assert tables.Table("T", []).lines() == []


def test_rows_are_shown_with_what_is_wrong_and_what_was_skipped(root, capsys):
    rows = [
        *rows_of("ops", "step", providers=("cuda",), ms=1.0, ms_min=0.5, gains={"torch": 4.0}),
        *rows_of("ops", "step", providers=("triton",), fault="wrong: 0.1"),
        *rows_of("ops", "step", skipped="no compiler"),
    ]
    write(root, "odd", rows)
    report.main(["--show", str(root / "benchmarks" / "results")])
    text = capsys.readouterr().out
    for found in (r"ops step cuda +500 µs +torch 4.00×\n", r"ops step triton +wrong: 0.1\n", "1 skipped, cpp: no com"):
        assert re.search(found, text), found


def judged(root):
    """What is said of each target."""
    rows = report.targets(report.Results.read(root / "benchmarks" / "results")).rows
    return {row["target"]: (row["measured"], row["state"]) for row in rows}


def test_a_target_is_met_or_missed_by_the_data_alone(root):
    found = [state for _, state in judged(root).values()]
    assert len(found) == len(TARGETS) + len(GPU_TARGETS) == 35
    assert (found.count("met"), found.count("not measured: no GPU")) == (4 + 4 + 2 + 2 + 2, 18)
    write(root, "suite", solve_rows(gain=5.0, floor_x=1.7))
    found = [state for _, state in judged(root).values()]
    assert found.count("missed in 1 of 1 runs") == 2 + 4  # gains of Anderson bf16 and Broyden, all four floors


def test_of_several_runs_all_with_the_most_threads_must_meet_a_target(root):
    write(root, "suite_one", solve_rows(gain=2.0), threads=1)
    for name, gain in (("suite", 10.0), ("suite_second", 24.0), ("suite_third", 20.0)):
        write(root, name, solve_rows(gain=gain))
    assert ("10.0 to 24.0×", "missed in 1 of 3 runs") in judged(root).values()
    assert "| 20.0× (10.0 to 24.0×) |" in written(root)


def test_targets_of_a_gpu_are_judged_by_the_better_kernel(root):
    case = "anderson-m6-bf16-step-128x8192"
    rows = [*rows_of("ops", case, ("cuda",), ms=0.019), *rows_of("ops", case, ("triton",), ms=0.03)]
    write(root, "h200_ops", rows, gpu="NVIDIA H200")
    write(root, "h200_fc", rows_of("fc", "other", ("cuda",), ms=1.0), gpu="NVIDIA H200")
    found, text = judged(root), written(root)
    assert [state for what, (_, state) in found.items() if what.startswith(case)] == ["met"]
    assert "no GPU" not in str(found) and text.count("### NVIDIA H200") == 1
    assert f"| ops {case} cuda | 19.0 µs |" in text and "| fc other cuda | 1.00 ms |" in text


def test_everything_measured_is_on_the_page_and_nothing_of_python(root):
    text = written(root)
    for found in (
        "| broyden-n20-128x8192 | 2.00 ms | 40.0 ms |",
        "| deqfast picard | 0 of 2 | 12 | 3.00× (2) |",
        "| torchdeq fixed_point_iter | 1 of 2 | 36 |  |\n",
        "| torchdeq fixed_point_iter | missed |",
        "| width 16, batch 32, jfb | 3.00 ms | 3.00 ms |",
        "| MDEQ, jfb, broyden | 1,000 / 1,000 | 8,000 / 8,000 | 1.00× | 1000 h / 1000 h |",
        "| Made Up, 2 cores, 2 threads, deqfast 0.1, torch 9.9, Python 3.99 | aaaaaaa, 2026-01-02 |",
        "`measure suite`; made up",
        "no GPU time is reported",
    ):
        assert found in text, found
    assert not re.search(r"\bNone\b|(?<!residual )\bnan\b|\{|\}|\[\]", text)


def test_check_fails_until_all_is_written_and_once_the_data_change(root):
    assert "README.md is not what the records give" in check(root)
    assert check(root, []) == check(root) == ""
    assert "| Picard | 2.00 ms | 40.0 ms | 20.0× |" in (root / "README.md").read_text()
    assert (root / "README.md").read_text().endswith("<!-- end of numbers -->\n\nafter\n")
    write(root, "suite", solve_rows(gain=3.0))
    assert "RESULTS.md is not what the records give" in check(root)
    write(root, "others", [*residual_rows(), *other_rows(), residual_rows()[-1]])
    assert "time_to_residual.png is not what the records give" in check(root)


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("It is 20.0×<!-- a.gain --> as fast.", ""),
        ("It is 18.6 to 22.4×<!-- a.gain --> as fast.", ""),
        ("It is 120.0×<!-- a.gain --> as fast.", "is 20.0× (18.6 to 22.4×), the text says"),
        ("It misses 0<!-- a.missed -->.", ""),
        ("It misses 0 of\n2<!-- a.missed -->.", ""),
        ("It misses -0<!-- a.missed -->.", "is 0 of 2, the text says"),
        ("Of 5<!-- no.such.number -->.", "no number is called no.such.number"),
    ],
)
def test_numbers_in_sentences_are_guarded(sentence, wrong):
    said = list(report.wrong_numbers(f"A\n{sentence}\n", {"a.gain": "20.0× (18.6 to 22.4×)", "a.missed": "0 of 2"}))
    assert len(said) == bool(wrong) and all(wrong in one and one.startswith("line 2") for one in said)


def test_check_reads_every_page_and_facts_lists_the_keys(root, capsys):
    check(root, ["--facts"])
    assert re.search(r"^targets.all +35$", capsys.readouterr().out, re.MULTILINE)
    (root / "docs" / "pages").mkdir(parents=True)
    (root / "docs" / "pages" / "faq.md").write_text("A\n34<!-- targets.all -->\n")
    assert "faq.md, line 2: targets.all is 35" in check(root)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "odd.json: no record: "),
        ('{"rows": []}', "odd.json: no record: .*machine"),
        (None, "no record under benchmarks/results has rows of section 'solves'"),
    ],
)
def test_a_file_that_is_no_record_and_a_record_that_is_missing_are_named(root, content, said):
    (root / "benchmarks" / "results" / "suite.json").unlink()
    if content:
        (root / "benchmarks" / "results" / "odd.json").write_text(content)
    assert re.search(said, check(root))


@pytest.mark.parametrize("text", ["<!-- numbers: solves -->\n", "<!-- numbers: no such -->\n<!-- end of numbers -->\n"])
def test_a_block_without_an_end_or_of_an_unknown_name_is_named(root, text):
    (root / "README.md").write_text(text + README)
    assert re.search("README.md: <!-- numbers: .*needs an .* and one of the names targets, solves, ", check(root))


def test_the_committed_page_is_what_the_committed_records_give():
    assert check(ROOT) == ""
