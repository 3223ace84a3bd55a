"""The modelled table of internet_scale.py: nothing in it was measured, and every line says so."""

from __future__ import annotations

from .files import File, ReportError, Results, Row
from .sources import ran
from .tables import provider_text
from .words import count, elapsed, link, plural, scientific, span, table, times

COMMAND = "python benchmarks/internet_scale.py --markdown benchmarks/results/internet_scale.md"
MODEL = "internet scale (model)"


def model_section(results: Results) -> list[str]:
    lines: list[str] = []
    for file in results.files:
        rows = [row for row in file.rows if row["section"] == MODEL]
        if rows:
            lines += [introduction(results, file), "", *check_sentence(file), *model_table(rows), ""]
    return lines or [f"Not modelled yet. `{COMMAND}` writes the model, which needs no GPU."]


def introduction(results: Results, file: File) -> str:
    inputs = {row["case"]: row["value"] for row in file.rows if row["section"] == "internet scale (inputs)"}
    if missing := {"name", "internet", "copy_rate", "product_rate", "rates_from"} - inputs.keys():
        raise ReportError(f"{file.path}: a model without {', '.join(sorted(missing))}: run `{COMMAND}` again")

    def rate(name: str) -> str:
        return scientific(inputs[name], more=1)

    details = results.folder / f"{file.path.stem}.md"
    more = f" {link('All of its inputs and tables', f'results/{details.name}')}." if details.is_file() else ""
    return (
        f"**A model, not a measurement**: training of MDEQ on {inputs['name']} GPUs, every operation at the "
        f"longer of its bytes at the copy rate and its floating-point operations at a share of a product's rate, "
        f"launches and waits left out. Its two rates, {rate('copy_rate')} bytes/s and {rate('product_rate')} FLOP/s, "
        f"are {inputs['rates_from']} ({ran(file)}). The last column is one pass over "
        f"{count(inputs['internet'])} images on the most GPUs.{more}"
    )


def check_sentence(file: File) -> list[str]:
    """How far the same model is from what was measured on this CPU."""
    rows = [row for row in file.rows if row["section"] == "internet scale (check)"]
    if not rows:
        return []
    assumed, fitted = ([row[f"{kind}_over_measured"] for row in rows] for kind in ("assumed", "fitted"))
    parts = plural(len(rows), "part")
    return [
        f"The same model of {parts} of a small step on this CPU, beside their measured times: "
        f"{span(assumed, times)} of these, and {span(fitted, times)} where the share of the "
        "product's rate is fitted to f.",
        "",
    ]


def model_table(rows: list[Row]) -> list[str]:
    """A line for each case and library, the numbers of GPUs side by side."""
    gpus = list(dict.fromkeys(row["gpus"] for row in rows))
    grouped: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        grouped.setdefault((row["case"], row["provider"]), {})[row["gpus"]] = row
    header = ["model of", "library", *(f"images/s, {plural(number, 'GPU')}" for number in gpus), "gain over torchdeq",
              f"all images, {plural(gpus[-1], 'GPU')}"]  # fmt: skip
    body = [
        [case, provider_text(provider), *(count(of[number]["images_per_second"]) for number in gpus),
         times(of[gpus[0]]["gain over torchdeq"]) if "gain over torchdeq" in of[gpus[0]] else "",
         elapsed(of[gpus[-1]]["internet_s"])]
        for (case, provider), of in grouped.items()
    ]  # fmt: skip
    return table(header, body, text=("library",))
