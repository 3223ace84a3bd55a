"""Settings and command line: presets, overrides, and arguments that make no sense."""

from __future__ import annotations

import pytest
from nc_study.config import SettingsError, parse, settings_from


def test_quick_is_the_preset_without_a_gpu_and_paper_with_one(monkeypatch):
    for gpu, preset, precision in ((False, "quick", "fp32"), (True, "paper", "bf16")):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        settings = settings_from("cifar_lt")
        assert (settings.preset, settings.precision) == (preset, "fp32")
        assert settings_from("cifar_lt", precision="auto").precision == precision
        assert settings_from("cifar_lt", preset="tuned").precision == precision
        assert settings_from("cifar_lt", precision="fp32").precision == "fp32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--majority", "10"], "--majority 10: 1 to 9 tenths of the classes"),
        (["--ratio", "50", "--n-majority", "49"], "--ratio 50 leaves minority classes empty at --n-majority 49"),
        (["--lr", "0"], "--lr 0.0: more than 0"),
        (["--lr", "nan"], "--lr nan: a finite number"),
        (["--test-images", "9"], "--test-images 9: at least one of each of 10 classes"),
    ],
)
def test_a_bad_argument_ends_with_status_2_and_its_name(arguments, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        parse("cifar_lt", None, [*arguments, "--out", str(tmp_path / "runs")])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_settings_that_a_machine_or_a_study_cannot_have(monkeypatch):
    assert settings_from("cifar_balanced", device="cpu").setting.ratio is None
    with pytest.raises(SystemExit):
        parse("cifar_balanced", None, ["--ratio", "10"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SettingsError, match="--device cuda"):
        settings_from("cifar_lt", device="cuda")
