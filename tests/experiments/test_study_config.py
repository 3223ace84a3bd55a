"""Settings and command line: presets, overrides, and invalid arguments."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from nc_study.config import ARMS, Experiment, arm_options, settings_from


@pytest.mark.parametrize(
    ("gpu", "cpu", "auto"),
    [
        (False, {"avx512_bf16": False}, "fp32"),
        (False, {"avx512_bf16": True}, "bf16"),
        (False, {"amx_bf16": True}, "bf16"),
        (True, {}, "bf16"),
    ],
)
def test_preset_and_precision_are_for_the_machine_but_for_the_papers(gpu, cpu, auto, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: cpu)
    assert settings_from("cifar_lt").preset == ("paper" if gpu else "quick")
    assert settings_from("cifar_lt", preset="study").precision == auto
    assert settings_from("cifar_lt", preset="paper").precision == "fp32"
    assert settings_from("cifar_lt", precision="fp32").precision == "fp32"
    assert settings_from("cifar_lt", preset="paper", precision="auto").precision == auto


def test_every_option_that_decides_the_outcome_makes_a_folder_of_its_own():
    plain = settings_from("cifar_lt", device="cpu", dataset="cifar10", precision="fp32", model="explicit")
    assert plain.run_name == "cifar10-k3-r10-quick-explicit-seed0"
    words = {"dataset": "cifar100", "preset": "tuned", "solver": "anderson", "schedule": "constant"}
    words |= {"precision": "bf16", "evaluate": "validation", "tf32": True, "no_augmentation": True}
    words |= {"e_w": 0.5, "e_h": 0.5, "majority": 4, "imbalance": "exp", "loss": "logit-adjusted"}
    words |= {"tol": 0.5, "momentum": 0.5}
    options = [spec.name for spec in fields(Experiment) if spec.metadata]
    free = {"model", "cells", "adjoint", "device", "kernel"}
    changed = {name: words.get(name) or getattr(plain, name) + 1 for name in options if name not in free}
    others = [replace(plain, **{name: value}) for name, value in changed.items()]
    others += [replace(plain, **arm_options(arm)) for arm in ARMS]
    assert [other.arm for other in others[-len(ARMS) :]] == list(ARMS)
    assert len({other.run_name for other in others}) == len(others)
