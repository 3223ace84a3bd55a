"""benchmarks/training_step.py: what it counts, which part it puts a time to, and what it writes."""

import datetime
import json
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
import training_step  # noqa: E402  (found through the path above)
from harness import record  # noqa: E402  (found through the path above)
from training_step import Stopwatch, measure  # noqa: E402  (found through the path above)

SLEEP = 0.02


@pytest.fixture
def watch():
    settings = training_step.settings_from(
        "cifar_balanced", dataset="shapes", device="cpu", width=2, batch_size=4, n_majority=4, test_images=10, threads=1
    )
    data = training_step.load(training_step.Source("shapes", ""), settings, training_step.torch.device("cpu"))
    return Stopwatch(training_step.Trainer("deq", settings, data), "deq")


def sleep(*call):
    time.sleep(SLEEP)


def test_the_time_of_a_part_is_put_to_it(watch):
    last, trunk = watch.trainer.network.last, watch.trainer.network.trunk
    quick = watch.step()
    assert set(quick) == set(training_step.PARTS) and all(ms > 0 for ms in quick.values())
    delays = {
        "trunk forward": trunk[0].conv1.register_forward_hook,
        "head and loss": watch.trainer.network.classifier.register_forward_hook,
        "last block backward": last.cell.conv2.register_full_backward_hook,
        "trunk backward": trunk[-1].norm2.register_full_backward_hook,
        "optimiser": watch.trainer.optimizer.register_step_pre_hook,
    }
    for part, register in delays.items():
        handle = register(sleep)
        spent = watch.step()
        handle.remove()
        late = {name for name in spent if spent[name] >= 1e3 * SLEEP}
        assert part in late, (part, spent)
    last.cell.conv2.register_forward_hook(sleep)
    spent = watch.step()
    assert spent["last block f"] >= 1e3 * SLEEP * watch.evaluations[-1]
    assert 1e3 * SLEEP <= spent["f for the gradient"] < spent["last block f"]


def test_flops_of_f_are_those_of_two_convolutions(watch):
    total, of_f, evaluations = watch.flop()
    batch, pixels, channels = 4, 4 * 4, 16
    assert of_f == 2 * (2 * batch * pixels * 9 * channels**2)
    assert total > (evaluations + 3) * of_f  # once more for the gradient, which costs twice as much


def test_the_record_of_a_size():
    record = measure(2, 4, 3, 60, device="cpu", threads=1)
    assert record["steps"] == 3 and record["models"]["explicit"]["evaluations"] is None
    assert record["models"]["explicit"]["parts"]["solver"] == 0 < record["models"]["deq"]["parts"]["solver"]
    assert record["over_flop"] == pytest.approx(record["times_explicit"] / record["flop_ratio"])
    paper = record["paper"]
    # 569 500 images an epoch in the 20 entries; metrics at epochs 1, 5, 10, ... 100; 10 000 test images.
    assert paper["trainings"] == 40 and paper["training_images"] == 56_950_000
    assert paper["evaluated_images"] == 569_500 * 21 + 20 * 100 * 10_000
    rate, seen = 4 / record["models"]["deq"]["ms"] * 1e3, record["metrics"]["images_per_second"]["deq"]
    assert paper["hours"]["deq"] == pytest.approx((56_950_000 / rate + paper["evaluated_images"] / seen) / 3600)


def test_the_script_prints_a_table_and_writes_file_and_figures(tmp_path, monkeypatch, capsys):
    files = ["--json", str(tmp_path / "a.json"), "--figure", str(tmp_path / "a")]
    words = ["--size", "1x2", "2x2", "--device", "cpu", "--threads", "1", "--steps", "3", "--remark", "busy", *files]
    monkeypatch.setattr(sys, "argv", ["training_step.py", *words])
    training_step.main()
    printed = capsys.readouterr().out
    assert "width 1, batch 2, cpu, fp32, jfb, 1 threads, 3 steps" in printed and "DEQ / explicit: " in printed
    written = json.loads((tmp_path / "a.json").read_text())
    assert [run["width"] for run in written["runs"]] == [1, 2] and written["remark"] == "busy"
    assert written["machine"]["torch"] == training_step.torch.__version__
    assert written["command"] == record.command(sys.orig_argv)
    assert datetime.datetime.fromisoformat(written["date"]).tzinfo is not None
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "16"], "16: WIDTHxBATCH"),
        (["--size", "0x4"], "0x4: WIDTHxBATCH"),
        (["--steps", "1"], "--steps 1"),
        (["--threads", "-1"], "--threads -1: at least 0"),
        (["--json", "/no/such/folder/a.json"], "--json: /no/such/folder is not a folder"),
    ],
)
def test_bad_arguments_are_named(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training_step.py", *words])
    with pytest.raises(SystemExit) as stop:
        training_step.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err
