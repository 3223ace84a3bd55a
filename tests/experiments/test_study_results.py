"""The paper's tables as typed in, the row measured beside them, and the figure."""

from __future__ import annotations

import json

import pytest
from nc_study import figures, results
from nc_study.config import settings_from
from nc_study.results import (
    FORMAT,
    INCONSISTENT,
    PAPER,
    build_result,
    curves,
    differences,
    paper_cell,
    report,
    spread,
    summarise,
)
from nc_study.rundir import RunDirectory, write_json

TWELVE = [(data, majority, ratio) for data, majority, ratio in PAPER if majority is not None]


def paper_settings(**given):
    return settings_from("cifar_lt", **{"preset": "paper", "dataset": "cifar10", "device": "cpu", **given})


def test_the_tables_are_complete():
    assert len(TWELVE) == 18
    for data in ("cifar10", "cifar100"):
        for majority in (3, 5, 7):
            assert {ratio for d, k, ratio in TWELVE if (d, k) == (data, majority)} == {10, 50, 100}
        assert PAPER[data, None, None]["deq"]["minority"] is None


@pytest.mark.parametrize("key", TWELVE)
@pytest.mark.parametrize("model", ["explicit", "deq"])
def test_overall_is_the_class_mean_but_for_the_entries_marked(key, model):
    majority = key[1] / 10
    entry = PAPER[key][model]
    mean = majority * entry["majority"]["mean"] + (1 - majority) * entry["minority"]["mean"]
    assert (abs(mean - entry["overall"]["mean"]) > 0.03) == ((*key, model) in INCONSISTENT)


def test_some_cells_as_printed():
    assert PAPER["cifar10", 3, 10]["explicit"]["overall"] == {"mean": 72.57, "std": 0.25}
    assert PAPER["cifar10", 5, 100]["deq"]["minority"] == {"mean": 1.26, "std": 4.93}
    assert PAPER["cifar100", 7, 100]["deq"]["minority"] == {"mean": 0.0, "std": 0.0}
    assert PAPER["cifar100", None, None]["deq"]["overall"] == {"mean": 64.77, "std": 0.36}


def test_the_cell_of_a_run():
    assert paper_cell(paper_settings(majority=7, ratio=50)) is PAPER["cifar10", 7, 50]
    assert paper_cell(paper_settings(dataset="shapes100")) is PAPER["cifar100", 3, 10]
    assert paper_cell(paper_settings(ratio=20)) is None


def test_the_papers_own_run_differs_in_nothing():
    assert differences(paper_settings()) == []
    assert differences(paper_settings(metrics_every=1, seed=3, adjoint="implicit", kernel="torch")) == []
    assert differences(paper_settings(precision="bf16", e_h=2.0)) == [
        "e-h 2.0 instead of 0.01",
        "precision bf16 instead of fp32",
    ]
    assert differences(paper_settings(lr=0.1)) == ["lr 0.1 instead of 0.0001"]
    assert differences(paper_settings(dataset="shapes"))[0] == "shapes, not CIFAR"
    assert differences(paper_settings(e_w=0.01)) == []


def test_mean_and_sample_deviation():
    assert spread([1.0, 2.0, 3.0]) == {"mean": 2.0, "std": 1.0}
    assert spread([4.0]) == {"mean": 4.0, "std": 0.0}


def rows(epochs, deq, split=True):
    solver = {"iterations": 11.0, "residual": 5e-4, "converged": 0.9}
    solver |= {"max_iter": 2, "nonfinite": 1, "stalled": 0, "skipped": 3}
    solver["per_class"] = {"iterations": [9.0] * 3 + [16.0] * 7, "residual": [5e-4] * 10}
    solver["per_class"]["converged"] = [0.9] * 9 + [None]
    return [
        {
            "epoch": epoch,
            "train": {"lr": 0.1, "loss": 1.0, "accuracy": 50.0, "solver": solver if deq else None},
            "test": {
                "overall": float(epoch),
                "majority": 2.0 * epoch if split else None,
                "minority": epoch / 2 if split else None,
                "per_class": [float(epoch)] * 10,
                "solver": solver if deq else None,
                **({"confusion": [[1] * 10] * 10} if epoch == epochs else {}),
            },
            "nc": {"nc1": 1 / epoch, "nc2": 0.5, "nc3": None, "nc4": 1.0} if epoch % 2 == 0 else None,
            "seconds": {"train": 1.0, "test": 0.25, "metrics": 0.1},
        }
        for epoch in range(1, epochs + 1)
    ]


def test_a_network_is_summed_up_over_its_last_ten_epochs():
    summary = summarise(rows(12, deq=True), 3)
    assert summary["epochs_averaged"] == 10
    assert summary["accuracy"]["overall"]["mean"] == pytest.approx(7.5)
    assert summary["solver"]["skipped"] == 36 and summary["solver"]["iterations"] == 11
    assert summary["seconds"] == {"train": 12.0, "test": 3.0, "metrics": 1.2}
    assert summary["confusion"] == [[1] * 10] * 10
    assert summarise(rows(4, deq=False), 3)["epochs_averaged"] == 4
    assert summarise(rows(4, deq=False), 3)["solver"] is None


def test_the_curves_hold_a_value_per_epoch_and_means_over_the_classes_of_a_group():
    found = curves(rows(5, deq=True), 3)
    assert found["epoch"] == [1, 2, 3, 4, 5] and found["overall"] == [1, 2, 3, 4, 5] and found["loss"] == [1.0] * 5
    assert found["nc"]["epoch"] == [2, 4] and found["nc"]["nc1"] == [1 / 2, 1 / 4] and found["nc"]["nc3"] == [None] * 2
    assert found["solver"]["majority"]["iterations"] == [9] * 5
    assert found["solver"]["minority"]["iterations"] == [16] * 5
    assert found["solver"]["minority"]["converged"] == pytest.approx([0.9] * 5)
    assert found["solver"]["iterations"] == [11] * 5 and found["solver"]["skipped"] == [3] * 5
    balanced = curves(rows(5, deq=True, split=False), 10)
    assert balanced["minority"] == balanced["solver"]["minority"]["residual"] == [None] * 5
    assert curves(rows(5, deq=False), 3)["solver"] is None


@pytest.fixture
def make(tmp_path):
    def finished(settings):
        run = RunDirectory(tmp_path)
        for model in settings.models:
            for row in rows(4, model == "deq", settings.majority is not None):
                run.append(model, row)
        kernel = {"requested": "triton", "used": "cpp", "reason": "no GPU"}
        parameters = dict.fromkeys(settings.models, 123)
        analyses = {model: {"spectral_radius": None} for model in settings.models}
        write_json(run.result, build_result(settings, run, kernel, (5,) * 10, parameters, analyses))
        return run, json.loads(run.result.read_text())

    return finished


def test_the_result_holds_what_one_asks_of_a_result(make):
    _, result = make(paper_settings(epochs=4))
    assert result["data"] == "cifar10" and result["preset"] == "paper"
    assert result["kernel"] == {"requested": "triton", "used": "cpp", "reason": "no GPU"}
    assert {"python", "torch", "deqfast", "triton"} <= set(result["versions"])
    assert {"cpu", "gpu", "threads", "cores"} <= set(result["machine"])
    assert result["settings"]["weight_decay"] == 5e-4 and "out" not in result["settings"]
    assert result["models"]["deq"]["parameters"] == 123 and result["models"]["deq"]["spectral_radius"] is None
    assert result["format"] == FORMAT and result["majority_classes"] == 3
    assert result["paper"]["deq"]["overall"]["mean"] == 73.84


def test_the_report_shows_the_row_beside_the_papers(make):
    _, result = make(paper_settings(epochs=4))
    text = report(result)
    lines = {line.split("  ")[1]: line.split()[-3:] for line in text.splitlines() if line.startswith("  paper")}
    assert lines["paper, explicit"] == ["72.57±0.25", "96.40±0.32", "62.36±0.12"]
    assert lines["paper, deq"] == ["73.84±0.72", "96.68±0.87", "64.06±0.66"]
    assert "2.50±1.29" in text and "last 4 of 4 epochs" in text
    assert "not comparable with the paper: epochs 4 instead of 100" in text
    assert all(name in text for name in ("NC1", "NC2", "NC3", "NC4", "undefined", "kernel cpp"))
    assert "†" not in text


def test_an_inconsistent_entry_is_marked(make):
    _, result = make(paper_settings(majority=5))
    assert "paper, explicit†" in report(result) and "not the class mean" in report(result)


def test_an_imbalance_that_the_paper_lacks_is_said(make):
    _, result = make(paper_settings(ratio=20))
    assert "the paper has no entry" in report(result)


def test_the_balanced_row_has_one_column(make):
    _, result = make(settings_from("cifar_balanced", preset="paper", dataset="cifar100", device="cpu"))
    text = report(result)
    assert "64.77±0.36" in text and "minority" not in text and "balanced" in text


def test_the_figure_is_drawn_from_the_files(make):
    run, _ = make(paper_settings(epochs=4))
    figures.draw(run)
    assert run.figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("models", [("explicit",), ("explicit", "deq")])
def test_the_figure_names_axes_and_lines(models):
    figure = figures.study_figure({"heading": {model: [curves(rows(6, model == "deq"), 3)] for model in models}})
    accuracy, *collapse = figure.axes
    assert [axis.get_ylabel() for axis in figure.axes] == ["test accuracy (%)", "NC1", "NC2", "NC3"]
    assert len(accuracy.lines) == 3 * len(models)
    assert collapse[0].get_yscale() == "log"
    assert list(collapse[0].lines[0].get_xdata()) == [2, 4, 6]
    assert {axis.get_xlabel() for axis in figure.axes} == {"epoch"}
    results_title = results.title({"data": "shapes", "settings": {"majority": 3, "ratio": 10}})
    assert results_title == "shapes, K_A = 3, R = 10"
