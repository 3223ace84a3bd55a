"""The section of published models: which layer a file gets, what a row says, and when a model counts as faster."""

import subprocess
import sys

import pytest
import report
import torch
from correctness import after_solve
from harness import models
from harness.entry import Skipped
from harness.models import OURS, PEER
from torch.nn import functional

from deqfast import compat

torchdeq = pytest.importorskip("torchdeq")
TOY = """
import termcolor, torch
from torchdeq import get_deq
from torchdeq.norm import apply_norm
from parts.half import half
from utils import quarter

class Toy(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.mix, self.deq = torch.nn.Linear(3, 3), get_deq(args)

    def forward(self, x):
        return self.deq(lambda z: torch.relu(half(self.mix(z)) + x), torch.zeros_like(x))[0][-1]
"""
FLAGS = "--f_solver {} --f_max_iter 30 --f_tol 1e-10 --f_stop_mode rel --grad 3"


UTILS = "def quarter(z):\n    return z / 4\n"
HALF = "from utils import quarter\n\ndef half(z):\n    return 2 * quarter(z)\n"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Clone of a repository with a model, at the commit that is asked for."""
    folder = tmp_path / "me+toy"
    (folder / "zoo" / "parts").mkdir(parents=True)
    for name, text in (("toy", TOY), ("utils", UTILS), ("parts/half", HALF)):
        (folder / "zoo" / f"{name}.py").write_text(text)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    monkeypatch.setitem(models.COMMITS, "me/toy", commit.stdout.strip())
    return folder


def build(file, args):
    x, model = torch.cat([torch.rand(1, 3), -torch.ones(1, 3)]), file.Toy(args)  # the second state is zero
    return models.Built(model, lambda: model(x), lambda z: functional.mse_loss(z, torch.ones_like(z)))


def toy(solver="fixed_point_iter"):
    return models.Model("toy", "Picard", "me/toy", "toy", build, "zoo", FLAGS.format(solver))


def test_a_file_gets_the_layer_of_each_provider_and_no_module_stays(clone, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "utils", torch)  # another project's module of that name
    (tmp_path / "parts").mkdir()  # and its package, which has an __init__.py
    (tmp_path / "parts" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    models.in_place_of_torchdeq()  # imports the counterparts in deqfast.compat, which stay
    before = dict(sys.modules)
    theirs, ours = (models.imported(clone / "zoo", "toy", provider) for provider in (PEER, OURS))
    assert (theirs.get_deq, ours.get_deq) == (torchdeq.get_deq, compat.get_deq)
    assert theirs.apply_norm is ours.apply_norm is torchdeq.apply_norm
    assert theirs.half is not ours.half and theirs.half(4) == 2
    assert dict(sys.modules) == before and not list(clone.rglob("__pycache__"))
    (clone / "zoo" / "toy.py").write_text("import utils, no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        models.imported(clone / "zoo", "toy", OURS)
    assert dict(sys.modules) == before and torchdeq.__name__ == "torchdeq"


def test_rows_have_evaluations_residuals_and_differences(clone):
    theirs, ours = models.measure(toy(), clone.parent, rounds=2, seconds=0.1)
    assert (theirs["provider"], ours["provider"]) == (PEER, OURS) and theirs["case"] == ours["case"] == "toy"
    solve = theirs["evaluations"] - 3  # the gradient takes three
    assert 3 < solve <= 30 and abs(theirs["evaluations"] - ours["evaluations"]) <= 1
    assert 0 < theirs["residual"] < 1e-9 and 0 < ours["residual"] < 1e-9
    assert ours["loss_error"] <= after_solve(1e-10) and ours["gradient_error"] <= after_solve(1e-10, derivatives=1)
    assert min(theirs["ms"], ours["ms"], theirs["forward_ms"], ours["forward_ms"]) > 0 and ours["rounds"] == 2
    assert ours["source"] == f"me/toy@{models.COMMITS['me/toy']}" and torch.get_default_dtype() == torch.float32
    with models.on_device("cpu", torch.float64):
        built = models.built(toy(), clone / "zoo", OURS)
        calls = []
        handle = built.model.mix.register_forward_hook(lambda *_: calls.append(None))
        twice = [models.watched_step(built) for _ in range(2)]
        handle.remove()
        assert sum(step["evaluations"] + 1 for step in twice) == len(calls)  # one more for the residual
        other = models.built(toy("broyden"), clone / "zoo", OURS)
        assert models.watched_step(other)["evaluations"] < twice[0]["evaluations"]
    assert torch.equal(twice[0]["gradient"], twice[1]["gradient"])  # which does not accumulate
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in built.model.modules())


def test_without_its_clone_a_model_is_skipped_with_the_commands_that_make_it(clone):
    commit = models.COMMITS["me/toy"]

    def reason(folder):
        with pytest.raises(Skipped) as skipped:
            models.clone_of("me/toy", folder)
        return str(skipped.value)

    assert models.clone_of("me/toy", clone.parent) == clone
    assert "git clone https://github.com/me/toy FOLDER/me+toy && git -C FOLDER/me+toy checkout" in reason(None)
    (clone / "zoo" / "toy.py").write_text("")
    assert "has changes: M zoo/toy.py" in reason(clone.parent)
    models.COMMITS["me/toy"] = "0" * 40
    assert f"is at commit {commit}: git -C {clone} checkout {'0' * 40}" in reason(clone.parent)


def results(**shares):
    """Two runs of models; shares: time of ours divided by the time with torchdeq, in each run."""
    records = []
    for run in range(2):
        rows = []
        for name, times in shares.items():
            row = {"section": "models", "case": name, "solver": "s", "whole": name == "big", "residual": 1e-3}
            row["source"] = "me/toy@0123456789"
            ours = {"ms": 2.0 * times[run], "forward_ms": 0.5, "loss_error": 0.0, "gradient_error": 1e-8 * (run + 1)}
            rows += [row | {"provider": PEER, "evaluations": 5, "ms": 2.0, "forward_ms": 1.0}]
            rows += [row | {"provider": OURS, "evaluations": 4} | ours]
        records.append(report.Record(None, {"gpu": None, "threads": 1}, "measure", "2026-01-02", None, rows))
    return report.Results(records)


def test_a_model_gains_only_if_every_run_does():
    numbers = report.model_facts(results(big=(0.5, 0.7), once=(0.9, 1.0), slow=(1.06, 1.2), slower=(1.01, 1.3)))
    expected = {"all.gain": "1 of 4", "all.lose": "1 of 4", "whole.gain": "1 of 1", "all.gaining": "0.600"}
    expected |= {"all.training": "1.04", "whole.training": "0.600", "all.forward": "0.500"}
    assert {name: numbers[f"models.{name}"] for name in expected} == expected


def test_the_table_of_models_has_the_worst_difference_and_the_middle_of_the_times():
    (line,) = report.made(results(big=(0.5, 0.7)), "Models").rows
    expected = {"loss": "0", "gradient": "2.0e-8", "evaluations": "5 / 4", "residual": "1.0e-3 / 1.0e-3"}
    assert line.items() >= (expected | {"forward": "0.500", "training": "0.600 (0.500 to 0.700)"}).items()
    assert report.clones(results(big=(0.5, 0.7))) == "Repositories: me/toy 0123456."
