"""benchmarks/RESULTS.md: every section says what is measured, or that nothing is and which command would."""

from __future__ import annotations

from dataclasses import dataclass

from .files import PEER, File, ReportError, Results, Row
from .models import model_section
from .pictures import image
from .races import residual_section
from .solvers import EAGER, OURS, SECTION
from .sources import commit, day, origin_sentence, ran, sources
from .study import study_section
from .tables import cases_of, comparison, counts, folded, image_by_producer, long_table, provider_text, rows_of
from .verdicts import summary, target_section
from .words import absent, link, listed, plural, table, wrapped

SUITE_COMMAND = "pytest benchmarks --full --record benchmarks/results/suite_cpu_2.json"
SCALING_COMMAND = "python benchmarks/scaling.py --figure benchmarks/results"
GATE_COMMAND = "pytest benchmarks --gate --update-baseline"
GPU_COMMAND = "bash benchmarks/gpu.sh"
MEASURES = {"solver_ms": "time per iteration", "solve_ms": "time of a solve without f", "peak_bytes": "peak memory"}


FLOOR_WORDS = (
    "What an iteration must move, in passes over the state (B, D), f left out: Picard 3; Anderson and Broyden with n "
    "pairs in the history 6 + 2h + 2nh, both vectors of a pair with elements h times as wide as the state's; Broyden "
    "on `cpp` and `torch`, where the history holds a step of every iteration, keeps its n steps alone, a vector each, "
    "and moves 6 + n. The eager Broyden keeps steps alone too; torchdeq's floor is that of pairs. n grows from 0 up to "
    "the window."
)
MEMORY_WORDS = (
    "On the CPU deqfast keeps the memory of a solve's history for the next solve (`deqfast.release_memory()` gives it "
    "back): memory is counted from a state where nothing is kept, and so includes it, but times are those of repeated "
    "solves, which find it again, while torchdeq allocates and zeroes its own at every call."
)


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
        "The whole call, f included: the same f, start and number of iterations for all; deqfast's histories lie in "
        "memory kept from the call before, as said above.",
    ),
    Part(
        "Operations",
        "ops",
        "One call of every op, in place where it works in place; `torch` is the reference in plain tensor operations.",
    ),
    Part(
        "Training steps of a layer",
        "training",
        "Forward and backward of one layer, beside torchdeq's, the same algorithm in plain tensor operations, and the "
        "cell applied once, which solves nothing. Not the solvers alone differ: on `cpp` the normalisations within the "
        "residual cell are fused too, and `FCCell` under Picard is solved in one call, while torchdeq, eager and the "
        "cell once call plain torch modules. A ratio is that of whole layers, not of their solvers.",
    ),
    Part(
        "A fully connected cell in one call",
        "fc",
        "The whole solve of z = tanh(W z + c) by `deqfast.fc_fixed_point`, f included, beside loops that call f.",
    ),
    Part(
        "Neural collapse",
        "nc",
        "NC1 to NC4 (nc) or NC1 alone (nc1) of N features in D dimensions (N × D in the name), beside the D × D "
        "pseudo-inverse. A call that takes longer than all rounds may, as the largest pseudo-inverse does, is made "
        "once: the number of rounds is in the folded table.",
    ),
)


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
        ("A model of many GPUs", model_section(results)),
        ("The regression gate", gate_section(results)),
        ("On a GPU", gpu_section(results)),
    ]
    lines = [
        "# Benchmark results",
        "",
        f"Written by `python benchmarks/report.py` from the JSON in {link('benchmarks/results', 'results')}: no number "
        "is typed by hand. Times are the least of the rounds of a run unless another is named. Where several runs have "
        "measured a case with the same number of threads, the median of the runs is shown, and behind that of a gain "
        "the least and the largest; each run by itself is in the folded tables. An empty cell or a dash is a number "
        "that was not taken. Launches are counted per iteration of a solve, else per call.",
    ]
    for title, body in sections:
        lines += ["", f"## {title}", "", *body]
    return wrapped(lines)


def solver_section(results: Results) -> list[str]:
    """Time per iteration, f subtracted, in all shapes; figures at the headline's."""
    cases = cases_of(results.rows(SECTION))
    if not any(case.get(OURS, "solver_ms") for case in cases):
        return absent("time per iteration of the solvers", SUITE_COMMAND)
    lines = [
        "f subtracted, over the number of evaluations. The byte floor is what the algorithm must move at the copy rate "
        "of the same run; a time below it is one of data that stayed in a cache.",
        "",
        FLOOR_WORDS,
        "",
        MEMORY_WORDS,
        "",
    ]
    for name in ("gain_over_torchdeq.png", "time_and_floor.png", "memory.png"):
        lines += image(results, name)
    providers = [name for name in (OURS, PEER, EAGER) if any(name in case.rows for case in cases)]
    lines += [
        origin_sentence(results, rows_of(cases)),
        "",
        *comparison(cases, "solver_ms", OURS),
        "",
        f"What was counted in each solve ({' / '.join(map(provider_text, providers))}). Launches are torch operations "
        "outside f; host waits are those of a solve if the tensors were a GPU's:",
        "",
    ]
    return [*lines, *counts(cases, providers)]


def rows_section(results: Results, part: Part) -> list[str]:
    """Our time beside the others', and all that is known of each row on a click."""
    rows = list(results.rows(part.section))
    if not rows:
        return absent(part.title.lower(), SUITE_COMMAND)
    cases = cases_of(rows)
    lines = [f"{part.words} {origin_sentence(results, rows_of(cases))}", "", *comparison(cases, "ms_min", OURS), ""]
    return [*lines, *folded(f"All {plural(len(rows), 'row')}", long_table(rows))]


def scaling_section(results: Results) -> list[str]:
    """The figures of scaling.py, and the exponents of their curves."""
    rows = list(results.rows("scaling exponents"))
    if not rows:
        return absent("time and memory by batch, state size, history and iterations", SCALING_COMMAND)
    commands = listed(map(ran, results.files_of(rows)))
    lines = [f"One variable at a time, f subtracted, beside torchdeq: {commands}.", ""]
    lines += image_by_producer(results, "scaling_time.png", "Curves: solver time per iteration by each variable")
    lines += image_by_producer(results, "scaling_memory.png", "Curves: peak memory of a solve by each variable")
    lines += ["Exponents a of y ~ x^a, fitted; two where the slope changes:", ""]
    header = ["against", "case", "provider", "of", "exponent"]
    body = [[row["series"], row["case"], provider_text(row["provider"]), measure_text(row),
             row["text"]] for row in rows]  # fmt: skip
    return [*lines, *folded(f"All {plural(len(rows), 'exponent')}", table(header, body, text=header))]


def measure_text(row: Row) -> str:
    """Of what an exponent is."""
    if row["measure"] not in MEASURES:
        raise ReportError(f"exponent of {row['case']}: measure {row['measure']!r}, known are {', '.join(MEASURES)}")
    return MEASURES[row["measure"]]


def gate_section(results: Results) -> list[str]:
    """What `pytest benchmarks --gate` compares with."""
    if not results.baselines:
        return absent("the baselines of the gate", GATE_COMMAND)
    header = ["baseline", "cases", "depends on", "commit", "date"]
    body = [[link(file.name, f"baselines/{file.name}"), str(len(file.rows)), file.remark or "", commit(file), day(file)]
            for file in results.baselines]  # fmt: skip
    return ["`pytest benchmarks --gate` compares each case with these, and fails where one has become worse.", "",
            *table(header, body, text=header)]  # fmt: skip


def gpu_section(results: Results) -> list[str]:
    """Everything that gpu.sh recorded, a file after the other."""
    if not results.gpus:
        return ["The CUDA and Triton kernels have not been run on a GPU: no GPU time is reported. "
                f"`{GPU_COMMAND}` measures them."]  # fmt: skip
    lines = ["Medians; those in the section `solve` are per iteration, f subtracted.", ""]
    for file in results.gpus:
        lines += [f"### {file.gpu}, {file.name}", "", *stages(file)]
        for section in dict.fromkeys(row["section"] for row in file.rows):
            rows = [row for row in file.rows if row["section"] == section]
            lines += ["", *folded(f"{section}: {plural(len(rows), 'row')}", long_table(rows))]
        lines.append("")
    return lines


def stages(file: File) -> list[str]:
    """How building, tests and sanitizers went."""
    header = ["stage", "outcome", "took", "note"]
    body = [[stage["stage"], stage["outcome"], f"{stage['seconds']} s", stage["note"]] for stage in file.stages]
    return table(header, body, text=header) if body else []
