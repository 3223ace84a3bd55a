"""The report on a set of runs: the paper's tables and figures beside ours, and a verdict on each of its claims."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cells import RATIOS, TABLES, Cell
from ..config import MODELS, StudyError
from ..figures import LABELS
from ..results import AVERAGED, COLLAPSE, GROUPS, INCONSISTENT, PAPER, Spread, spread
from ..results import Cell as PaperCell
from ..rundir import Row, prepare_out, write_atomically
from .page import Block, Bullets, Heading, Paragraph, Picture, Table, to_html, to_markdown
from .pictures import FigureFolder, pictures_of
from .runs import Collection, Group, Rejected, Run, collect
from .verdicts import CLAIMS, CONFIDENCE, QUANTITIES, SEEDS_NEEDED, Judgement, judge, paper_differences

TITLE = "Deep equilibrium models through neural collapse: what was measured"
NOT_RUN = "not run"
NOTHING = "–"


@dataclass(frozen=True)
class Report:
    """The files written, and the lines that sum them up."""

    html: Path
    markdown: Path
    pictures: int
    summary: list[str]


def main(description: str | None, argv: Sequence[str] | None = None) -> int:
    """The exit status is 0, 1 for an error (told in a line), 2 for bad arguments, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=_folder, metavar="RUNS", help="folder that holds runs, at any depth")
    parser.add_argument("--out", type=_folder, help="folder for the report (default: report in the first of RUNS)")
    parser.add_argument("--no-svg", action="store_true", help="figures as PNG alone: a quarter of the space")
    asked = parser.parse_args(argv)
    try:
        report = write(asked.runs, asked.out or asked.runs[0] / "report", vector=not asked.no_svg)
    except StudyError as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n".join(report.summary))
    print(f"report:   {report.html}\nmarkdown: {report.markdown}\nfigures:  {report.html.parent / 'figures'}")
    return 0


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def build(runs: list[Path], out: Path) -> Path:
    """Write the report on the runs under some folders into `out`; the path of its HTML page."""
    return write(runs, out).html


def write(runs: Iterable[Path], out: Path, vector: bool = True) -> Report:
    """Write report.md, report.html and figures/ into `out`, the figures as PNG and, with `vector`, as SVG. Raises
    StudyError where nothing can be read or written."""
    folders = list(runs)
    found = collect(folders)
    if not (found.groups or found.rejected or found.theory):
        raise StudyError(f"no runs under {', '.join(map(str, folders))}")
    folder = FigureFolder(out / "figures", ("png", "svg") if vector else ("png",))
    prepare_out(folder.path)
    judged = {group.name: [judge(group, claim) for claim in CLAIMS] for group in found.groups}
    blocks, pictures = _blocks(found, judged, folder)
    write_atomically(out / "report.md", to_markdown(TITLE, blocks).encode())
    write_atomically(out / "report.html", to_html(TITLE, blocks).encode())
    return Report(out / "report.html", out / "report.md", pictures, _summary(found, judged))


def _blocks(found: Collection, judged: dict[str, list[Judgement]], folder: FigureFolder) -> tuple[list[Block], int]:
    """The whole document, whose pictures are written as they are drawn."""
    blocks = _head(found, judged)
    pictures = 0
    for number, group in enumerate(found.groups):
        blocks += _group_blocks(group, judged[group.name])
        drawn = pictures_of(group, folder, first=number == 0)
        blocks += [Heading(3, f"Figures: {group.name}"), *drawn.blocks]
        pictures += drawn.count
    blocks += _theory(found, folder)
    blocks += _rejected(found.rejected)
    blocks += _provenance(found.groups)
    return [*blocks, *_method()], pictures


def _head(found: Collection, judged: dict[str, list[Judgement]]) -> list[Block]:
    runs = [run for group in found.groups for run in group.finished_runs]
    blocks: list[Block] = [
        Paragraph(
            "An explicit ResNet-18 beside its deep-equilibrium (DEQ) twin on balanced and imbalanced images, after Sun "
            "and Shi, “Understanding Representation of Deep Equilibrium Models from Neural Collapse Perspective” "
            "(NeurIPS 2024). Runs of different settings have tables of their own, and are never averaged or compared."
        ),
        Heading(2, "What was run"),
        Table("The runs behind this report", ("what", "which"), _facts(found, runs)),
        Heading(2, "Verdicts in short"),
    ]
    if not found.groups:
        return [*blocks, Paragraph("No finished run, hence no verdict.")]
    rows = [
        [claim.text, *(judged[group.name][number].verdict for group in found.groups)]
        for number, claim in enumerate(CLAIMS)
    ]
    caption = "The paper's claims, and what each group of runs says to them (in brackets: pairs of networks)"
    scope = (
        "A verdict is about the runs of its group. Where their settings are not the paper's, it tells whether the "
        "claim is true of these settings, not what a run of the paper's would give."
    )
    return [*blocks, Paragraph(scope), Table(caption, ("claim", *(group.name for group in found.groups)), rows)]


def _facts(found: Collection, runs: list[Run]) -> list[tuple[str, str]]:
    def listed(of: Callable[[Run], str]) -> str:
        return "; ".join(dict.fromkeys(of(run) for run in runs)) or NOTHING

    finished = sorted(run.result["finished"] for run in runs)
    states = [entry.state for entry in found.rejected]
    return [
        ("finished runs", str(len(runs))),
        ("others", ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none"),
        ("data", listed(lambda run: run.result["data"])),
        ("presets", listed(lambda run: run.result["preset"])),
        ("seeds", ", ".join(map(str, sorted({run.seed for run in runs}))) or NOTHING),
        ("machines", listed(_machine)),
        ("kernels", listed(lambda run: run.result["kernel"]["used"])),
        ("versions", listed(_versions)),
        ("commits", listed(_commit)),
        ("finished", " to ".join(dict.fromkeys((finished[0], finished[-1]))) if finished else NOTHING),
    ]


def _machine(run: Run) -> str:
    machine = run.result["machine"]
    where = f"{machine['gpu']}, {machine['cpu']}" if machine.get("gpu") else machine["cpu"]
    processes = f", {machine['processes']} processes" if machine.get("processes", 1) > 1 else ""
    return f"{where}, {machine['threads']} of {machine.get('cores')} cores{processes}"


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.result["versions"].items() if version)


def _commit(run: Run) -> str:
    return (run.result.get("commit") or "unknown")[:12]


def _group_blocks(group: Group, judgements: list[Judgement]) -> list[Block]:
    """The tables of one group of runs."""
    blocks: list[Block] = [Heading(2, f"Results: {group.name}")]
    if group.dataset.startswith("shapes"):
        blocks.append(Paragraph("Not comparable with the paper: these are drawn images, not CIFAR."))
    elif group.differences:
        blocks.append(Paragraph(f"Not comparable with the paper (‡): {', '.join(group.differences)}."))
    tables = _paper_tables(group)
    if any("†" in text for table in tables for row in table.rows for text in row):
        blocks.append(Paragraph("† as printed: the overall accuracy is not the class mean of the other two."))
    return [
        *blocks,
        *tables,
        _variation(group),
        *_verdict_tables(group, judgements),
        _run_table(group),
    ]


def _paper_tables(group: Group) -> list[Table]:
    """Tables 1 to 4 of the paper, as far as they are about data with as many classes, and one for other imbalances."""
    tables = []
    known = set()
    for number, splits in TABLES.items():
        cells = [Cell(group.dataset, *split) for split in splits]
        known |= set(cells)
        rows = [row for cell in cells for row in _cell_rows(group, cell)]
        tables.append(_accuracy_table(f"Table {number} of the paper, {_split(cells[0])}: {group.name}", rows))
    others = [row for cell in group.cells if cell not in known for row in _cell_rows(group, cell)]
    if others:
        tables.append(_accuracy_table(f"Imbalances that are not in the paper: {group.name}", others))
    return tables


def _split(cell: Cell) -> str:
    return "balanced classes" if cell.majority is None else f"K_A = {cell.majority}"


def _accuracy_table(caption: str, rows: list[list[str]]) -> Table:
    columns = ("cell", "network", "classes", "paper", "ours, over epochs", "ours, over seeds", "seeds", "ours - paper")
    return Table(f"{caption}; test accuracy in %", columns, rows)


def _cell_rows(group: Group, cell: Cell) -> list[list[str]]:
    """A row per network and classes; one per network where the cell was not run."""
    paper = _paper_cell(group, cell)
    rows = []
    for model in MODELS:
        seeds = group.seeds(cell, model)
        for classes in GROUPS if cell.majority is not None and seeds else GROUPS[:1]:
            printed = paper[model][classes] if paper else None
            mark = "†" if classes == GROUPS[0] and _inconsistent(group, cell, model) else ""
            head = [_cell_name(cell), LABELS[model], classes, f"{_show(printed)}{mark if printed else ''}"]
            rows.append([*head, *_measured(group, list(seeds.values()), model, classes, printed)])
    return rows


def _measured(group: Group, runs: list[Run], model: str, classes: str, printed: Spread | None) -> list[str]:
    """Ours over epochs of the first seed, over seeds, the number of seeds, and the difference from the paper."""
    spreads = [run.result["models"][model]["accuracy"][classes] for run in runs]
    if not spreads:
        return [NOT_RUN, NOT_RUN, "0", NOTHING]
    over_seeds = spread([one["mean"] for one in spreads])
    shown = _show(over_seeds) if len(runs) > 1 else f"{over_seeds['mean']:.2f}"
    return [f"{_show(spreads[0])} (seed {runs[0].seed})", shown, str(len(runs)), _against(group, over_seeds, printed)]


def _against(group: Group, ours: Spread, printed: Spread | None) -> str:
    if printed is None:
        return "no entry"
    if group.dataset.startswith("shapes"):
        return "not comparable"
    return f"{ours['mean'] - printed['mean']:+.2f}{' ‡' if group.differences else ''}"


def _paper_cell(group: Group, cell: Cell) -> PaperCell | None:
    return PAPER.get((_paper_data(group), cell.majority, cell.ratio))


def _paper_data(group: Group) -> str:
    return "cifar10" if group.classes == 10 else "cifar100"


def _inconsistent(group: Group, cell: Cell, model: str) -> bool:
    return (_paper_data(group), cell.majority, cell.ratio, model) in INCONSISTENT


def _cell_name(cell: Cell) -> str:
    return "balanced" if cell.majority is None else f"({cell.majority},{10 - cell.majority}) R = {cell.ratio}"


def _show(value: Spread | None) -> str:
    return NOTHING if value is None else f"{value['mean']:.2f}±{value['std']:.2f}"


def _variation(group: Group) -> Paragraph:
    """How far epochs of one run and how far seeds lie apart."""
    over_epochs, over_seeds = [], []
    for cell in group.cells:
        for model in MODELS:
            spreads = [run.result["models"][model]["accuracy"]["overall"] for run in group.seeds(cell, model).values()]
            if len(spreads) > 1:
                over_epochs.append(statistics.fmean(one["std"] for one in spreads))
                over_seeds.append(statistics.stdev(one["mean"] for one in spreads))
    text = "The paper's ± is the deviation over the last epochs of one run; it does not tell how far other seeds lie."
    if not over_seeds:
        return Paragraph(f"{text} No cell here has more than one seed, so neither does this table.")
    seeds, epochs = statistics.fmean(over_seeds), statistics.fmean(over_epochs)
    return Paragraph(
        f"{text} Here the overall accuracy deviates by {seeds:.2f} points over seeds and by {epochs:.2f} points over "
        f"the last epochs of a run (means over {len(over_seeds)} networks and cells with more than one seed)."
    )


def _verdict_tables(group: Group, judgements: list[Judgement]) -> list[Block]:
    rows = [[one.claim.text, one.verdict, one.numbers, _paper_says(group, one), one.claim.source] for one in judgements]
    columns = ("claim of the paper", "verdict", "numbers", "the paper's own numbers", "source")
    details = [row for one in judgements for row in _evidence_rows(one)]
    level = f"{100 * CONFIDENCE:g} % interval"
    blocks: list[Block] = [Table(f"Verdict on each claim: {group.name}", columns, rows)]
    if details:
        names = ("quantity", "cell", "seeds", "mean of DEQ - explicit", level, "of each seed", "verdict of the cell")
        blocks.append(Table(f"Paired differences by cell: {group.name}", names, details))
    return blocks


def _paper_says(group: Group, one: Judgement) -> str:
    found = [] if group.dataset.startswith("shapes") else paper_differences(one.claim, _paper_data(group))
    if not found:
        return NOTHING
    higher = sum(value > 0 for value in found)
    return f"higher in {higher} of {len(found)}, {statistics.fmean(found):+.2f} points on average"


def _evidence_rows(one: Judgement) -> list[list[str]]:
    show = one.claim.show
    name = QUANTITIES[one.claim.quantity]
    rows = []
    for entry in one.evidence:
        found = entry.interval
        bounds = f"{show(found.low)} to {show(found.high)}" if found else f"needs {SEEDS_NEEDED} seeds"
        each = ", ".join(f"{show(value)} ({seed})" for seed, value in entry.differences.items())
        ratio = " (DEQ / explicit)" if one.claim.expected == "alike" else ""
        counted = str(len(entry.differences))
        rows.append([name + ratio, _cell_name(entry.cell), counted, show(entry.mean), bounds, each, entry.verdict])
    return rows


def _run_table(group: Group) -> Table:
    """Every network of every run: what came out at the end."""
    columns = (
        *("cell", "seed", "network", "overall", "majority", "minority", "NC1", "NC2", "NC3", "NC4"),
        *("evaluations a sample", "converged %", "left out", "seconds of training"),
    )
    rows = []
    for cell in group.cells:
        seeds = {model: group.seeds(cell, model) for model in MODELS}
        for seed in sorted({*seeds[MODELS[0]], *seeds[MODELS[1]]}):
            for model in MODELS:
                if seed in seeds[model]:
                    summary = seeds[model][seed].result["models"][model]
                    rows.append([_cell_name(cell), str(seed), LABELS[model], *_outcome(summary)])
    return Table(f"Each run, over its last epochs (at most {AVERAGED}) and at the end: {group.name}", columns, rows)


def _outcome(summary: Row) -> list[str]:
    solver = summary.get("solver")
    collapse = [summary["nc"][name] for name in COLLAPSE]
    solved = [NOTHING] * 3
    if solver:
        solved = [f"{solver['iterations']:.1f}", f"{100 * solver['converged']:.2f}", str(solver["skipped"])]
    return [
        *(_show(summary["accuracy"].get(classes)) for classes in GROUPS),
        *("undefined" if value is None else f"{value:.4g}" for value in collapse),
        *solved,
        f"{summary['seconds']['train']:.0f}",
    ]


def _summary(found: Collection, judged: dict[str, list[Judgement]]) -> list[str]:
    """What to print: how many runs there are, and the verdicts of each group."""
    count = sum(len(group.finished_runs) for group in found.groups)
    lines = [f"{count} finished runs in {len(found.groups)} groups of like settings"]
    lines += [f"{entry.state}: {entry.path} ({entry.reason})" for entry in found.rejected]
    for name, judgements in judged.items():
        lines += [f"\n{name}", *(f"  {one.verdict:22} {one.claim.text}" for one in judgements)]
    return [*lines, ""]


def _theory(found: Collection, folder: FigureFolder) -> list[Block]:
    """What the layer-peeled problems were found to say to the theorems; their figures are copied into `folder`."""
    blocks: list[Block] = []
    for number, (path, content) in enumerate(found.theory):
        claims = content["claims"]
        blocks.append(_claims_in_short(f"Layer-peeled problems solved numerically, in short: {path}", claims))
        for picture in sorted(path.parent.glob(f"{path.stem}*.png")):
            blocks.append(_copied(picture, folder, f"{number}-" if number else ""))
        rows = [[one["claim"], _case(one), *_found(one), one["source"]] for one in claims]
        columns = ("claim", "case", "verdict", "in words", "numbers", "source")
        blocks.append(Table(f"Layer-peeled problems solved numerically, case by case: {path}", columns, rows))
        if path.with_suffix(".md").exists():
            blocks.append(Paragraph(f"A full account is in {path.with_suffix('.md')}."))
    return [Heading(2, "Theory"), *blocks] if blocks else []


def _claims_in_short(caption: str, claims: list[Row]) -> Table:
    """How often each claim came out how, over its cases."""
    verdicts = list(dict.fromkeys(one["verdict"] for one in claims))
    counts = Counter((one["claim"], one["source"], one["verdict"]) for one in claims)
    names = dict.fromkeys((one["claim"], one["source"]) for one in claims)
    rows = [[name[0], *(str(counts[(*name, verdict)]) for verdict in verdicts), name[1]] for name in names]
    return Table(f"{caption}; number of cases", ("claim", *verdicts, "source"), rows)


def _copied(picture: Path, folder: FigureFolder, prefix: str) -> Picture:
    """A figure of the theory, with its vector graphics, among the report's own."""
    try:
        content = {
            file.suffix[1:]: file.read_bytes() for file in (picture, picture.with_suffix(".svg")) if file.exists()
        }
    except OSError as error:
        raise StudyError(f"{picture} cannot be read ({error.strerror})") from error
    caption = f"Figure of the layer-peeled problems: {picture.stem.replace('_', ' ')}."
    return folder.add(f"{prefix}{picture.stem}", caption, content)


def _case(claim: Row) -> str:
    """What tells the cases of one claim apart."""
    plain = ("claim", "source", "verdict", "numbers", "text")
    told = {name: value for name, value in claim.items() if name not in plain and value is not None}
    return ", ".join(f"{name} {_numbers(value)}" for name, value in told.items()) or NOTHING


def _found(claim: Row) -> tuple[str, str, str]:
    return claim["verdict"], claim["text"], _numbers(claim.get("numbers"))


def _numbers(value: object) -> str:
    """Numbers of a claim, whatever their nesting, as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_numbers(part)}" for name, part in value.items())
    if isinstance(value, list):
        return f"({', '.join(map(_numbers, value))})"
    if isinstance(value, float):
        return f"{value:.4g}"
    return NOTHING if value is None else str(value)


def _rejected(rejected: list[Rejected]) -> list[Block]:
    if not rejected:
        return []
    rows = [[str(entry.path), entry.state, entry.reason] for entry in rejected]
    return [
        Heading(2, "Runs that count in no table"),
        Table("Folders without a result of use, and why", ("folder", "state", "reason"), rows),
    ]


def _provenance(groups: list[Group]) -> list[Block]:
    """Where the numbers of every run come from."""
    columns = (
        *("run", "cell", "seed", "networks", "group", "images a class", "adjoint", "kernel"),
        *("seconds in all", "machine", "versions", "commit", "finished", "folder", "command"),
    )
    rows: list[list[str]] = []
    for group in groups:
        for number, run in enumerate(sorted(group.finished_runs, key=lambda run: str(run.path)), len(rows) + 1):
            rows.append([str(number), *_origin(group, run)])
    if not rows:
        return []
    return [Heading(2, "Provenance"), Table("Every run that counts", columns, rows)]


def _origin(group: Group, run: Run) -> list[str]:
    result, counts = run.result, run.result["train_images_per_class"]
    seconds = sum(sum(summary["seconds"].values()) for summary in result["models"].values())
    return [
        *(_cell_name(run.cell), str(run.seed), ", ".join(LABELS[model] for model in result["models"]), group.name),
        f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} and {counts[-1]}",
        *(run.settings["adjoint"], result["kernel"]["used"], f"{seconds:.0f}", _machine(run), _versions(run)),
        *(_commit(run), result["finished"], str(run.path), result.get("command") or NOTHING),
    ]


def _method() -> list[Block]:
    ratios = ", ".join(map(str, RATIOS))
    level = f"{100 * CONFIDENCE:g} %"
    points = [
        "“Overall”, “majority” and “minority” are means over the classes' accuracies on the balanced test images,"
        f" which is what the paper's numbers are. K_A counts tenths of the classes; the paper's R are {ratios}.",
        f"“Over epochs” is mean±deviation over the last {AVERAGED} epochs of one run, as in the paper (all, if "
        "there were fewer). “Over seeds” is mean±deviation of these means over runs of different seeds.",
        "A pair is an explicit network and a DEQ of the same settings, data and seed. NC1 to NC4 are of the "
        "training images under the final weights.",
        "The explicit network's last block ends in a ReLU: its features are not negative, so no two of its class means "
        "stand at more than a right angle, and NC2, whose class means the paper does not centre, cannot reach 0; nor "
        "can NC3 where the classifier's rows add up to 0, towards which cross-entropy and weight decay drive them. The "
        "DEQ's last operation is a normalisation, and its features have both signs. Centred class means take that "
        "difference of the architectures out of the comparison.",
        f"A cell with {SEEDS_NEEDED} or more seeds is judged by Student's {level} interval of its paired "
        "differences, not corrected for the number of cells. “Higher” or “lower” holds if the interval lies "
        "wholly on that side of 0, and does not hold if it lies wholly on the other. “Alike” holds if the "
        "interval of the ratio's geometric mean lies within 1/1.25 to 1.25, and does not hold if it lies wholly "
        "outside; the bounds are our choice, the paper gives none.",
        "A claim holds for a group if it holds in every such cell, and does not hold if the opposite is found in "
        "one. Where such cells leave it open, and without any, a two-sided sign test over all cells' mean differences "
        "decides on “higher” and “lower”, which takes at least six cells; “alike” is left open. The sign test takes "
        "the cells for independent, which runs of one seed on overlapping images are not quite, and no verdict is "
        "corrected for the number of claims.",
    ]
    return [Heading(2, "How the numbers came about"), Bullets(points)]
