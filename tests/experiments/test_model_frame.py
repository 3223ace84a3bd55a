"""The frame of the example models: records, resuming, figures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from matplotlib import pyplot as plt
from models.frame import Example, Options, Outcome, Run, descend, main
from runs.options import StudyError, option


@dataclass(frozen=True, kw_only=True)
class Line(Options):
    all_arms = ("one", "other")

    lr: float = option("training", "rate", 0.1, above=0.0)


def train(run: Run) -> Outcome:
    """Fit a line; the log has what torch's generator drew at every step."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.options.lr)
    for step in run.steps(4, model=model, optimizer=optimizer):
        x = torch.randn(8, 1)
        loss = (model(x) - 2 * x).square().mean()
        descend(loss, optimizer)
        run.rows.append({"step": step, "drawn": float(x.sum())})
    return Outcome(model, "lines", {"weight": model.weight.item()}, {"log": run.rows})


def draw(records: Any) -> Any:
    figure, axes = plt.subplots()
    axes.plot([record.scores["weight"] for record in records])
    return figure


def call(tmp_path, *arguments: str) -> int:
    example = Example(Line, train, draw)
    return main("lines", "Lines.", example, ["--out", str(tmp_path), "--jobs", "1", *arguments])


@pytest.mark.tier("full")
def test_runs_are_recorded_resumed_and_shown(tmp_path, capsys, forked_runs):
    assert call(tmp_path, "--seeds", "1", "--arms", "one,one") == 0
    record = json.loads((tmp_path / "one-seed0.json").read_text())
    assert record["parameters"] == 2 and record["data"] == "lines" and record["peak_memory"] > 0
    assert torch.load(tmp_path / "one-seed0.pt", weights_only=True)["weight"].item() == record["scores"]["weight"]
    assert (tmp_path / "table.md").read_text().count("| one ") == 1 and list(tmp_path.glob("*.png"))
    assert call(tmp_path, "--seeds", "1", "--arms", "one") == 1
    assert "--resume continues it" in capsys.readouterr().err
    assert call(tmp_path, "--seeds", "1", "--arms", "one", "--resume", "--lr", "0.2") == 1
    assert "--lr 0.1, not 0.2" in capsys.readouterr().err
    before = (tmp_path / "one-seed0.json").read_bytes()
    assert call(tmp_path, "--seeds", "1", "--resume") == 0
    assert (tmp_path / "one-seed0.json").read_bytes() == before and (tmp_path / "other-seed0.json").exists()


def test_a_model_that_makes_its_data_refuses_a_data_root(tmp_path, capsys):
    assert call(tmp_path, "--data-root", "elsewhere") == 1
    assert "--data-root elsewhere: lines makes its own data" in capsys.readouterr().err


def test_a_run_does_not_go_on_with_other_data(tmp_path, cut_off):
    data = tmp_path / "lines.txt"
    data.write_text("1 2 3")

    def run():
        return Run(train, Line(resume=True, data_root=str(tmp_path)), tmp_path, "cut", 3)

    cut_off(lambda: train(run()))
    run().check()
    data.write_text("1 2 4")
    with pytest.raises(StudyError, match="--data-root sha256 [0-9a-f]{8}, not sha256"):
        run().check()


def test_a_run_that_was_cut_off_draws_what_it_would_have_drawn(tmp_path, cut_off):
    whole = train(Run(train, Line(), tmp_path, "whole", 3))
    cut_off(lambda: train(Run(train, Line(), tmp_path, "cut", 3)))
    again = Run(train, Line(), tmp_path, "cut", 3)
    train(again)
    assert again.rows == whole.shown["log"]
    again.checkpoint.write_bytes(b"\x80damaged")
    with pytest.raises(StudyError, match="cut-seed3.ckpt cannot be read"):
        train(again)


@pytest.mark.tier("full")
def test_a_damaged_record_takes_no_other_run_with_it(tmp_path, capsys, forked_runs):
    """The table and the figure have the others, and the damaged ones are named."""
    given = ("--seeds", "2", "--arms", "one", "--resume")
    assert call(tmp_path, *given) == 0
    path, table = tmp_path / "one-seed1.json", tmp_path / "table.md"
    record = json.loads(path.read_text())
    assert "| one   | 2            | 2       |" in table.read_text()
    damages = [{"scores": {}}, {"seed": 0}, {"arm": "other"}, {"versions": {}}, {"format": "1"}, {"shown": 3}]
    damages += [{"scores": {"weight": "x"}}, {"scores": {"other": 1.0}}]  # of which the figure wants the first
    for damage in damages:
        path.write_text(json.dumps(record | damage))
        assert call(tmp_path, *given) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"one-seed1 failed: {path} cannot be read" in error
        assert "| one   | 2            | 1       |" in table.read_text()
