"""benchmarks/RESULTS.md: every section says what is measured, or that nothing is and which command would."""

from __future__ import annotations

from dataclasses import dataclass

from .files import File, Results
from .pictures import image, image_by_producer
from .solvers import EAGER, OURS, PEER, SECTION
from .sources import sources
from .study import COMMAND as STUDY_COMMAND
from .study import share_table, step_table
from .tables import cases_of, comparison, counts, folded, long_table, provider_text
from .verdicts import summary, target_section
from .words import link, listed, plural, table, wrapped

SUITE_COMMAND = "pytest benchmarks --record benchmarks/results/suite_cpu_2.json"
RESIDUAL_COMMAND = "python benchmarks/time_to_residual.py"
SCALING_COMMAND = "python benchmarks/scaling.py --figure benchmarks/results"
MODEL_COMMAND = "python benchmarks/internet_scale.py"
GATE_COMMAND = "pytest benchmarks --update-baseline"
GPU_COMMAND = "bash benchmarks/gpu.sh"
NO_GPU = f"The CUDA and Triton kernels have not been run on a GPU: no GPU time is reported. `{GPU_COMMAND}` measures them."


@dataclass(frozen=True)
class Part:
    """A section made from the rows of one `section` of the record; `words` say what was timed."""

    title: str
    section: str
    words: str


PARTS = (
    Part(
        "Whole solves",
        SECTION,
        "The whole call, f included: the same f, start and number of iterations for all. Times without f "
        "are above.",
    ),
    Part("Operations", "ops", "One call of every op, in place where it works in place; `torch` is the reference."),
    Part(
        "Training steps of a layer",
        "training",
        "Forward and backward of one layer, beside torchdeq's, the same algorithm in plain tensor operations, and the "
        "cell applied once, which solves nothing.",
    ),
    Part(
        "A fully connected cell in one launch",
        "fc",
        "The whole solve of z = tanh(W z + c) by `deqfast.fc_fixed_point`, f included, beside loops that call f.",
    ),
    Part("Neural collapse", "nc", "NC1 to NC4 of N features in D dimensions, beside the D × D pseudo-inverse."),
)


def absent(what: str, command: str) -> list[str]:
    return [f"Not measured yet: {what}. `{command}` measures it."]


def page(results: Results) -> str:
    """The whole page."""
    sections: list[tuple[str, list[str]]] = [
        ("In short", summary(results)),
        ("What was measured, and where", sources(results)),
        ("Targets", target_section(results)),
        ("Solver time per iteration", solver_section(results)),
        *((part.title, rows_section(results, part)) for part in PARTS),
        ("A training step of the study", study_section(results)),
        ("Time to a residual", residual_section(results)),
        ("How cost grows", scaling_section(results)),
        ("Larger than this machine: a model", model_section(results)),
        ("The regression gate", gate_section(results)),
        ("On a GPU", gpu_section(results)),
    ]
    lines = ["# Benchmark results", "", f"Written by `python benchmarks/report.py` from the JSON in "
             f"{link('benchmarks/results', 'results')}: no number is typed by hand. Times are medians of the rounds of a "
             "run unless another is named; a dash or an empty cell is a number that was not taken."]  # fmt: skip
    for title, body in sections:
        lines += ["", f"## {title}", "", *body]
    return wrapped(lines)


def solver_section(results: Results) -> list[str]:
    """Time per iteration, f subtracted, in all shapes; figures at the headline's."""
    cases = cases_of(row for _, row in results.rows(SECTION))
    if not any(case.get(OURS, "solver_ms") for case in cases):
        return absent("time per iteration of the solvers", SUITE_COMMAND)
    lines = ["Least of the rounds with f subtracted, over the number of evaluations. The byte floor is what the algorithm "
             "must move at the copy rate of the same run; a time below it is one of data that stayed in a cache."]  # fmt: skip
    lines += ["", *comparison(cases, "solver_ms", OURS), ""]
    for name in ("gain_over_torchdeq.png", "time_and_floor.png", "memory.png"):
        lines += image(results, name)
    providers = [name for name in (OURS, PEER, EAGER) if any(name in case.rows for case in cases)]
    lines += [f"What was counted in each solve ({' / '.join(map(provider_text, providers))}; launches: torch operations "
              "outside f per iteration, host waits: per solve):", ""]  # fmt: skip
    return [*lines, *counts(cases, providers)]


def rows_section(results: Results, part: Part) -> list[str]:
    """Our time beside the others', and all that is known of each row on a click."""
    rows = [row for _, row in results.rows(part.section)]
    if not rows:
        return absent(part.title.lower(), SUITE_COMMAND)
    lines = [part.words, "", *comparison(cases_of(rows), "ms", OURS), ""]
    return [*lines, *folded(f"All {plural(len(rows), 'row')}", long_table(rows))]


def study_section(results: Results) -> list[str]:
    if not results.runs():
        return absent("the training step of the study's networks", STUDY_COMMAND)
    lines = [f"Both networks in turns; `{STUDY_COMMAND}`. Operations are "
             "counted, with the mean number of evaluations of the steps timed.", "", *step_table(results), ""]  # fmt: skip
    for file in dict.fromkeys(file.path for file, _ in results.runs()):
        lines += image_by_producer(results, f"{file.stem}.png", "Stacked bars: where a training step's time goes")
    trainings = results.runs()[0][1]["paper"]["trainings"]
    lines += [f"Neural collapse, given the features of an epoch, and the paper's {trainings} trainings of 100 epochs, extrapolated "
              "from these steps:", ""]  # fmt: skip
    return [*lines, *share_table(results)]


def residual_section(results: Results) -> list[str]:
    rows = [row for _, row in results.rows("residual")]
    if not rows:
        return absent("the time that each solver takes to a residual", RESIDUAL_COMMAND)
    return long_table(rows)


def scaling_section(results: Results) -> list[str]:
    """The figures of scaling.py, and the exponents of their curves."""
    rows = [row for _, row in results.rows("scaling exponents")]
    if not rows:
        return absent("time and memory by batch, state size, history and iterations", SCALING_COMMAND)
    lines = [f"One variable at a time, f subtracted, beside torchdeq: `{SCALING_COMMAND}`.", ""]
    lines += image_by_producer(results, "scaling_time.png", "Curves: solver time per iteration by each variable")
    lines += image_by_producer(results, "scaling_memory.png", "Curves: peak memory of a solve by each variable")
    lines += ["Exponents a of y ~ x^a, fitted; two where the slope changes:", ""]
    measures = {"solver_ms": "time per iteration", "peak_bytes": "peak memory"}
    body = [[row["series"], row["case"], provider_text(row["provider"]), measures.get(row["measure"], row["measure"]),
             row["text"]] for row in rows]  # fmt: skip
    header = ["against", "case", "provider", "of", "exponent"]
    exponents = table(header, body, text=header)
    return [*lines, *folded(f"{plural(len(rows), 'exponent')}", exponents)]


def model_section(results: Results) -> list[str]:
    rows = [row for _, row in results.rows("internet scale")]
    if not rows:
        return absent("a model of more GPUs and larger states", MODEL_COMMAND)
    return long_table(rows)


def gate_section(results: Results) -> list[str]:
    if not results.baselines:
        return absent("the baselines that `pytest benchmarks --gate` compares with", GATE_COMMAND)
    return [f"`pytest benchmarks --gate` compares with {listed(f'`{name}`' for name in results.baselines)}."]


def gpu_section(results: Results) -> list[str]:
    """Everything that gpu.sh recorded, a file after the other."""
    if not results.gpus:
        return [NO_GPU]
    lines: list[str] = []
    for file in results.gpus:
        lines += [f"### {file.gpu}", "", *stages(file)]
        for section in dict.fromkeys(row["section"] for row in file.rows):
            rows = [row for row in file.rows if row["section"] == section]
            lines += ["", *folded(f"{section}: {plural(len(rows), 'row')}", long_table(rows))]
        lines.append("")
    return lines


def stages(file: File) -> list[str]:
    """How building, tests and sanitizers went."""
    body = [[stage["stage"], stage["outcome"], f"{stage['seconds']} s", stage["note"]] for stage in file.stages]
    header = ["stage", "outcome", "took", "note"]
    return table(header, body, text=header) if body else []
