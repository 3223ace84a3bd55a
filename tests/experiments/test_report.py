"""The report: which runs may be compared; its tables compared with the results, its files, and its errors."""

import html
import math
import re
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
from nc_study.config import Setting
from nc_study.figures import course, study_figure
from nc_study.reporting.document import Source, markdown_table, to_html
from nc_study.reporting.report import write
from nc_study.reporting.runs import collect
from nc_study.rundir import RunDirectory
from runs.files import to_json
from runs.options import StudyError
from study_helpers import EXPERIMENTS, run_script

SETTING = Setting("cifar10", 3, 10)


def test_seeds_and_settings_are_one_group(made_up):
    root = made_up().parent
    made_up(seed=1, kernel="torch", metrics_every=1, compile=True)
    made_up(ratio=100)
    made_up(adjoint="implicit", seed=1)
    made_up(study="cifar_balanced")
    (group,) = collect([root]).groups
    assert group.settings == [Setting("cifar10"), SETTING, Setting("cifar10", 3, 100)]
    arms = {"deq-jfb": [0, 1], "deq-implicit": [1], "once": []}
    assert {arm: list(group.networks(SETTING, arm)) for arm in arms} == arms


def test_runs_of_other_options_are_never_in_one_group(made_up):
    made_up("first")
    options = [{"dataset": "shapes"}, {"solver": "anderson"}, {"lr": 0.3}, {"precision": "bf16"}]
    options += [{"e_w": 0.01}, {"preset": "tuned", "width": 16, "n_majority": 1000, "batch_size": 32}]
    for number, given in enumerate(options):
        root = made_up(f"other{number}", **given).parent
    groups = collect([root]).groups
    assert len(groups) == len({group.name for group in groups}) == 7
    assert groups[-1].experiment.dataset == "shapes", "real data come before drawn images"


def test_a_difference_is_of_the_same_seed_and_group_and_of_nc1_a_ratio(made_up):
    root = made_up("e0", model="explicit").parent
    made_up("d1", seed=1)
    made_up("d0", max_iter=30)
    assert not any(group.differences(SETTING, "deq-jfb", "explicit", "nc2") for group in collect([root]).groups)
    made_up("d2", shift=2.0)
    made_up("e1", model="explicit", seed=1)
    group = collect([root]).groups[0]
    assert group.differences(SETTING, "deq-jfb", "explicit", "overall") == pytest.approx({0: 2.0, 1: 1.0})
    assert group.differences(SETTING, "explicit", "deq-jfb", "nc2") == pytest.approx({0: 0.2, 1: 0.1})
    assert group.differences(SETTING, "deq-jfb", "explicit", "nc1") == {0: 0.0, 1: 0.0}
    path = root / "e1" / "result.json"
    result = RunDirectory(path.parent).result
    network = replace(result.network, nc={**result.network.nc, "nc1": 1.5, "nc2": None})
    path.write_bytes(to_json(replace(result, network=network)))
    group = collect([root]).groups[0]
    assert group.differences(SETTING, "explicit", "deq-jfb", "nc2") == pytest.approx({0: 0.2})
    assert group.differences(SETTING, "deq-jfb", "explicit", "nc1")[1] == pytest.approx(math.log(0.5))


def test_a_course_is_drawn_without_any_nc1(made_up):
    result = RunDirectory(made_up()).result
    without = {**result.network.curves, "nc1": [None] * result.settings.epochs}
    assert course([replace(result, network=replace(result.network, curves=without))]).startswith(b"\x89PNG")
    figure = study_figure({"": {result.arm: [result.network.curves]}})
    assert [axis.get_yscale() for axis in figure.axes] == ["linear", "linear", "log", "linear", "linear"]
    plt.close(figure)


NASTY = 'a|b <script>alert("x")</script> & *c* `d` [e](f) _g_ K_A'


def test_tables_escape_what_they_hold_and_align_numbers():
    names = {NASTY: "1.0", "x": "not run", Source("**bold**"): "–"}
    text = markdown_table([{"name": name, "n": value} for name, value in names.items()])
    lines = text.splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3} and len({len(line) for line in lines}) == 1
    assert re.fullmatch(r"\|:-+\|-+:\|", lines[1]) and "**bold**" in text and "<script>" not in text
    assert NASTY in html.unescape(re.sub(r"<[^>]*>", "", to_html("title", text, EXPERIMENTS))), (
        "HTML shows what was written"
    )


@pytest.mark.tier("full")
def test_the_committed_report_is_of_the_committed_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(EXPERIMENTS.parent)
    monkeypatch.setattr("nc_study.figures.embeddings_figure", lambda *_: "a t-SNE takes seconds")
    monkeypatch.setattr("nc_study.reporting.report.png", lambda figure: b"as does drawing")
    assert run_script("report.py", "experiments/results/protocol", "--out", str(tmp_path)) == 0
    assert f"markdown: {tmp_path / 'report.md'}\n" in capsys.readouterr().out
    committed = EXPERIMENTS / "results" / "report"
    for name in ("report.md", "appendix.md", "provenance.md"):
        assert (tmp_path / name).read_text() == (committed / name).read_text()


def test_errors_are_named_in_a_line(made_up, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match="cannot write there"):
        write(collect([made_up().parent]), tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    for name, reason in (("absent", "{}: no such folder"), ("empty", "no runs under {}")):
        assert run_script("report.py", str(tmp_path / name)) == 1
        assert capsys.readouterr() == ("", f"report.py: error: {reason.format(tmp_path / name)}\n")
    (tmp_path / "empty" / "result.json").touch()
    for folder, reason in ((tmp_path / "runs", "cifar10, (3,7) R = 10 needs two seeds"), ("empty", "no finished run")):
        assert run_script("report.py", str(tmp_path / folder), "--power") == 1
        out, err = capsys.readouterr()
        assert not out and err.startswith(f"report.py: error: --power: {reason}") and err.count("\n") == 1
    assert run_script("report.py") == 2
