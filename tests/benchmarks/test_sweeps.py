"""The decision about the constants of Triton's sweeps, from times that a GPU might give."""

from concurrent.futures import ThreadPoolExecutor

import pytest

sweeps = pytest.importorskip("harness.sweeps")
pytest.importorskip("triton")


def rows(name: str, times: dict[str, float]) -> list[dict]:
    return [{"choice": name, "case": case.name, "us": times} for case in sweeps.CHOICES[name].cases]


def test_the_first_value_within_three_per_cent_is_taken_and_slow_kernels_are_named():
    near, far = {"4": 102.9, "8": 100.0, "cuda": 90.0}, {"4": 103.1, "8": 100.0, "cuda": 70.0}
    decision = sweeps.decide([*rows("broyden", near), *rows("transposed", far), *rows("parts", far | near)[:1]])
    assert decision["chosen"] == {"broyden": {"SWEEP_WARPS": 4}, "transposed": {"TRANSPOSED_WARPS": 8}}
    assert decision["slow"] == {case.name: 100 / 70 for case in sweeps.CHOICES["transposed"].cases}


def test_a_setting_reaches_the_plans_and_ends():
    from deqfast.kernels import config

    for choice in sweeps.CHOICES.values():
        before = getattr(config, choice.constant)
        assert before in choice.values
        with sweeps.setting(choice.constant, choice.values[-1]):
            assert getattr(config, choice.constant) == choice.values[-1]
        assert getattr(config, choice.constant) == before


def test_what_does_not_fit_and_what_fails_is_in_the_result(monkeypatch):
    def timed(choice, case):
        if case.name.startswith("anderson"):
            raise RuntimeError("it failed")
        return {"case": case.name, "us": dict.fromkeys([*map(str, choice.values), "cuda"], 1.0)}

    monkeypatch.setattr(sweeps, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    monkeypatch.setattr(sweeps, "compile_kernels", lambda name, i: None)
    monkeypatch.setattr(sweeps, "timed", timed)
    result, names = sweeps.run(60.0), [case.name for choice in sweeps.CHOICES.values() for case in choice.cases]
    assert [row["case"] for row in result["rows"]] == names and result["left_out"] == [] and result["slow"] == {}
    assert set(sweeps.CHOICES) - set(result["chosen"]) == {"anderson", "anderson-bf16", "shared"}
    assert {row["fault"] for row in result["rows"] if "fault" in row} == {"RuntimeError: it failed"}
    assert sweeps.run(-1.0) == {"rows": [], "chosen": {}, "slow": {}, "left_out": names}
