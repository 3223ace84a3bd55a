"""benchmarks/gpu.sh without a GPU: calls that are stopped and go on, phases that fail, the archive, the arguments."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import phases, record
from harness.plans import PLANS
from harness.session import ARCHIVE, SAME, Phase, Session, earlier_rows

import deqfast

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
        lines = [f"def {name}(place):\n" + re.sub("^", "    ", body, flags=re.M) for name, body in bodies.items()]
        (tmp_path / "made_up.py").write_text("import os, time\n" + "\n".join(lines))
        plan = [Phase(name, seconds, f"what {name} decides", f"made_up:{name}") for name in bodies]
        return Session(plan, tmp_path / "run", small=True)

    return make


def rows_of(folder, name):
    return [int(row["case"]) for row in json.loads((folder / name).read_text())["rows"]]


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
    first = session(
        15,
        done=COUNTS.format(to=2, then=""),
        slow=COUNTS.format(to=4, then=hangs),
        bad="raise OSError('made up')\nyield",
    )
    assert first.call(100) == 1
    assert [first.state[name]["outcome"] for name in ("done", "slow", "bad")] == ["ok", "stopped", "failed"]
    assert rows_of(first.out, "done.json") == [0, 1] and rows_of(first.out, "slow.json.part") == [0, 1, 2]
    files = archived(first)
    assert "slow -> FAULT a 0 cpp: made up" in files["table.txt"]  # the conclusions of its rows
    assert {"done.json", "slow.json.part", "bad.log", "state.json", "table.txt"} <= set(files)
    assert "made up" in files["bad.log"] and "left: slow, bad: call it again" in files["table.txt"]
    again = session(done="raise OSError\nyield", slow=COUNTS.format(to=4, then=""), bad=COUNTS.format(to=1, then=""))
    assert again.call(100) == 0 and again.state["done"]["tries"] == 1
    assert rows_of(again.out, "slow.json") == [0, 1, 2, 3] and not list(again.out.glob("*.part"))
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


@pytest.mark.tier("full")
def test_a_call_that_is_killed_leaves_a_whole_archive_and_no_process(session, tmp_path):
    made = session(
        one=COUNTS.format(to=1, then=""),
        two=COUNTS.format(
            to=9, then="print(os.getpid(), file=open(os.environ['PID'], 'w'), flush=True); time.sleep(99)"
        ),
    )
    code = f"""
import signal, sys
from pathlib import Path
from harness.session import Phase, Session
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
plan = [Phase(name, 60, "", f"made_up:{{name}}") for name in ("one", "two")]
Session(plan, Path({str(made.out)!r}), True).call(100)
"""
    call = subprocess.Popen([sys.executable, "-c", code])
    part = made.out / "two.json.part"
    deadline = time.monotonic() + 60
    while not (part.is_file() and rows_of(made.out, part.name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    call.send_signal(signal.SIGTERM)
    assert call.wait(30) == 1
    files = archived(made)
    assert json.loads(files["one.json"])["rows"] and json.loads(files["two.json.part"])["rows"]
    assert json.loads(files["state.json"])["two"]["outcome"] == "stopped"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_call_begins_nothing_that_it_has_no_time_for(session):
    """And what was never begun comes before what has failed."""
    made = session(failed="yield", fresh="yield")
    made.state["failed"] = {"outcome": "failed", "seconds": 1.0, "tries": 1}
    ran = []
    made.run = lambda phase, seconds: (
        ran.append((phase.name, seconds))
        or made.state.update({phase.name: {"outcome": "ok", "seconds": 0, "tries": 2}})
    )
    assert made.call(12) == 0 and not ran and "left: failed, fresh" in made.table()
    assert made.call(50) == 0 and [name for name, _ in ran] == ["fresh", "failed"] and max(s for _, s in ran) <= 44


def test_conclusions_name_faults_predictions_targets_and_go_or_no_go():
    row = phases.row_of
    bits = [
        row("bits", "picard", "cuda-graph", evaluations=20),
        row("bits", "anderson", "cuda-graph", fault="other bits of value"),
    ]
    assert "the loop on the device: go, bits of the eager loop" in phases.conclusions(bits[:1])
    told = list(phases.conclusions([*bits, row("solves", "picard-128x8192", "cuda-graph", ms=0.45, ms_min=0.4)]))
    assert "FAULT bits anderson cuda-graph: other bits of value" in told
    assert "the loop on the device: NO-GO, anderson cuda-graph" in told
    assert "solves picard-128x8192 cuda-graph: 0.45 ms, predicted 0.4 to 0.5" in told
    assert any(line.startswith("met picard-128x8192") and line.endswith(": 0.45") for line in told)
    slow = list(phases.conclusions([row("probe", "pass of a loop with 2 kernels", "device", ms=0.05)]))
    assert slow[-1].startswith("a body holds four iterations")


def test_a_captured_solve_may_round_only_where_a_graph_has_other_kernels():
    f = phases.make_map("elementwise", (2, 8), "cpu", "torch")
    anderson, broyden = deqfast.Anderson(1e-30, 20), deqfast.Broyden(1e-2, 19)
    for solver, kernel, rounds in [
        *((anderson, "triton", True), (anderson, "cuda", False), (replace(anderson, rtol=1e-2), "triton", False)),
        *((broyden, "cuda", True), (broyden, "triton", True), (deqfast.Picard(1e-30, 20), "triton", False)),
    ]:
        eager = deqfast.solve(f, torch.zeros_like(f.c), solver)
        assert not phases.differences(f, solver, kernel, eager, eager)
        off = eager.changed(value=eager.value * (1 + 1e-6))
        assert phases.differences(f, solver, kernel, eager, off) == ["value"] * (not rounds)
        wrong = eager.changed(value=eager.value + 1)
        assert phases.differences(f, solver, kernel, eager, wrong) == ["value"]


@pytest.mark.parametrize(
    ("statuses", "how", "content"),
    [([0], "found", "old"), ([1, 0], "brought along", "new"), ([1, 1, 0, 0], "built here", "new")],
)
def test_objects_of_other_sources_are_replaced_by_those_brought_along_or_built(
    statuses, how, content, tmp_path, monkeypatch
):
    """statuses: of the processes that compare the sources, and of a build."""
    for path, text in (("deqfast/_C_cuda.so", "old"), ("gpu/lib/deqfast/_C_cuda.so", "new")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(phases, "ROOT", tmp_path)
    monkeypatch.setattr(phases, "BROUGHT", tmp_path / "gpu")
    monkeypatch.setattr(phases.torch.cuda, "get_device_capability", lambda: (9, 0))
    ran, left = [], iter(statuses)

    def run(command, **given):
        ran.append(command)
        return SimpleNamespace(returncode=next(left))

    monkeypatch.setattr(phases.subprocess, "run", run)
    ((row,),) = phases.extension(phases.Place("cuda", False, []))
    assert row["provider"] == how and (tmp_path / "deqfast/_C_cuda.so").read_text() == content
    assert len(ran) == len(statuses) and any("build_ext" in words for words in ran) == (how == "built here")


def test_every_phase_exists_and_the_first_ones_fit_a_call():
    for plan in PLANS.values():
        for phase in plan(False):
            assert isinstance(phase.work, tuple) or callable(getattr(phases, phase.work.split(":")[1]))
    assert sum(phase.seconds for phase in PLANS["short"](False)[1:7]) < 560


@pytest.mark.tier("full")
@pytest.mark.parametrize("plan, only", [("short", ["bits", "probe", "whole"]), ("checks", ["memcheck"])])
def test_a_dry_run(plan, only, tmp_path):
    result = run(plan, *only, "--dry-run", "--out", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    state = json.loads((tmp_path / "state.json").read_text())
    assert {name: entry["outcome"] for name, entry in state.items()} == dict.fromkeys(["extension", *only], "ok")
    if plan == "checks":
        assert " right, " in (tmp_path / "memcheck.log").read_text()
    else:
        assert json.loads((tmp_path / "probe.json").read_text())["machine"]["torch"]


def run(*arguments):
    command = ["bash", "benchmarks/gpu.sh", *map(str, arguments)]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "OUT": ""}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a plan: short, checks or bring"),
        (["lunch"], "invalid choice: 'lunch'"),
        (["short", "lunch"], "lunch: not a phase of short"),
        (["short", "--seconds", "600"], "--seconds must be from 16 to 560, got 600"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2 and message in result.stderr


@pytest.mark.tier("full")
def test_the_first_look_finds_every_emulated_kernel_right():
    look = [sys.executable, "benchmarks/first_look.py", "--kernel", "emulated", "--few"]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(look, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    verdict = re.search(r"emulated: (\d+) of (\d+) right", found.stdout)
    assert found.returncode == 0 and verdict and verdict[1] == verdict[2] and int(verdict[1]) > 50, found.stdout


def test_the_first_look_names_what_is_wrong(monkeypatch, capsys):
    import first_look

    def looks(kernel):
        def fail(op_of):
            raise AssertionError("error 1, allowed 0")

        return [("right 1x1", lambda op_of: None), ("off 1x1", fail)]

    monkeypatch.setattr(first_look, "FAMILIES", (looks,))
    assert first_look.look("torch", "", False) == ["torch off 1x1"]
    out = capsys.readouterr().out
    assert "ok    torch right" in out and "WRONG torch off" in out and "allowed 0" in out and "1 of 2 right" in out
