"""Texts on the studies agree with the committed records."""

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
        assert re.search("repeats 3 of the 20 settings|3 have a verdict", text)
        assert "Table 1, R = 50 and CIFAR-100" in text
        assert "with (3,7) at R = 10 and 100, and (5,5) at R = 100" in text


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
    losses = {row["loss"] for row in broken_rows(groups[terminal])}
    assert {one for one in losses if float(one.split()[-1]) > 0.138} == {"0.0184 to 0.627"}
    assert "it the loss did so in all three runs: once from 0.018 to 0.627, otherwise to at most 0.138." in text


def model_table(name):
    """A table of an example model: a row of texts by column for each arm."""
    lines = (EXPERIMENTS / "results" / "models" / name).read_text().splitlines()
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_the_texts_say_what_fresh_puzzles_gave():
    table = model_table("sudoku-9x9-fresh.md")
    assert {arm: row["seeds"] for arm, row in table.items()} == {"explicit-parameters": "3", "deq": "3"}
    names = ("boards as trained, %", "boards, any start, %", "least residual of 4, %", "evaluations a solve")
    unrolled, deq = ([float(table[arm][name].split()[0]) for name in names] for arm in ("explicit-parameters", "deq"))
    readme = words("README.md")
    assert f"trained by ten unrolled steps solves {unrolled[0]:.0f} % with these steps" in readme
    start = f"it solves {unrolled[1]:.0f} % from one random start, and {unrolled[2]:.0f} % if the residual chooses"
    assert f"{start} among four starts of {unrolled[3]:.0f} evaluations each" in readme
    both = f"Trained as a DEQ it solves {deq[1]:.0f} % and {deq[2]:.0f} %, in {deq[3]:.0f} of at most 64 evaluations"
    assert both in readme
    page = words("docs", "pages", "sudoku.md")
    long = (
        f"solves {unrolled[0]:.1f} % with its ten steps, {unrolled[1]:.1f} % from one start and {unrolled[2]:.1f} % by"
    )
    assert f"{long} the residual's choice, in {unrolled[3]:.0f} evaluations a start" in page
    least, most = re.search(r"\(([\d.]+) to ([\d.]+)\)", table["deq"][names[2]]).groups()
    chosen = f"{deq[2]:.1f} % ({float(least):.1f} to {float(most):.1f})"
    long = f"`deq` solves {deq[1]:.1f} % from one start and {chosen} by the residual's choice"
    assert f"{long}, in {deq[3]:.0f} of at most 64 evaluations" in page


FEATURES = "its features' distance to a simplex (centred NC2; less is nearer)"


def rows_of_when():
    """The cells of each row of the table on the page, by the first two cells."""
    text = (EXPERIMENTS.parent / "docs" / "pages" / "when.md").read_text()
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    plain = [[re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).strip() for cell in row] for row in rows]
    named = []
    for task, other, *cells in plain:
        task = named[-1][0][0] if task == "the same" else task
        named.append(((task, other), cells))
    return dict(named)


def test_when_to_use_a_deq_retells_the_verdicts():
    report = (EXPERIMENTS / "results" / "report" / "report.md").read_text()
    verdicts = {
        "A1": ("long-tailed CIFAR-10", "explicit network, same recipe"),
        "A4": ("long-tailed CIFAR-10", "the cell evaluated once"),
        "A5": ("long-tailed CIFAR-10", "the explicit block with the DEQ's normalisation"),
        "N1": (FEATURES, "explicit network"),
        "N4": (FEATURES, "the explicit block with the DEQ's normalisation"),
        "N3": (FEATURES, "the cell evaluated once"),
    }
    rows = rows_of_when()
    for claim, place in verdicts.items():
        line = re.search(rf"^\| {claim}: .*$", report, re.MULTILINE)[0]
        _, verdict, difference, *_ = line.strip("|").split(" | ")
        gain, _, sure = rows[place]
        assert gain.removesuffix(" points") == difference.strip() and sure.endswith(f": {verdict.strip()}")


def test_when_to_use_a_deq_retells_the_example_models():
    rows = rows_of_when()

    def mean(name, arm, column):
        return float(model_table(name)[arm][column].split()[0])

    def least(name, arm, column="minutes a run"):
        return float(re.search(r"\(([\d.]+) to", model_table(name)[arm][column])[1])

    def difference(column, name, own="deq", other="explicit-parameters", theirs=None, digits=1):
        found = mean(name, own, column) - mean(name, other, theirs or column)
        return f"{found:+.{digits}f}" if round(found, digits) else "0.0"

    compute, accuracy = {"other": "explicit-compute"}, "accuracy"
    far, trained, start = "of 100 nodes", "boards as trained, %", "boards, any start, %"
    chosen, block = "least residual of 4, %", {"own": "explicit-parameters", "theirs": trained}
    gains = {
        ("deblurring", "five unrolled steps"): [difference("PSNR", "restoration.md", **compute, digits=2) + " dB"],
        ("inpainting", "five unrolled steps"): [difference("PSNR", "restoration-inpaint.md", **compute, digits=2)],
        ("a class 100 nodes away", "two graph convolutions"): [difference(far, "graphs-chains.md")],
        ("a class 100 nodes away", "101 unrolled steps"): [difference(far, "graphs-chains.md", **compute)],
        ("Cora and Citeseer", "two graph convolutions"): [
            difference(accuracy, f"graphs-{name}.md") for name in ("cora", "citeseer")
        ],
        ("Cornell, Texas, Wisconsin", "two graph convolutions"): [
            difference(accuracy, f"graphs-{name}.md") for name in ("cornell", "texas", "wisconsin")
        ],
        ("Sudoku, 9 × 9: a trained block, solved", "the same block's ten steps"): [
            difference(column, "sudoku-9x9-fresh.md", **block) for column in (start, chosen)
        ],
        ("Sudoku, 9 × 9: trained as a DEQ", "trained unrolled; both solved, four starts"): [
            difference(chosen, "sudoku-9x9-fresh.md")
        ],
        ("Sudoku, 6 × 6: trained as a DEQ", "trained unrolled; both solved"): [difference(start, "sudoku-6x6.md")],
        ("text: loss per character; less is better", "four separate blocks"): [
            difference("loss, validation", "text.md", digits=3)
        ],
        ("CIFAR-10, 4 epochs", "a ResNet"): [difference(accuracy, "images.md")],
        ("CIFAR-10, 4 epochs", "the cell, six times"): [difference(accuracy, "images.md", **compute)],
        ("a cell that always converges", "the same layer without recurrence"): [
            difference(accuracy, "cells.md", "subhomogeneous", "explicit"),
            difference(accuracy, "cells.md", "subhomogeneous-connected", "explicit-connected"),
        ],
    }
    for place, numbers in gains.items():
        said = re.findall(r"[+-][\d.]+|\b0\.0\b", rows[place][0])
        assert said == [number.removesuffix(" dB") for number in numbers], place
    seconds = "s an image"
    costs = {
        ("deblurring", "five unrolled steps"): mean("restoration.md", "deq", seconds)
        / mean("restoration.md", "explicit-compute", seconds),
        ("inpainting", "five unrolled steps"): mean("restoration-inpaint.md", "deq", seconds)
        / mean("restoration-inpaint.md", "explicit-compute", seconds),
        ("text: loss per character; less is better", "four separate blocks"): least("text.md", "deq")
        / least("text.md", "explicit-parameters"),
        ("CIFAR-10, 4 epochs", "a ResNet"): least("images.md", "deq") / least("images.md", "explicit-parameters"),
        ("CIFAR-10, 4 epochs", "the cell, six times"): least("images.md", "deq")
        / least("images.md", "explicit-compute"),
        ("a class 100 nodes away", "101 unrolled steps"): least("graphs-chains.md", "deq")
        / least("graphs-chains.md", "explicit-compute"),
    }
    for place, ratio in costs.items():
        assert rows[place][1].startswith(f"{ratio:.1f} times"), (place, ratio)
