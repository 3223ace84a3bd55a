"""Invalid arguments end a script with status 2 and a line that names them, before anything is written."""

import shlex
from functools import partial

import layer_peeled
import model
import pytest
import separation
import study
from models import frame
from nc_study.config import parse

SCRIPTS = {
    "cifar_lt": partial(parse, "cifar_lt", None),
    "cifar_balanced": partial(parse, "cifar_balanced", None),
    "study": study.main,
    "layer_peeled": layer_peeled.main,
    "separation": separation.main,
    "model": model.main,
}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cifar_lt --majority 10", "--majority 10: 1 to 9 tenths of the classes"),
        ("cifar_lt --ratio 50 --n-majority 49", "--ratio 50 leaves minority classes empty at --n-majority 49"),
        ("cifar_lt --lr 0", "--lr 0.0: must be more than 0"),
        ("cifar_balanced --imbalance exp", "unrecognized arguments: --imbalance exp"),
        ("cifar_lt --model once --adjoint implicit", "--adjoint implicit: --model once has no equilibrium"),
        ("cifar_lt --model explicit --cells 12", "--cells 12: only for --model tied and untied"),
        ("cifar_balanced --cells 2", "--cells 2: only for --model tied and untied"),
        ("study --table 1 --arms tied-2 --cells 4", "unrecognized arguments: --cells 4"),
        ("study", "which runs? --protocol PART, or"),
        ("cifar_lt --model once", "take --model tied --cells 1"),
        ("study --protocol rates --epochs 3 --lr 1", "--epochs, --lr: experiments/protocol.md decides it"),
        ("study --table 1 --arms explicit,deq", "--arms explicit,deq: deq is none of explicit, explicit-norm"),
        ("study --table 1,9", "--table 1,9: 9 is none of all, 1, 2, 3, 4"),
        (f"study --table 1 --seeds {'9' * 20}", "at most 9223372036854775807"),
        ("study --table 1 --spread", "only under torchrun with two or more processes"),
        ("study --table 2 --n-majority 50", "--ratio 100 leaves minority classes empty at --n-majority 50"),
        ("layer_peeled --e-h=1.5 --e-w=1", "--e-h 1.5"),
        ("layer_peeled --e-h=0.5", "as many as --e-w"),
        ("layer_peeled --tolerance=0", "--tolerance 0"),
        ("separation --experiment none", "--experiment"),
        ("model nothing", "invalid choice: 'nothing'"),
        ("model graphs --arms best", "--arms best: best is none of all, deq, explicit-parameters, explicit-compute"),
        ("model sudoku --clues 3", "--clues 3: 8 to 35 with --size 6"),
        ("model sudoku --data-root .", "--size 6: 9 with --data-root"),
        ("cifar_lt --sovler picard", "unrecognized arguments: --sovler picard; did you mean '--solver'?"),
        (
            "cifar_lt --max_iter=3 --solvr=picard",
            "--solvr=picard; did you mean '--max-iter'?; did you mean '--solver'?",
        ),
        ("separation --experiment sawtoth", "did you mean 'sawtooth'?"),
    ],
)
def test_bad_arguments_are_named(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script, *arguments = command.split()
    with pytest.raises(SystemExit) as stop:
        SCRIPTS[script](arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [*SCRIPTS, *(f"model {name}" for name in model.MODELS)])
def test_the_examples_of_the_help_are_right(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for module in (layer_peeled, frame, separation, study):
        monkeypatch.setattr(module, "run_main", lambda *_: 0)
    script, *words = command.split()
    with pytest.raises(SystemExit):
        SCRIPTS[script]([*words, "--help"])
    examples = capsys.readouterr().out.partition("\nexamples:\n")[2].splitlines()
    assert len(examples) > 1
    for example in examples:
        command, path, *arguments = shlex.split(example, comments=True)
        assert command == "python" and path.endswith(f"/{script}.py") and arguments[: len(words)] == words
        SCRIPTS[script](arguments)
