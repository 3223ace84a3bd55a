"""benchmarks/gpu.sh without a GPU: calls that are stopped and go on, phases that fail, the archive, the arguments."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from textwrap import indent

import pytest
from harness import phases, record
from harness.plans import PLANS
from harness.session import ARCHIVE, SAME, Phase, Session, earlier_rows
from harness.targets import ITERATED

ROOT = Path(__file__).resolve().parent.parent
COUNTS = """
from pathlib import Path
for n in range(len(place.rows), {to}):
    yield [{{"section": "a", "case": str(n), "provider": "cpp"}}]
    {then}
"""


@pytest.fixture
def session(tmp_path, monkeypatch):
    """(phase name -> what a function of rows does, seconds) -> a session of these phases."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks", tmp_path))))
    monkeypatch.setenv("OUT", str(tmp_path / "back"))
    monkeypatch.setenv("PID", str(tmp_path / "pid"))
    (tmp_path / "back").mkdir()

    def make(seconds=60, **bodies):
        functions = [f"def {name}(place):\n{indent(body, '    ')}\n" for name, body in bodies.items()]
        (tmp_path / "made_up.py").write_text("import os, time\n" + "".join(functions))
        plan = [Phase(name, seconds, f"what {name} decides", f"made_up:{name}") for name in bodies]
        return Session(plan, tmp_path / "run", small=True)

    return make


def numbers(session, name):
    return [int(row["case"]) for row in json.loads((session.out / name).read_text())["rows"]]


def archived(session):
    """Files of the archive, which is whole: name -> content. Its copy is the same."""
    path = session.out / ARCHIVE
    assert (session.out.parent / "back" / ARCHIVE).read_bytes() == path.read_bytes()
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


@pytest.mark.tier("full")
def test_a_stopped_phase_goes_on_after_its_rows_and_the_others_do_not_wait(session):
    """One fails, one spends its budget; another call finishes both, and does not repeat the one that is done."""
    hangs = "if n == 2: place.rows[0]['fault'] = 'made up'; time.sleep(99)"
    counts = {"done": COUNTS.format(to=2, then=""), "slow": COUNTS.format(to=4, then=hangs)}
    first = session(15, **counts, bad="raise OSError('made up')\nyield")
    assert first.call(100) == 1
    assert [first.state[name]["outcome"] for name in ("done", "slow", "bad")] == ["ok", "stopped", "failed"]
    assert numbers(first, "done.json") == [0, 1] and numbers(first, "slow.json.part") == [0, 1, 2]
    files = archived(first)
    assert "slow -> FAULT a 0 cpp: made up" in files["table.txt"]  # the conclusions of its rows
    assert {"done.json", "slow.json.part", "bad.log", "state.json", "table.txt"} <= set(files)
    assert "made up" in files["bad.log"] and "left: slow, bad: call it again" in files["table.txt"]
    again = session(done="raise OSError\nyield", slow=COUNTS.format(to=4, then=""), bad=COUNTS.format(to=1, then=""))
    assert again.call(100) == 0 and again.state["done"]["tries"] == 1
    assert numbers(again, "slow.json") == [0, 1, 2, 3] and not list(again.out.glob("*.part"))
    assert "all phases are finished" in archived(again)["table.txt"]


def test_rows_of_another_gpu_or_other_code_get_a_record_of_their_own(tmp_path, monkeypatch):
    part, here = tmp_path / "loops.json.part", dict.fromkeys(SAME, "this")
    monkeypatch.setattr(record, "machine", lambda device="cpu": here)
    assert not earlier_rows(part, "cpu")
    for number, (name, value) in enumerate(((None, None), ("gpu", "other"), ("commit", "later"))):
        record.write_record(part, [{"case": str(number)}])
        assert earlier_rows(part, "cpu") == [{"case": str(number)}]
        here |= {name: value} if name else {"threads": 2}
        assert bool(earlier_rows(part, "cpu")) == part.is_file() == (name is None)
    assert [record.read_record(tmp_path / f"loops-{n}.json")["rows"][0]["case"] for n in (1, 2)] == ["1", "2"]


def test_a_call_begins_nothing_that_it_has_no_time_for(session):
    """And what was never begun comes before what has failed."""
    made, ran = session(failed="yield", fresh="yield"), []
    made.state["failed"] = {"outcome": "failed", "seconds": 1.0, "tries": 1}

    def run(phase, seconds):
        ran.append((phase.name, seconds))
        made.state[phase.name] = {"outcome": "ok", "seconds": 0, "tries": 2}

    made.run = run
    assert made.call(12) == 0 and not ran and "left: failed, fresh" in made.table()
    assert made.call(50) == 0 and [name for name, _ in ran] == ["fresh", "failed"] and max(s for _, s in ran) <= 44


def test_every_phase_exists_and_the_first_ones_fit_a_call():
    for plan in PLANS.values():
        for phase in (*plan(False), *plan(True)):
            assert isinstance(phase.work, tuple) or callable(getattr(phases, phase.work.split(":")[1]))
    assert sum(phase.seconds for phase in PLANS["short"](False)[1:6]) < 560
    for name in ("short", "kernels", "layers"):  # of a machine for 15 minutes, with one of them for its start
        assert sum(phase.seconds for phase in PLANS[name](False)) <= 14 * 60


def test_a_phase_of_solves_measures_the_cases_of_the_targets_without_peers(monkeypatch):
    monkeypatch.setattr(phases, "Copy", lambda *given: None)
    answer = phases.row_of
    monkeypatch.setattr(
        phases,
        "measure",
        lambda case, names, *given, **turns: ({name: answer(case.section, case.name, name) for name in names}, {}),
    )
    rows = [row for rows in phases.loops(phases.Place("cuda", False, [])) for row in rows]
    assert {row["case"] for row in rows} == {*ITERATED, "picard-fc-128x256", "anderson-m6-fc-128x256"}
    assert {row["provider"] for row in rows} == {"triton", "cuda", "triton-graph", "cuda-graph"}


def run(*arguments):
    command = ["bash", "benchmarks/gpu.sh", *map(str, arguments)]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "OUT": ""}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.tier("full")
def test_a_dry_run(tmp_path):
    """Of phases that are commands, tests with options of their own, and of those that are functions."""
    only = ["bits", "probe", "whole"]
    result = run("short", *only, "--dry-run", "--out", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    state = json.loads((tmp_path / "state.json").read_text())
    assert {name: entry["outcome"] for name, entry in state.items()} == dict.fromkeys(["extension", *only], "ok")
    assert " passed" in (tmp_path / "bits.log").read_text()
    assert json.loads((tmp_path / "probe.json").read_text())["machine"]["torch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a plan: short, kernels, layers, checks or bring"),
        (["lunch"], "invalid choice: 'lunch'"),
        (["short", "lunch"], "lunch: not a phase of short"),
        (["short", "--seconds", "600"], "--seconds must be from 16 to 560, got 600"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2 and message in result.stderr
