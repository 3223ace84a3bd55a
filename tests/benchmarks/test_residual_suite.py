"""The suite of fixed-point problems, trained cells, and what time_to_residual.py counts and judges."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import deqfast
import deqfast.testing

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "experiments")]

import time_to_residual as benchmark  # noqa: E402  (found through the path above)
from harness import drawn, problems, residual_report, trained  # noqa: E402  (found through the path above)
from harness.problems import Problem  # noqa: E402  (found through the path above)

pytest.importorskip("torchdeq")
GENERATOR_SEED = 5


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """What --threads sets for the whole process is put back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(GENERATOR_SEED)


def eigenvalues(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvals(matrix)


@pytest.fixture(scope="module")
def small() -> list[Problem]:
    """The problems of the suite that are cheap to make."""
    names = [name for name, (dim, *_) in problems.MAPS.items() if dim <= 256]
    return problems.suite(names, batch=2)


def test_suite_has_24_problems_of_the_stated_sizes():
    assert len(problems.MAPS) * len(problems.SCALES) == 24
    assert {dim for dim, *_ in problems.MAPS.values()} >= {200, 1024}
    assert all(200 <= dim <= 1024 for dim, *_ in problems.MAPS.values())


def test_suite_is_the_same_every_time_whatever_is_chosen(small):
    (again, scaled) = problems.suite(["triangular"], batch=2)
    before = {problem.name: problem for problem in small}
    z = torch.randn(2, again.dim)
    assert torch.equal(again.f(z), before[again.name].f(z))
    assert again.name != scaled.name and not torch.equal(scaled.f(z), again.f(z))


@pytest.mark.parametrize("radius", [0.5, 0.99])
def test_gaussian_fills_the_disc(radius):
    sizes = eigenvalues(problems.gaussian(60, generator(), radius)).abs()
    assert float(sizes.max()) == pytest.approx(radius, rel=1e-9)
    assert float(sizes.min()) < 0.3 * radius


@pytest.mark.parametrize(
    ("build", "low", "high"),
    [(problems.even, -0.9, 0.9), (problems.clustered_at_one, -0.9, 0.9), (problems.decaying, -0.72, 0.9)],
)
def test_symmetric_maps_have_their_radius(build, low, high):
    values = torch.linalg.eigvalsh(build(40, generator(), 0.9))
    assert float(values.max()) == pytest.approx(high, rel=1e-9)
    assert float(values.min()) == pytest.approx(low, rel=0.02)


def test_spectra_are_spread_as_named():
    of = {name: torch.linalg.eigvalsh(getattr(problems, name)(40, generator(), 0.9))
          for name in ("even", "clustered_at_one", "decaying")}  # fmt: skip
    share_near_one = {name: float((values > 0.6).double().mean()) for name, values in of.items()}
    assert share_near_one["clustered_at_one"] > 2 * share_near_one["even"] > 2 * share_near_one["decaying"]
    assert float(of["decaying"].abs().median()) < 0.05 and float(of["decaying"].min()) < 0 < float(of["decaying"].max())


@pytest.mark.parametrize("build", [problems.triangular, problems.chains])
def test_non_normal_maps_are_contractive_in_the_end_only(build):
    matrix = build(32, generator(), 1.0)
    nilpotent = matrix - problems.WELL_INSIDE * torch.eye(32, dtype=torch.float64)
    # All eigenvalues are the same: they are not computed, being ill-conditioned.
    assert float(torch.linalg.matrix_power(nilpotent, 32).abs().max()) < 1e-9
    assert float(torch.linalg.matrix_norm(matrix, 2)) > 1


def test_outliers_lie_where_they_are_put():
    values = (-2.5, -1.5, 0.95)
    found = eigenvalues(problems.outliers(200, generator(), 0.5, values))
    far = found[found.abs() > 0.7]
    assert sorted(far.real.tolist()) == pytest.approx(sorted(values), abs=0.1)
    assert len(far) == len(values)


def test_fixed_points_exist_and_residuals_are_of_float64(small):
    for problem in small:
        exact = deqfast.solve(problem.exact, problem.z0.double(), deqfast.Broyden(1e-11, 300, history=300), "torch")
        # In float32 no residual could be told from zero below some 1e-8.
        assert float(problem.residuals(exact.value).max()) < 1e-10, problem.name
        rounded = float(problem.residuals(exact.value.float()).max())
        assert 1e-10 < rounded < 1e-5, problem.name


def test_residuals_are_of_every_sample():
    problem = problems.fully_connected("half", 0.5 * torch.eye(2), torch.ones(2, 2))
    z = torch.tensor([[2.0, 2.0], [0.0, 0.0]])
    assert problem.residuals(z).tolist() == [0.0, 1.0]
    assert problem.dim == 2


HALF = problems.fully_connected("half", 0.5 * torch.eye(2), torch.ones(2, 2))


def stub(values: Callable[[Tensor], Tensor], calls: int) -> benchmark.Provider:
    """A solver that calls f so often, and returns what it likes."""

    def solve(f: Callable[[Tensor], Tensor], z0: Tensor, tol: float) -> tuple[Tensor, Tensor | None]:
        for _ in range(calls):
            f(z0)
        return values(z0), None

    return benchmark.Provider("stub", "stub", solve)


def test_evaluations_are_counted_and_the_value_is_judged():
    (right,) = benchmark.measure(HALF, [stub(lambda z: torch.full_like(z, 2), 7)], 1e-3, rounds=2)
    assert (right["evaluations"], right["reached"], right["residual"]) == (7, True, 0.0)
    assert 0 < right["f_ms"] < right["ms_min"] <= right["ms"]
    (wrong,) = benchmark.measure(HALF, [stub(lambda z: z + torch.tensor([[2.0], [1.99]]), 7)], 1e-3, rounds=2)
    assert not wrong["reached"] and "ms" not in wrong and "2.5e-03 after 7" in wrong["skipped"]
    assert wrong["samples_missed"] == 1 and wrong["residual_median"] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_reaches_nothing(bad):
    (row,) = benchmark.measure(HALF, [stub(lambda z: torch.full_like(z, bad), 1)], 1e-3, rounds=1)
    assert not row["reached"] and row["residual"] is None and row["samples_missed"] == 2
    json.dumps(row, allow_nan=False)


def test_the_solvers_quoted_by_default_are_those_without_settings():
    made = {provider.name: provider.solve.args[0] for provider in benchmark.providers()}
    quoted = [made[name] for name in residual_report.DEFAULTS]
    assert quoted == [deqfast.Picard, deqfast.Anderson, deqfast.Broyden]


def test_the_default_solvers_run_on_torch_too(monkeypatch):
    asked = []

    def solve(f, z0, solver, kernel):
        asked.append((type(solver), kernel))
        return types.SimpleNamespace(value=None, iterations=None)

    monkeypatch.setattr(deqfast, "solve", solve)
    extra = [provider for provider in benchmark.providers(on_torch=True) if provider.name.startswith("torch ")]
    for provider in extra:
        provider.solve(None, None, 1e-3)
    assert [provider.name for provider in extra] == list(residual_report.ON_TORCH.values())
    assert asked == [(solver, "torch") for solver in (deqfast.Picard, deqfast.Anderson, deqfast.Broyden)]


def test_torchdeq_with_a_small_ridge_is_another_solver():
    problem = problems.suite(["decaying 0.99"], batch=2)[1]
    made = {provider.name: provider for provider in benchmark.providers()}
    shipped, small = (
        benchmark.judged(problem, made[name], 1e-30)["residual"]
        for name in ("torchdeq anderson m=6", residual_report.SMALL_RIDGE)
    )
    assert small < 0.1 * shipped


@pytest.mark.parametrize("provider", benchmark.providers(), ids=lambda provider: provider.name)
def test_every_solver_may_evaluate_equally_often(provider):
    expanding = problems.fully_connected("expanding", torch.diag(torch.linspace(-1.3, 1.3, 80)), torch.ones(1, 80))
    row = benchmark.judged(expanding, provider, 1e-30)
    assert row["evaluations"] == benchmark.EVALUATIONS and not row["reached"]


@pytest.mark.parametrize("provider", benchmark.providers(), ids=lambda provider: provider.name)
def test_every_solver_reaches_the_tolerance(provider, small):
    problem = next(problem for problem in small if problem.name == "triangular, b 1")
    row = benchmark.judged(problem, provider, 1e-3)
    assert row["reached"] and row["evaluations"] < benchmark.EVALUATIONS
    assert ("mean_evaluations" in row) == provider.name.startswith("deqfast")


def test_gain_is_to_the_peer_of_the_same_run(small):
    problem = next(problem for problem in small if problem.name == "triangular, b 1")
    rows = benchmark.measure(problem, benchmark.providers(), 1e-3, rounds=1)
    times = {row["provider"]: row["ms"] for row in rows}
    for row in rows:
        if row["provider"].startswith("torchdeq"):
            assert row["peer"] == row["provider"] and "gain" not in row
        else:
            assert row["gain"] == times[row["peer"]] / row["ms"]


def test_courses_only_descend():
    rows = benchmark.courses(HALF, benchmark.providers()[:1], rounds=2)
    assert [row["section"] for row in rows] == ["residual course"]
    (row,) = rows
    assert row["evaluations"] == list(range(1, len(row["ms"]) + 1)) and len(row["residual"]) == len(row["ms"])
    assert sorted(row["residual"], reverse=True) == row["residual"] and sorted(row["ms"]) == row["ms"]
    assert row["residual"][1] == pytest.approx(1 / 3)  # from 0 to 1 to 1.5


def solve_row(case: str, provider: str, reached: bool, **more: object) -> dict:
    common = {"section": "residual", "tol": 1e-3, "most_evaluations": 60, "samples_missed": 0, "batch": 2, "dim": 3}
    return {**common, "case": case, "provider": provider, "reached": reached, **more}


def test_summary_compares_what_both_solved():
    times = {"ms_min": 1.0, "f_ms": 0.5}
    rows = [
        solve_row("p", "a", True, evaluations=10, ms=1.0, gain=2.0, **times),
        solve_row("q", "a", True, evaluations=20, ms=2.0, gain=8.0, **times),
        solve_row("r", "a", True, evaluations=30, ms=4.0, **times),
        solve_row("p", "b", True, evaluations=10, ms=2.0, **times),
        solve_row("q", "b", True, evaluations=20, ms=16.0, **times),
        solve_row("r", "b", False, evaluations=40, residual=0.1),
    ]
    a, b = residual_report.summary(rows, 1e-3)
    assert (a["failures"], a["evaluations"], a["ms"], a["shared"], a["gain"], a["gains"]) == (0, 20, 3.0, 2, 4.0, 2)
    assert (b["failures"], b["evaluations"], b["ms"], b["shared"], b["gain"], b["gains"]) == (1, 20, 18.0, 2, None, 0)
    assert a["f_share"] == 0.5
    assert residual_report.summary(rows[2:3] + rows[5:], 1e-3)[0]["ms"] is None
    assert "4.0" in residual_report.summary_table(rows)
    assert "-" in residual_report.case_table(rows, "r")


def test_command_writes_rows_and_figure(tmp_path, capsys):
    files = ["--json", str(tmp_path / "rows.json"), "--figure", str(tmp_path / "figure.png")]
    benchmark.main(["--quick", "--threads", "1", "--only", "triangular", "--cells", str(tmp_path), *files])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["case"] for row in rows} == {"triangular, b 1", "triangular, b 0.01"}
    assert {row["tol"] for row in rows if row["section"] == "residual"} == set(benchmark.TOLERANCES)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert drawn.drawn_from(tmp_path / "figure.png", rows) and not drawn.drawn_from(tmp_path / "figure.png", rows[1:])
    assert "median evals" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "nonsense"], "--only nonsense: in none of suite"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--json", "/nowhere/rows.json"], "--json: /nowhere is not a folder"),
        (["--figure", "/nowhere/figure.png"], "--figure: /nowhere is not a folder"),
    ],
)
def test_wrong_arguments_are_named(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(words)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_what_cannot_be_had_is_told(tmp_path):
    with pytest.raises(SystemExit, match="not the folder of a finished run"):
        benchmark.main(["--only", "study", "--cells", str(tmp_path), "--run", str(tmp_path)])
    with pytest.raises(SystemExit, match="--quick leaves out"):
        benchmark.main(["--quick", "--only", "gaussian 0.5", "--cells", str(tmp_path)])


def test_digits_are_trained_once(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(trained, "DIGITS_STEPS", {"relu": 2})
    first = trained.digits_cell(tmp_path, "relu", dim=16, batch=3)
    monkeypatch.setattr(trained, "_trained", None)
    second = trained.digits_cell(tmp_path, "relu", dim=16, batch=3)
    z = torch.randn(3, 16)
    assert torch.equal(first.f(z), second.f(z)) and not first.f(z).requires_grad


@pytest.mark.parametrize("data_root", [None, Path("/images")])
def test_study_is_trained_where_its_run_is_looked_for(tmp_path, monkeypatch, data_root):
    from nc_study.config import parse

    asked = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess:
        asked.append(parse("cifar_lt", None, command[2:]))
        (tmp_path / asked[-1].run_name).mkdir()
        (tmp_path / asked[-1].run_name / "result.json").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(trained.subprocess, "run", run)
    folders = [trained.study_run(tmp_path, data_root) for _ in range(2)]
    (settings,) = asked
    assert folders == [tmp_path / settings.run_name] * 2
    assert (settings.models, settings.preset, settings.resume) == (("deq",), "quick", True)
    assert settings.dataset == ("shapes" if data_root is None else "cifar10")


def test_a_failed_training_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(trained.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 3))
    with pytest.raises(SystemExit, match="status 3"):
        benchmark.main(["--only", "study", "--cells", str(tmp_path)])


def test_study_cell_is_the_trained_one(tmp_path):
    pytest.importorskip("matplotlib")
    from nc_study import cli
    from nc_study.rundir import RunDirectory

    deterministic = torch.are_deterministic_algorithms_enabled()
    tiny = [
        *("--dataset", "shapes", "--width", "1", "--n-majority", "20", "--test-images", "20", "--model", "deq"),
        *("--epochs", "1", "--batch-size", "16", "--threads", "1", "--device", "cpu", "--out", str(tmp_path)),
    ]
    try:
        assert cli.main("cifar_lt", None, tiny) == 0
    finally:
        torch.use_deterministic_algorithms(deterministic)
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    problem = trained.study_cell(run, None, batch=4)
    assert problem.z0.shape == (4, 8, 4, 4) and problem.name == "residual block, shapes"
    weights: dict[str, Tensor] = {}
    RunDirectory(run).restore("deq", lambda state: weights.update(state["network"]))
    solution = deqfast.solve(problem.f, problem.z0, "broyden")
    deqfast.testing.assert_close(solution.residual_rel, problem.residuals(solution.value), 1e-3)
    # With a group per channel the last normalisation makes every channel's mean its trained bias.
    bias, means = weights["last.cell.norm3.bias"], problem.exact(problem.z0.double()).mean((2, 3))
    assert float(bias.abs().max()) > 0
    deqfast.testing.assert_close(means, bias.expand_as(means), deqfast.testing.ITERATES)
