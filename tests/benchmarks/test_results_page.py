"""benchmarks/report.py: tables from rows, targets judged by the data alone, numbers in sentences that are checked."""

import json
import re
from pathlib import Path

import pytest
import report
from harness import record
from harness.targets import GPU_TARGETS, STUDY_TARGETS, TARGETS

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"gpu": None, "processor": "Made Up", "cores": 2, "threads": 2, "torch": "9.9", "commit": "a" * 40}
COMMITTED = ROOT / "benchmarks" / "results"
MARKERS = f"# A\n\n{report.BEGIN}\n{report.END}\n\nafter\n"


def solve_rows(gain=20.0, floor_x=1.2):
    """Rows of the four solvers by deqfast, torchdeq and eager; deqfast `gain` times as fast as torchdeq."""
    return [
        {
            "section": "solves",
            "case": case,
            "provider": provider,
            "batch": 128,
            "dim": 8192,
            "ms_min": 20 * ms + 4,
            "solver_ms": ms,
            "floor_x": floor_x,
            "residual": 1e-3,
            "peak_bytes": 1e7 if provider == "cpp" else 2e7,
            **({"gains": {"torchdeq": gain, "eager": 2.0}} if provider == "cpp" else {}),
        }
        for case in report.SOLVERS
        for provider, ms in (("cpp", 2.0), ("torchdeq", 2.0 * gain), ("eager", 4.0))
    ]


def residual_rows():
    """Two problems of the suite, one of which torchdeq misses, and a trained cell."""
    rows = []
    for case in ("even 0.9, b 1", "even 0.9, b 0.01", "digits cell"):
        for provider in ("deqfast picard", "torchdeq fixed_point_iter"):
            own = provider == "deqfast picard"
            row = {
                "section": "residual",
                "case": case,
                "provider": provider,
                "tol": 1e-5,
                "evaluations": 12,
                "most_evaluations": 60,
                "reached": own or case == "even 0.9, b 1",
                "batch": 32,
            }
            times = {"ms": 2.0, "ms_min": 2.0} | ({"gain": 3.0} if own else {})
            rows.append(row | (times if row["reached"] else {"skipped": "residual 1e-2"}))
    course = {"section": "residual course", "case": report.SHOWN[0], "batch": 2, "dim": 3}
    return [*rows, course | {"provider": "deqfast picard", "course": {"ms": [1.0, 2.0], "residual": [0.1, None]}}]


def other_rows():
    """At least a row of every other section."""
    nc = {"section": "nc", "case": "nc1-2000x8192-K100-fp64", "provider": "cpp", "ms_min": 10.0, "error": 0.0}
    step = {
        "section": "training step",
        "case": "width 16, batch 32, jfb",
        "device": "cpu",
        "ms": 2.0,
        "paper_hours": 3.0,
    }
    deq = {"evaluations": 9.0, "times_explicit": 1.5, "flop_ratio": 1.6, "over_flop": 0.94}
    point = {"section": "scaling", "solver": "picard", "series": "batch", "axis": "batch", "provider": "cpp"}
    model = {
        "section": "internet scale (model)",
        "size": "MDEQ",
        "adjoint": "jfb",
        "solver": "broyden",
        "gpus": 1,
        "case": "MDEQ",
        "images_per_second": 1000.0,
        "internet_s": 1e6,
    }
    return [
        nc | {"gains": {"pinv": 600.0}},
        *({"section": name, "case": name, "provider": "cpp", "ms_min": 1.0} for name in ("ops", "training", "fc")),
        {"section": "ops", "case": "ops", "provider": "triton", "skipped": "no CUDA device"},
        step | {"provider": "explicit", "nc_share": 0.001},
        step | {"provider": "deq"} | deq,
        *(point | {"case": f"{x}", "batch": x, "solver_ms": 2.0 * x, "peak_bytes": x**2} for x in (1, 2, 4, 8)),
        model | {"provider": "torchdeq"},
        model | {"provider": "deqfast", "gain": 1.5},
    ]


def write(root, name, rows, **machine):
    data = {
        "machine": MACHINE | machine,
        "command": f"measure {name}",
        "date": "2026-01-02T03:04+00:00",
        "remark": "made up for a test",
        "rows": rows,
    }
    (root / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps(data))


@pytest.fixture
def root(tmp_path):
    """A checkout with made-up records of every section but the solves."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text(MARKERS)
    write(tmp_path, "others", [*residual_rows(), *other_rows()])
    return tmp_path


def results_of(root):
    return report.Results.read(root / "benchmarks" / "results")


def check(root, capsys):
    """What `--check` says; "" where all is as it should be."""
    try:
        report.main(["--check", "--root", str(root)])
    except SystemExit as stop:
        return str(stop.code)
    return ""


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (report.digits, 0.0, "0"),
        (report.digits, 9.996, "10.0"),
        (report.digits, 1234.5, "1230"),
        (report.digits, 5e-5, "5.0e-5"),
        (report.duration, 0.0123, "12.3 µs"),
        (report.duration, 0.9996, "1.00 ms"),
        (report.duration, 118_500, "118 s"),
        (report.scientific, 0.0, "below 2.2e-16"),
        (report.percent, 0.0348, "3.48 %"),
        (report.span, [], ""),
        (report.span, [3.9, 5.1, 4.0], "3.90 to 5.10×"),
        (report.span, [4.001, 4.002], "4.00×"),
    ],
)
def test_numbers_have_three_digits_and_a_unit_and_ranges_ends_that_differ(form, value, text):
    assert form(value) == text


def test_tables_leave_out_empty_columns_and_escape_bars():
    table = report.Table("T", "", [{"case": "a|b", "empty": "", "ms": "1"}, {"case": "c", "empty": "", "ms": "2"}])
    assert table.lines() == ["| case | ms |", "| --- | ---: |", "| a\\|b | 1 |", "| c | 2 |"]
    assert table.lines(names={"c": "C"})[2:] == ["| C | 2 |"]
    assert table.facts() == {"t.a-b.ms": "1", "t.c.ms": "2"}
    assert report.Table("T", "", []).lines() == []


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["/a/bin/python", "/a/bin/pytest", "benchmarks"], "pytest benchmarks"),
        (["/a/bin/python", "-m", "pytest", "-k", "a b"], "python -m pytest -k 'a b'"),
        (["python", "benchmarks/report.py", "--check"], "python benchmarks/report.py --check"),
    ],
)
def test_the_command_recorded_is_one_to_type_again(words, typed):
    assert record.command(words) == typed


def states(root):
    """State of each target by what it says."""
    return {row["target"]: row["state"] for row in report.targets(results_of(root)).rows}


def test_a_target_is_met_or_missed_by_the_data_alone(root):
    write(root, "suite", solve_rows(gain=20.0))
    found = list(states(root).values())
    assert len(found) == len(TARGETS) + len(STUDY_TARGETS) + len(GPU_TARGETS) == 35
    assert (found.count("met"), found.count("not measured: no GPU")) == (4 + 4 + 2 + 2 + 2, 18)
    write(root, "suite", solve_rows(gain=5.0, floor_x=1.7))
    missed = [what for what, state in states(root).items() if state == "missed in 1 of 1 runs"]
    assert len(missed) == 2 + 4  # gains of Anderson bf16 and Broyden, all four floors


def test_of_several_runs_all_with_the_most_threads_must_meet_a_target(root):
    write(root, "suite_one", solve_rows(gain=2.0), threads=1)
    for name, gain in (("suite", 10.0), ("suite_second", 24.0), ("suite_third", 20.0)):
        write(root, name, solve_rows(gain=gain))
    broyden = next(row for row in report.targets(results_of(root)).rows if row["target"].startswith("broyden"))
    assert [*broyden.values()][1:] == ["10.0 to 24.0×", "missed in 1 of 3 runs"]
    assert "| 20.0× (10.0 to 24.0×) |" in report.page(results_of(root))
    write(root, "suite", solve_rows(floor_x=1.5004))  # what just misses a bound is told from it
    floor = next(row for row in report.targets(results_of(root)).rows if "of its bytes" in row["target"])
    assert [*floor.values()][1:] == ["1.2 to 1.5004", "missed in 1 of 3 runs"]


def test_targets_of_a_gpu_are_judged_by_the_better_kernel(root):
    write(root, "suite", solve_rows())
    row = {"section": "ops", "case": "anderson-m6-bf16-step-128x8192"}
    rows = [row | {"provider": name, "ms": ms, "ms_min": ms} for name, ms in (("cuda", 0.019), ("triton", 0.03))]
    write(root, "h200", rows, gpu="NVIDIA H200")
    found = states(root)
    assert [state for what, state in found.items() if what.startswith(row["case"])] == ["met"]
    assert "not measured: no GPU" not in found.values() and "NVIDIA H200" in report.page(results_of(root))


def test_everything_measured_is_on_the_page_and_nothing_of_python(root):
    write(root, "suite", solve_rows())
    text = report.page(results_of(root))
    for found in (
        "| broyden-n20-128x8192 | 2.00 ms | 40.0 ms |",
        "| deqfast picard | 0 of 2 | 12 | 3.00× (2) | 2.00 ms |",
        "| torchdeq fixed_point_iter | 1 of 2 | 36 |  | missed |",
        "| picard, batch 1 to 8 | 2.00 ms to 16.0 ms | 1.00 | 2.00 |",
        "| MDEQ, jfb, broyden | 1,000 / 1,000 | 1.50× |",
        "`measure suite`; made up",
        "aaaaaaa",
        "no GPU time is reported",
    ):
        assert found in text, found
    assert not re.search(r"\bNone\b|\bnan\b|\{|\}|\[\]", text)


def test_check_fails_until_all_is_written_and_once_the_data_change(root, capsys):
    write(root, "suite", solve_rows())
    assert "README.md is not what the records give" in check(root, capsys)
    report.main(["--root", str(root)])
    assert check(root, capsys) == ""
    assert "| Picard | 2.00 ms | 40.0 ms | 20.0× |" in (root / "README.md").read_text()
    assert (root / "README.md").read_text().endswith(f"{report.END}\n\nafter\n")
    write(root, "suite", solve_rows(gain=3.0))
    assert "RESULTS.md is not what the records give" in check(root, capsys)
    report.main(["--root", str(root)])
    write(root, "others", [row for row in residual_rows() if row["section"] == "residual"] + other_rows())
    assert "no record under benchmarks/results has rows of section 'residual course'" in check(root, capsys)
    write(root, "others", [*residual_rows(), *other_rows(), residual_rows()[-1]])
    assert "time_to_residual.png is not what the records give" in check(root, capsys)


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("It is 20.0×<!-- solves.broyden-n20-128x8192.gain-over-torchdeq --> as fast.", ""),
        ("It is 120.0×<!-- solves.broyden-n20-128x8192.gain-over-torchdeq --> as fast.", "is 20.0×, the text says"),
        ("It is 21.0×<!-- solves.broyden-n20-128x8192.gain-over-torchdeq --> as fast.", "is 20.0×, the text says"),
        ("It misses 0<!-- residual.deqfast-picard.missed-1e-05 -->.", ""),
        ("It misses 1<!-- residual.deqfast-picard.missed-1e-05 -->.", "is 0 of 2, the text says"),
        ("It misses 2<!-- residual.deqfast-picard.missed-1e-05 -->.", "is 0 of 2, the text says"),
        ("It misses 0 of\n2<!-- residual.deqfast-picard.missed-1e-05 -->.", ""),
        ("It misses -0<!-- residual.deqfast-picard.missed-1e-05 -->.", "is 0 of 2, the text says"),
        ("Of 5<!-- no.such.number -->.", "no number is called no.such.number"),
    ],
)
def test_check_guards_the_numbers_in_sentences(root, capsys, sentence, wrong):
    write(root, "suite", solve_rows())
    (root / "docs" / "pages").mkdir(parents=True)
    (root / "docs" / "pages" / "performance.md").write_text(MARKERS)
    report.main(["--root", str(root)])
    report.main(["--facts", "--root", str(root)])
    assert re.search(r"^targets.all +35$", capsys.readouterr().out, re.MULTILINE)
    with (root / "docs" / "pages" / "choosing.md").open("w") as page:
        page.write(f"A\n{sentence}\n")
    said = check(root, capsys)
    assert wrong in said and bool(said) == bool(wrong) and ("choosing.md, line 2" in said) == bool(wrong)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no JSON"),
        ("[]", "an object with the keys"),
        ('{"rows": []}', "an object with the keys"),
        ('{"machine": {}, "rows": [{"case": "a"}]}', "row 0 has no provider, section"),
        ('{"machine": {}, "rows": [], "dry_run": true}', "a dry run is no result"),
    ],
)
def test_a_file_that_is_no_record_is_named(root, capsys, content, said):
    (root / "benchmarks" / "results" / "odd.json").write_text(content)
    found = check(root, capsys)
    assert "odd.json" in found and said in found


def test_a_record_that_is_missing_and_markers_that_are_missing_are_named(root, capsys):
    assert "no record under benchmarks/results has rows of section 'solves'" in check(root, capsys)
    with pytest.raises(report.ReportError, match="needs once, in this order"):
        report.with_block(f"{report.END}{report.BEGIN}", [], Path("README.md"))


def test_the_committed_page_is_what_the_committed_records_give(capsys):
    assert check(ROOT, capsys) == ""
    assert all(
        "rounds" not in row or isinstance(row["rounds"], int)
        for path in COMMITTED.glob("*.json")
        for row in json.loads(path.read_text())["rows"]
    )
