"""The texts on the studies say what the committed records do."""

from __future__ import annotations

import json
import re

import pytest
from nc_study import paper
from nc_study.reporting.runs import collect
from nc_study.reporting.tables import broken_rows
from study_helpers import EXPERIMENTS

ROOT = EXPERIMENTS.parent


def words(*path):
    """Text of a page, without its line ends."""
    return " ".join(ROOT.joinpath(*path).read_text().split())


@pytest.fixture(scope="module")
def results():
    paths = (EXPERIMENTS / "results" / "protocol").glob("**/result.json")
    return [json.loads(path.read_text()) for path in paths]


def test_readme_and_page_name_the_settings_that_have_runs_of_a_deq(results):
    networks = [one["settings"] for one in results if one["arm"].startswith("deq")]
    settings = {(one["dataset"], one["majority"], one["ratio"]) for one in networks}
    assert settings == {("cifar10", 3, 10), ("cifar10", 3, 100), ("cifar10", 5, 100), ("cifar10", 7, 100)}
    assert {(one["width"], one["epochs"]) for one in networks} == {(16, 30)}
    assert len(paper.TABLES) == 4 and 2 * sum(map(len, paper.TABLES.values())) == 20
    for page in (("README.md",), ("docs", "pages", "study.md")):
        text = words(*page)
        assert re.search("repeats 4 of the 20 settings|4 have runs of a DEQ", text)
        assert "Table 1, R = 50 and CIFAR-100 have none" in text
        assert "with (3,7) at R = 10 and 100, and (5,5) and (7,3) at R = 100" in text


def test_residuals_of_jfb_are_printed_next_to_the_share_that_converged(results):
    jfb = [one for one in results if one["arm"] == "deq-jfb"]

    def last(name, decay, *majorities):
        runs = (one for one in jfb if one["settings"]["weight_decay"] == decay)
        return sorted(r["network"]["curves"][name][-1] for r in runs if r["settings"]["majority"] in majorities)

    residuals, shares = (last(name, 2e-3, 3, 5, 7) for name in ("residual", "converged"))
    said = (
        f"mean relative residuals of {1e3 * residuals[0]:.1f}e-3 to {1e3 * residuals[-1]:.1f}e-3, by the run. "
        f"The tolerance is 1e-3. {100 * shares[0]:.0f} to {100 * shares[-1]:.0f} % of the samples reach it"
    )
    three, five = (last("converged", 5e-4, majority) for majority in (3, 5))
    again = (
        f"{100 * three[0]:.0f} to {100 * three[-1]:.0f} % reach it at (3,7) R = 100, "
        f"and {100 * five[0]:.0f} to {100 * five[-1]:.0f} % at (5,5) R = 100"
    )
    assert said in words("docs", "pages", "study.md") and again in words("docs", "pages", "study.md")


def test_the_page_says_in_which_runs_the_loss_rose():
    groups = collect([EXPERIMENTS / "results" / "protocol"]).groups
    rose = [{(row["setting"], row["arm"], row["seed"]) for row in broken_rows(group)} for group in groups]
    terminal = next(index for index, group in enumerate(groups) if group.experiment.no_augmentation)
    assert groups[0].recipe_b and groups[1].first_recipe and not rose[0]
    assert rose[1] == {(f"{classes} R = 100", "DEQ, implicit", 1) for classes in ("(3,7)", "(7,3)")}
    assert rose[terminal] == {("(3,7) R = 10", "DEQ, implicit", seed) for seed in range(3)}
    text = words("docs", "pages", "study.md")
    assert "Two runs of the first recipe, both of `deq-implicit`, broke down in training" in text
    assert "rose by more than half in an epoch in all three runs. No run of recipe B did so." in text


def sudoku_table(name):
    """A table of Sudoku: a row of texts by column for each arm."""
    lines = (EXPERIMENTS / "results" / "models" / name).read_text().splitlines()
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_the_texts_say_what_fresh_puzzles_gave():
    table = sudoku_table("sudoku-9x9-fresh.md")
    assert {arm: row["seeds"] for arm, row in table.items()} == {"explicit-parameters": "1", "deq": "1"}
    names = ("boards as trained, %", "boards, any start, %", "least residual of 4, %", "evaluations a solve")
    unrolled, deq = ([float(table[arm][name]) for name in names] for arm in ("explicit-parameters", "deq"))
    short = (
        f"{unrolled[0]:.0f}, {unrolled[1]:.0f} and {unrolled[2]:.0f} %, and {deq[1]:.0f} and {deq[2]:.0f} % (one seed)"
    )
    assert f"On 150 fresh puzzles the two solve {short}" in words("README.md")
    page = words("docs", "pages", "models.md")
    long = (
        f"solves {unrolled[0]:.1f} % with its ten steps, {unrolled[1]:.1f} % from one start and {unrolled[2]:.1f} % by"
    )
    assert f"{long} the residual's choice, in {unrolled[3]:.0f} evaluations a start" in page
    long = f"`deq` solves {deq[1]:.1f} % from one start and {deq[2]:.1f} % by the residual's choice"
    assert f"{long}, and no start converges in {deq[3]:.0f} evaluations" in page


def test_readme_tells_the_sudoku_table():
    table = sudoku_table("sudoku-9x9.md")
    unrolled, deq = (
        {key: float(value.split()[0]) for key, value in table[arm].items() if value[0].isdigit()}
        for arm in ("explicit-parameters", "deq")
    )
    text = words("README.md")
    trained, start, chosen = "boards as trained, %", "boards, any start, %", "least residual of 4, %"
    assert f"solves {unrolled[trained]:.0f} % of 150 real puzzles with those ten steps" in text
    least = f"it solves {unrolled[start]:.0f} % from one random start, and {unrolled[chosen]:.0f} % if the residual "
    assert f"{least}chooses among four starts of {unrolled['evaluations a solve']:.0f} evaluations each" in text
    picture = f"The block of the picture solves {deq[start]:.0f} % and {deq[chosen]:.0f} %, in "
    assert f"{picture}{deq['evaluations a solve']:.0f} of at most 64: many do not converge" in text
    minutes = re.match(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", table["deq"]["minutes a run"])
    said = re.search(r"trained for ([\d.]+) minutes \(([\d.]+) to ([\d.]+)\)", text)
    assert [float(one) for one in said.groups()] == pytest.approx([float(one) for one in minutes.groups()], abs=0.0501)
