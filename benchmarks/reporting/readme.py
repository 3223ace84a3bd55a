"""README's performance section: the headline solves, and a sentence for everything else that was measured."""

from __future__ import annotations

from collections.abc import Iterator

from .files import GAIN, PEER, File, Results
from .page import GPU_COMMAND, SUITE_COMMAND
from .pictures import image
from .races import default_sentence, residual_sentence
from .solvers import EAGER, GAIN_OVER_PEER, OURS, Headline, headlines, solver_text
from .sources import commit, machine, origin_of, ran
from .study import COMMAND as STUDY_COMMAND
from .study import step_sentence
from .tables import Case, cases_of, cell
from .verdicts import summary
from .words import absent, duration, link, listed, scientific, table, times, wrapped

PAGE = "benchmarks/RESULTS.md"
PINV = "pinv"
PLAIN = "torch"
POSSESSIVE = {PEER: "torchdeq's", PINV: "the D × D pseudo-inverse's"}


def performance(results: Results) -> str:
    """What stands between the two markers."""
    sentences = (residual_sentence, default_sentence, kernel_sentence, fc_sentence, nc_sentence, study_sentence)
    texts = [sentence(results) for sentence in sentences]
    lines = ["", *headline_block(results), *[f"- {text}" for text in texts], "", *summary(results, PAGE), "",
             f"Everything that was measured, and where: {link(PAGE, PAGE)}, like this section written by "
             "`python benchmarks/report.py` from the recorded JSON.", "", *gpu_paragraph(results)]  # fmt: skip
    return wrapped(lines) + "\n"


def origin(results: Results, file: File) -> str:
    """Where a number comes from, if not from the run of the headline."""
    if any(found.file is file for found in headlines(results)[:1]):
        return "the same run"
    return origin_of(file)


def headline_block(results: Results) -> list[str]:
    found = headlines(results)
    if not found:
        return [*absent("the solvers' time per iteration beside torchdeq", SUITE_COMMAND), ""]
    first = found[0]
    iterations = listed(sorted({str(case.get(OURS, "iterations")) for case in first.cases}))
    lines = [
        f"Solver time per iteration at {first.shape()}, f subtracted, {iterations} iterations, least of the rounds; "
        "solves are repeated, so that deqfast finds the memory of its history again, which torchdeq allocates and "
        "zeroes at every call; the byte floor is what deqfast's algorithm must move at the copy rate of the same run "
        f"({origin_of(first.file)}):",
        "",
        *headline_table(first),
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
        cell(peer, "solver_ms", duration), cell(eager, "solver_ms", duration), cell(own, GAIN_OVER_PEER, times),
        " / ".join(residuals),
    ]  # fmt: skip


def compared(results: Results, section: str, prefix: str, peer: str) -> Iterator[tuple[File, Case]]:
    """Cases on CPUs of ours and of a peer, by the start of their names; those of the most threads first."""
    for file in sorted(results.files, key=lambda file: -(file.machine.get("threads") or 0)):
        rows = [row for row in file.rows if row["section"] == section and row["case"].startswith(prefix)]
        if file.gpu is None:
            yield from ((file, case) for case in cases_of(rows) if case.get(OURS, GAIN + peer))


def against(case: Case, peer: str) -> str:
    """ "1.20 ms against torchdeq's 4.80 ms (4.00×)"."""
    ours, theirs = (cell(case.rows[name], "ms_min", duration) for name in (OURS, peer))
    return f"{ours} against {POSSESSIVE[peer]} {theirs} ({cell(case.rows[OURS], GAIN + peer, times)})"


def fc_sentence(results: Results) -> str:
    for file, case in compared(results, "fc", "fc-solve-128x256-", PEER):
        row = case.rows[OURS]
        return (
            f"A fully connected cell, D = {row['dim']}, {row['batch']} samples, {row['iterations']} iterations, in one "
            f"call with f inside (`deqfast.fc_fixed_point`): {against(case, PEER)}; {origin(results, file)}."
        )
    return absent("the fully connected cell in one call", SUITE_COMMAND)[0]


def kernel_sentence(results: Results) -> str:
    """In how many cases of the suite the kernel that "auto" takes on a CPU is faster than plain torch."""
    for file in sorted(results.files, key=lambda file: -(file.machine.get("threads") or 0)):
        cases = [case for case in cases_of(file.rows) if case.get(OURS, "ms_min") and case.get(PLAIN, "ms_min")]
        if not cases or file.gpu is not None or not any(row["section"] == "solves" for row in file.rows):
            continue
        faster = sum(case.rows[OURS]["ms_min"] < case.rows[PLAIN]["ms_min"] for case in cases)
        return (
            f'`kernel="auto"` takes `{OURS}` on a CPU: it is faster than `{PLAIN}` in {faster} of the suite\'s '
            f"{len(cases)} cases; {origin(results, file)}."
        )
    return absent('what `kernel="auto"` should take on a CPU', SUITE_COMMAND)[0]


def nc_sentence(results: Results) -> str:
    """Of the largest state, NC1 by itself and all four."""
    texts = []
    for prefix, what in (("nc1-", "NC1"), ("nc-", "NC1 to NC4")):
        found = sorted(compared(results, "nc", prefix, PINV), key=lambda pair: -pair[1].rows[OURS]["dim"])
        for file, case in found[:1]:
            row = case.rows[OURS]
            texts.append(
                f"{what} of {row['batch']} features, D = {row['dim']}, K = {row['classes']}, {row['dtype']}: "
                f"{against(case, PINV)}, relative error {cell(row, 'error', scientific)}; {origin(results, file)}."
            )
    return " ".join(texts) or absent("neural collapse beside the pseudo-inverse", SUITE_COMMAND)[0]


def study_sentence(results: Results) -> str:
    texts = [
        f"{step_sentence(file)} {machine(file)}, commit {commit(file)}, {ran(file)}."
        for file in results.files
        if file.runs and file.gpu is None
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
