"""Damaged and hostile files give one line that names them, and take no other run with them."""

import io
import json
import random
import shutil
import warnings
import zipfile

import numpy as np
import pytest
import torch
from models import graphs, restoration, sudoku_puzzles, text
from nc_study import moments
from nc_study.protocol import Tuning
from nc_study.reporting.runs import collect
from nc_study.rundir import RunDirectory
from PIL import Image
from runs.files import Unreadable, read_record, to_json, write_arrays
from runs.options import StudyError
from scipy.io import wavfile
from separation_study import audio
from study_helpers import made_up_epoch, made_up_settings, ring_of_six, run_script

DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000


def changed(record, path, value):
    """A record in which the entry of a path like "network.curves" has another value."""
    record = inner = json.loads(record)
    *way, last = path.split(".")
    for name in way:
        inner = inner[name]
    inner[last] = value
    return json.dumps(record).encode()


RESULTS = {
    "deep": DEEP,
    "list": b"[]",
    "latin": b'{"format": "\xff"}',
    **{f"format {value}": ("format", value) for value in ("5", None, True, 10**30)},
    "no loss": ("network.curves.loss", []),
    "huge": ("network.curves.nc1", [1e300] * 4),
    "other nc": ("network.nc", {"nc9": 1.0}),
    "no curve of the solves": ("network.solver", dict.fromkeys(("iterations", "residual", "converged"), 1.0)),
    "another arm": ("arm", "explicit"),
    "device": ("settings.device", "auto"),
}
FEATURES = {"features": np.zeros((6, 3), np.float16), "labels": np.arange(6)}
MOMENTS = {"epoch": np.array([2, 4]), "counts": np.full((2, 10), 5), "means": np.ones((2, 10, 3))}
MOMENTS |= {"traces": np.ones((2, 10)), "scatter": np.ones((2, 10, 10)), "weight": np.ones((2, 10, 3))}
READ = MOMENTS.keys() - {"scatter"}  # in a report


def arrays(**given):
    content = io.BytesIO()
    np.savez(content, **given)
    return content.getvalue()


def claiming(shape):
    """Bytes of an .npz whose array claims this shape, and has no number."""
    content, array = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(content, "w") as archive:
        for name in (*MOMENTS, *FEATURES):
            archive.writestr(f"{name}.npy", array.getvalue())
    return content.getvalue()


ARRAYS = {
    "8 TB": ("moments", claiming((10**12,))),
    "no zip": ("moments", b"PK\x03\x04"),
    **{f"no {name}": ("moments", arrays(**{k: v for k, v in MOMENTS.items() if k != name})) for name in READ},
    "lengths": ("moments", arrays(**MOMENTS | {"means": np.ones((1, 10, 3))})),
    "classes": ("moments", arrays(**MOMENTS | {"counts": np.ones((2, 3), int)})),
    "code": ("moments", arrays(**MOMENTS | {"epoch": np.array([print, 4], dtype=object)})),
    "labels": ("features", arrays(**FEATURES | {"labels": np.arange(5)})),
    "class": ("features", arrays(**FEATURES | {"labels": np.full(6, 10**12)})),
    "not finite": ("features", arrays(**FEATURES | {"features": np.full((6, 3), np.nan)})),
}


def test_a_report_leaves_out_the_runs_with_damaged_files_and_names_them(made_up, tmp_path, capsys):
    whole = made_up("whole", model="deq")
    write_arrays(whole / "moments.npz", MOMENTS)
    write_arrays(whole / "features.npz", FEATURES)
    result = (whole / "result.json").read_text()
    damages = {name: ("result.json", to) for name, to in RESULTS.items()}
    damages |= {name: (f"{file}.npz", content) for name, (file, content) in ARRAYS.items()}
    files = ("result.json", "moments.npz", "features.npz", "epochs.jsonl", "settings.json")
    damages |= {f"folder {name}": (name, None) for name in files}
    for name, (file, damage) in damages.items():
        folder = shutil.copytree(whole, whole.parent / name)
        if damage is None:
            (folder / file).unlink()
            (folder / file).mkdir()
            if file in ("epochs.jsonl", "settings.json"):
                (folder / "result.json").unlink()
        else:
            (folder / file).write_bytes(damage if isinstance(damage, bytes) else changed(result, *damage))
    runs = collect([whole.parent])
    assert [run.path for group in runs.groups for run in group.finished] == [whole]
    assert {entry.folder.name for entry in runs.rejected} == damages.keys()
    for entry in runs.rejected:
        assert entry.state == "unreadable" and str(entry.folder) in entry.reason and "\n" not in entry.reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nc_study.figures.embeddings_figure", lambda *_: None)
        patch.setattr("nc_study.reporting.report.png", lambda _: b"")
        assert run_script("report.py", str(whole.parent), "--out", str(tmp_path / "report")) == 0
    assert capsys.readouterr().out.count("unreadable: ") == len(damages)


class Harm:
    """Code that loading would run."""

    def __reduce__(self):
        return (exec, ("raise SystemExit",))


def trained(kind, steps=1):
    """A network, its optimiser after a step or none, and a schedule."""
    network = torch.nn.Linear(3, 2)
    optimizer = kind(network.parameters(), 0.1, **{"momentum": 0.9} if kind is torch.optim.SGD else {})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(steps):
        network(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return {"network": network, "optimizer": optimizer, "schedule": schedule}


def kept_of_first(**changes):
    """Change what the optimiser keeps of its first parameter; "buffer" stands for its momentum."""

    def change(state):
        kept = state["optimizer"]["state"]
        buffer = "exp_avg" if "exp_avg" in kept[0] else "momentum_buffer"
        first = kept[0] | {name.replace("buffer", buffer): value for name, value in changes.items()}
        return state | {"optimizer": state["optimizer"] | {"state": kept | {0: first}}}

    return change


STATES = {
    "list": lambda state: [1, 2],
    "code": lambda state: Harm(),
    **{f"epoch {n}": lambda state, n=n: state | {"epoch": n} for n in (-1, True, "1", None)},
    "no network": lambda state: {k: v for k, v in state.items() if k != "network"},
    "optimizer of numbers": lambda state: state | {"optimizer": 3},
    "shapes": lambda state: state | {"network": torch.nn.Linear(4, 2).state_dict()},
    "group": lambda state: state | {"optimizer": state["optimizer"] | {"param_groups": [{"params": [0, 1]}]}},
    "parameters": lambda state: state | {"optimizer": state["optimizer"] | {"state": {7: {}}}},
    "rates": lambda state: state | {"schedule": {"step": 3}},
    "kept shape": kept_of_first(buffer=torch.ones(9)),
    "kept text": kept_of_first(buffer="a"),
    "kept": kept_of_first(b=1),
}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # of a tensor where a state was expected
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_checkpoints_that_do_not_fit_are_refused(kind, tmp_path):
    run, kept = RunDirectory(tmp_path), trained(kind)
    for name, change in STATES.items():
        state = {"epoch": 1} | {part: value.state_dict() for part, value in kept.items()}
        torch.save(change(state), tmp_path / "last.ckpt")
        with pytest.raises(Unreadable, match="last.ckpt cannot be read") as error:
            run.take_over(run.restore(), **trained(kind))
        assert "\n" not in str(error.value), name
    run.save({"epoch": 3} | {part: value.state_dict() for part, value in kept.items()})
    state = run.restore()
    assert state["epoch"] == 3
    run.take_over(state, **trained(kind, steps=0))


def test_a_number_of_epochs_that_were_not_logged_costs_no_memory(tmp_path):
    run = RunDirectory(tmp_path)
    run.append(made_up_epoch(1, made_up_settings()))
    with pytest.raises(StudyError, match="epochs.jsonl lacks lines of the 1000000000 finished epochs"):
        run.cut(10**9)
    (tmp_path / "epochs.jsonl").write_bytes(to_json(made_up_epoch(1, made_up_settings())) + DEEP)
    assert len(run.epochs) == 1
    line = json.loads(to_json(made_up_epoch(2, made_up_settings())))
    (tmp_path / "epochs.jsonl").write_text(json.dumps(line | {"nc": {"nc9": 1.0}}))
    assert run.epochs == []


def test_moments_that_do_not_join_are_refused(tmp_path):
    run = RunDirectory(tmp_path)
    write_arrays(run.moments, MOMENTS)
    with pytest.raises(Unreadable, match="moments.npz cannot be read"):
        run.append(made_up_epoch(4, made_up_settings()), {"means": np.ones((9, 9)), "counts": np.ones(9)})


def sound():
    content = io.BytesIO()
    wavfile.write(content, 400, np.sin(np.arange(800)).astype(np.float32))
    return content.getvalue()


def picture(kind="png", **given):
    content = io.BytesIO()
    Image.fromarray(np.arange(1200, dtype=np.uint8).reshape(30, 40)).save(content, kind, **given)
    return content.getvalue()


def graph(**given):
    content = io.BytesIO()
    np.savez_compressed(content, **ring_of_six() | given)
    return content.getvalue()


PUZZLE = (
    b"050703060007000800000816000000030000005000100730040086906000204840572093000409000 "
    b"158723469367954821294816375619238547485697132732145986976381254841572693523469718\n"
)


READERS = {  # by the name of the file: how it is read, and a whole one
    "a.png": (lambda path: restoration.read(path.parent), picture()),
    "a.jpg": (lambda path: restoration.read(path.parent), picture("jpeg")),
    "a.bmp": (lambda path: restoration.read(path.parent), picture("bmp")),
    "a.wav": (audio.read, sound()),
    "cora.npz": (lambda path: graphs.citations(graphs.Graphs(data="cora", data_root=str(path.parent)), 0), graph()),
    "a.txt": (lambda path: text.load(text.Text(data_root=str(path), context=2)), "täglich\n".encode() * 40),
    "puzzles.txt": (sudoku_puzzles.read, PUZZLE * 2),
    "moments.npz": (moments.read, arrays(**MOMENTS)),
    "tuning.json": (lambda path: read_record(path, Tuning, "no remedy"), to_json(Tuning((), {}))),
}
HOSTILE = {
    "a.png": [picture()[:40]],
    "a.wav": [b"RIFF", b"RIFF\xff\xff\xff\xffWAVE"],
    "cora.npz": [
        *(graph(x_data=np.full(6, np.nan)), graph(y=np.full(6, 10**12)), graph(x_shape=np.array([6, 10**12]))),
        *(graph(y=np.array([print] * 6, object)), graph(edges=np.full((1, 2), -1)), arrays()),
        *(graph(x_indptr=np.arange(7)[::-1]), claiming((10**12,)), graph(train_mask_0=np.zeros(6, bool))),
    ],
    "a.txt": [b"", b"\xff" * 1000, b"a\0" * 1000],
    "puzzles.txt": [b"\xff\n", b"1 2\n", PUZZLE.replace(b"0507", b"5507"), b"0" * 10**6],
    "tuning.json": [DEEP, b"[]", b"{}", to_json(Tuning((), {})).replace(b"{}", b'{"mlp":{}}')],
}


def damaged(content, count=40):
    """Copies that are cut, or in which a few bytes differ; the same in every run."""
    chance = random.Random(0)
    yield b""
    for _ in range(count):
        yield content[: chance.randrange(len(content))]
        other = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            other[chance.randrange(min(len(other), chance.choice((60, 10**6))))] = chance.randrange(256)
        yield bytes(other)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", READERS)
def test_data_files_are_read_or_named_in_a_line(name, tmp_path):
    path, (read, content) = tmp_path / name, READERS[name]
    path.write_bytes(content)
    read(path)
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parsers warn of what they then read
        for other in [*HOSTILE.get(name, ()), *damaged(content)]:
            path.write_bytes(other)
            try:
                read(path)
            except StudyError as error:
                refused += 1
                assert str(tmp_path) in str(error) and "\n" not in str(error) and len(str(error)) < 1000
            else:
                assert other not in HOSTILE.get(name, ()), other[:100]
    assert refused > len(HOSTILE.get(name, ()))
    path.unlink()
    path.mkdir()
    with pytest.raises(StudyError, match=name):
        read(path)
