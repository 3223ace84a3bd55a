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
    limited = sweeps.decide(rows("broyden", {"4": 151.0, "8": 160.0, "cuda": 150.0}))["slow"]
    assert limited == {"broyden-n18-step-128x8192": 151 / 150}


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


def test_predictions_are_those_of_the_model():
    from harness.phases import conclusions

    at_256, product, double = (
        sweeps.step_case("good", *sweeps.FC, 20),
        sweeps.transposed_case(*sweeps.ONE),
        sweeps.CHOICES["float64"].cases[0],
    )
    assert sweeps.predicted(at_256) == pytest.approx((37.5 - 22.3, 37.5))
    # 64 programs of two rounds, twice; 43 passes over 1,024 columns
    most = 16.1 + 2 * 0.5 + (1024 - 256) * 4 * 43 / 22.7e3
    assert sweeps.predicted(product) == pytest.approx((most - 13, most))
    # 8 programs per sample take two waves of 4 rounds; a bfloat16 history of 6 pairs makes 13 passes
    most = 10.8 + 7 * (1.0 + 0.1 + 0.4) + (2 * 8192 - 256) * 4 * 13 / 22.7e3
    assert sweeps.predicted(sweeps.step_case("and2", *sweeps.MDEQ, 6, sweeps.BF16))[1] == pytest.approx(most)
    assert sweeps.predicted(double) is None
    row = {"section": "sweeps", "case": "c", "provider": "broyden", "us": {"4": 20.2, "cuda": 18.0}}
    assert list(conclusions([row | {"predicted": (15.2, 37.5)}])) == ["c: 4 20, cuda 18 us, predicted 15 to 38"]
    assert list(conclusions([row | {"predicted": None}])) == []
