"""The separation study against what is known in closed form, its frame, and small runs from end to end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import separation
from nc_study.config import StudyError
from separation_study import diagonal, frame, report
from separation_study.claims import FAILS, HOLDS, OPEN, less

SMALL = diagonal.Sizes(((4, 2),), (0.5, 1.0), (0.4, 0.2), 1)


@pytest.fixture
def small(monkeypatch):
    """The diagonal experiment alone, of a tiny size."""
    tiny = replace(diagonal.DIAGONAL, sizes={"quick": SMALL, "full": replace(SMALL, seeds=2)})
    monkeypatch.setattr(separation, "EXPERIMENTS", {"diagonal": tiny})
    monkeypatch.setattr(diagonal, "HORIZON", 2.0)
    return tiny


def test_verdict_needs_an_interval_without_zero():
    assert less([-1.0, -1.1, -0.9])[0] == HOLDS
    assert less([1.0, 1.1, 0.9])[0] == FAILS
    assert less([1.0, -1.1, 0.3])[0] == OPEN
    assert less([-1.0])[0] == OPEN


@pytest.mark.parametrize("rule", diagonal.RULES, ids=lambda rule: rule.name)
def test_flow_ends_at_its_convex_optimum_and_no_other(rule):
    x, truth = diagonal.draw(frame.Unit("d6-n2", 0))
    start = np.full(6, 0.4)
    limit, drift = diagonal.flow(rule, x, x @ truth, start)
    assert drift < 1e-9
    np.testing.assert_allclose(x @ limit, x @ truth, rtol=1e-9)
    np.testing.assert_allclose(limit, diagonal.convex_optimum(rule, x, truth, start), rtol=1e-6)
    of_q = diagonal.kkt_residual(start**-3 - limit**-3, x)
    assert of_q < 1e-9 if rule.name == "DEQ" else of_q > 1e-2
    assert diagonal.kkt_residual(-(start**-3) - limit**-3, x) > 1e-2  # the sign as printed
    if rule.name == "DEQ, JFB":  # minimises Σ[1/β + β/β(0)²]
        assert diagonal.kkt_residual(start**-2 - limit**-2, x) < 1e-9


@pytest.mark.parametrize("rule", diagonal.RULES[:2], ids=lambda rule: rule.name)
def test_descent_through_deqfast_is_of_first_order_and_solves_exactly(rule, monkeypatch):
    monkeypatch.setattr(diagonal, "HORIZON", 10.0)
    x, truth = diagonal.draw(frame.Unit("d4-n2", 0))
    coarse, fine = (diagonal.descend(rule, x, x @ truth, step) for step in (0.2, 0.1))
    assert coarse.distance / fine.distance == pytest.approx(2, rel=0.2)
    assert coarse.drift / fine.drift == pytest.approx(2, rel=0.2)
    assert max(coarse.solver_error, fine.solver_error) < 1e-11


def test_participation_of_known_vectors():
    assert diagonal.participation(np.array([1.0, -1.0, 1.0])) == pytest.approx(1)
    assert diagonal.participation(np.array([0.0, 2.0, 0.0, 0.0])) == pytest.approx(1 / 4)


def test_run_writes_a_report_resumes_and_refuses_other_sizes(small, tmp_path, monkeypatch, capsys):
    arguments = ["--out", str(tmp_path), "--jobs", "1", "--experiment", "diagonal"]
    assert separation.main(arguments) == 0
    text = (tmp_path / "quick" / "report.md").read_text()
    assert (tmp_path / "quick" / "report.html").exists() and (tmp_path / "quick" / "figures" / "diagonal.png").exists()
    assert text.count("(derived)") >= 3 and "| does not hold |" in text

    monkeypatch.setattr(frame, "measure", lambda *_: pytest.fail("a finished unit is measured again"))
    assert separation.main(arguments) == 0
    assert (tmp_path / "quick" / "report.md").read_text() == text

    record = frame.path_of(tmp_path / "quick", small, frame.Unit("d4-n2", 0))
    with pytest.raises(StudyError, match="other sizes"):
        frame.load(record, small, replace(SMALL, initials=(2.0,)))
    record.write_bytes(record.read_bytes()[:-20])
    assert separation.main(arguments) == 1
    assert f"{record} cannot be read" in capsys.readouterr().err


def test_report_names_units_that_are_missing(small, tmp_path):
    frame.measure(tmp_path, (small, "full", frame.Unit("d4-n2", 1)))
    text = report.write([small], "full", tmp_path).read_text()
    assert "Not measured: d4-n2-seed0" in text


@pytest.mark.parametrize("arguments", [["--experiment", "none"], ["--jobs", "0"], ["--preset", "huge"]])
def test_bad_argument_is_an_error_that_names_it(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        separation.main(arguments)
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err
