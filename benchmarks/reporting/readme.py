"""README's performance section: the headline solves, and a sentence for everything else that was measured."""

from __future__ import annotations

from collections import Counter

from .files import GAIN, PEER, Results
from .page import GPU_COMMAND, PARTS, SUITE_COMMAND
from .pictures import image
from .races import default_sentence, kernel_text, residual_sentence
from .solvers import EAGER, GAIN_OVER_PEER, OURS, Headline, headlines, solver_text
from .sources import PAGE, machine, number_of_runs, origin_of
from .study import COMMAND as STUDY_COMMAND
from .study import step_sentence
from .tables import Case, cases_of, cell, gain_cell, rows_of
from .verdicts import summary
from .words import absent, duration, error, gain, link, listed, scientific, span, table, typical, whole, wrapped

PINV = "pinv"
PLAIN = "torch"
POSSESSIVE = {PEER: "torchdeq's", PINV: "the D × D pseudo-inverse's"}
CAPTION = (
    "The gain is the median of the runs' own gains, least and largest in brackets. Solves are repeated: deqfast finds "
    "the memory of its history again, which torchdeq allocates and zeroes at every call. torchdeq's history is fp32, "
    "in the row of the bf16 history too. The byte floor is what deqfast's algorithm must move at the copy rate of the "
    "same run; eager is the same algorithm in plain tensor operations."
)
# Why the eager version of a solver is faster, where that is known.
EAGER_REASONS = {"picard": ", as it keeps the best iterate by reference and deqfast copies it"}


def performance(results: Results) -> str:
    """What stands between the two markers."""
    sentences = (residual_sentence, default_sentence, kernel_sentence, fc_sentence, nc_sentence, study_sentence)
    texts = [sentence(results) for sentence in sentences]
    lines = ["", *headline_block(results), *[f"- {text}" for text in texts], "", *summary(results, PAGE), "",
             f"Everything that was measured, on which machine and by which command: {link(PAGE, PAGE)}, like this "
             "section written by `python benchmarks/report.py` from the recorded JSON.", "",
             *gpu_paragraph(results)]  # fmt: skip
    return wrapped(lines) + "\n"


def headline_block(results: Results) -> list[str]:
    found = headlines(results)
    if not found:
        return [*absent("the solvers' time per iteration beside torchdeq", SUITE_COMMAND), ""]
    first, rows = found[0], rows_of(found[0].cases)
    files = results.files_of(rows)
    iterations = listed(sorted({str(case.get(OURS, "iterations")) for case in first.cases}))
    machines = listed(dict.fromkeys(map(machine, files)))
    runs = number_of_runs(rows)
    lines = [
        f"Solver time per iteration at {first.title()}, f subtracted, {iterations} iterations, least of the rounds, "
        f"{'' if runs == '1 run' else 'median of '}{runs}, on {machines} ({origin_of(files)}):",
        "",
        *headline_table(first),
        "",
        f"{CAPTION}{eager_text(first)}",
        "",
    ]
    return [*lines, *image(results, "gain_over_torchdeq.png", "benchmarks/results")]


def headline_table(headline: Headline) -> list[str]:
    header = ["", f"deqfast `{OURS}`", "byte floor", "torchdeq", "eager", "torchdeq / deqfast",
              "final residual, deqfast / torchdeq"]  # fmt: skip
    return table(header, [headline_cells(case) for case in headline.cases])


def headline_cells(case: Case) -> list[str]:
    own, peer, eager = (case.rows.get(name) for name in (OURS, PEER, EAGER))
    residuals = [cell(row, "residual", scientific) or "–" for row in (own, peer)]
    return [
        solver_text(case.name), cell(own, "solver_ms", duration), cell(own, "floor_iteration_ms", duration),
        cell(peer, "solver_ms", duration), cell(eager, "solver_ms", duration), gain_cell(own, GAIN_OVER_PEER),
        " / ".join(residuals),
    ]  # fmt: skip


def eager_text(headline: Headline) -> str:
    """Where plain tensor operations are faster than ours, and why."""
    parts = []
    for case in headline.cases:
        over = case.get(OURS, GAIN + EAGER)
        if over and typical(over) < 1:
            reason = EAGER_REASONS.get(case.name.split("-")[0], "")
            parts.append(f"{solver_text(case.name)}, gain {gain(over)}{reason}")
    return f" Eager is faster than deqfast for {'; '.join(parts)}." if parts else ""


def compared(results: Results, section: str, prefix: str, peer: str) -> list[Case]:
    """Cases on CPUs of ours and of a peer, by the start of their names; those of the most threads first."""
    rows = [row for row in results.rows(section) if row["case"].startswith(prefix)]
    cases = [case for case in cases_of(rows) if case.get(OURS, GAIN + peer)]
    return sorted(cases, key=lambda case: -case.threads)


def against(case: Case, peer: str) -> str:
    """ "1.20 ms (least of 7) against torchdeq's 4.80 ms (least of 7): 4.00×"."""
    ours, theirs = (f"{cell(case.rows[name], 'ms_min', duration)}{calls(case.rows[name])}" for name in (OURS, peer))
    return f"{ours} against {POSSESSIVE[peer]} {theirs}, {gain_cell(case.rows[OURS], GAIN + peer)}"


def calls(row: dict) -> str:
    """Of how many rounds the time is the least."""
    rounds = row.get("rounds")
    if rounds is None:
        return ""
    return " (one call)" if typical(rounds) == 1 else f" (least of {span(rounds, whole)})"


def source(results: Results, case: Case) -> str:
    return f"({origin_of(results.files_of(rows_of([case])))})"


def fc_sentence(results: Results) -> str:
    for case in compared(results, "fc", "fc-solve-128x256-", PEER):
        row = case.rows[OURS]
        return (
            f"A fully connected cell, D = {row['dim']}, {row['batch']} samples, {row['iterations']} iterations, in one "
            f"call with f inside (`deqfast.fc_fixed_point`): {against(case, PEER)} {source(results, case)}."
        )
    return absent("the fully connected cell in one call", SUITE_COMMAND)[0]


def kernel_sentence(results: Results) -> str:
    """In how many cases the kernel that "auto" takes on a CPU is faster than plain torch."""
    cases = cases_of(results.rows(*(part.section for part in PARTS)))
    cases = [case for case in cases if case.get(OURS, "ms_min") and case.get(PLAIN, "ms_min")]
    cases = [case for case in cases if case.threads == max(case.threads for case in cases)]
    if not cases:
        return absent('what `kernel="auto"` should take on a CPU', SUITE_COMMAND)[0]
    faster = sum(typical(case.rows[OURS]["ms_min"]) < typical(case.rows[PLAIN]["ms_min"]) for case in cases)
    counts = Counter(case.rows[OURS]["section"] for case in cases)
    sections = listed(f"{counts[part.section]} {part.section}" for part in PARTS if counts[part.section])
    return (
        f'`kernel="auto"` takes `{OURS}` on a CPU: whole calls are faster than with `{PLAIN}` in {faster} of the '
        f"suite's {len(cases)} cases ({sections}){kernel_text(results)}."
    )


def nc_sentence(results: Results) -> str:
    """Of the largest state, NC1 by itself and all four."""
    texts, before = [], None
    for prefix, what in (("nc1-", "NC1"), ("nc-", "NC1 to NC4")):
        found = sorted(compared(results, "nc", prefix, PINV), key=lambda case: -case.rows[OURS]["dim"])
        for case in found[:1]:
            row = case.rows[OURS]
            size = f"{row['batch']} features, D = {row['dim']}, K = {row['classes']}, {row['dtype']}"
            texts.append(
                f"{what} of {'the same' if size == before else size}: {against(case, PINV)}, relative error of NC1 "
                f"{cell(row, 'error', error)} {source(results, case)}."
            )
            before = size
    return " ".join(texts) or absent("neural collapse beside the pseudo-inverse", SUITE_COMMAND)[0]


def study_sentence(results: Results) -> str:
    texts = [
        f"{step_sentence(file)} ({origin_of([file])})." for file in results.files if file.runs and file.gpu is None
    ]
    return " ".join(texts) or absent("the training step of the study's networks", STUDY_COMMAND)[0]


def gpu_paragraph(results: Results) -> list[str]:
    """What gpu.sh does, and whether it has been run on a GPU."""
    ran = listed(str(file.gpu) for file in results.gpus) if results.gpus else None
    state = f"It has been run on {ran}" if ran else "No GPU time is reported: it has been run dry on CPUs so far"
    return [
        "On a machine with a GPU (torch, triton, nvcc; no network needed) one command, limited to ten minutes, builds, "
        "tests, runs every CUDA op under compute-sanitizer, and measures all of this against byte floors and "
        f"torchdeq; `--help` says more. {state}:",
        "",
        "```bash",
        GPU_COMMAND,
        "```",
    ]
