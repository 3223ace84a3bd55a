"""Result of a run, made from its epochs, and the text that ends a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from runs.provenance import provenance
from runs.script import command_line

from . import distributed, record
from .config import Settings
from .paper import PAPER, differences, on_cifar

SIDE_BY_SIDE = ("nc1", "nc2", "nc2_centered", "nc3", "nc3_centered", "nc4")
"""Metrics of neural collapse, those with class means as the paper prints them next to the centred ones."""


STUDIED = "-0.60 [-1.85, +0.65]"
"""Claim A1 of the study: the mean difference in points, as results/report/report.md has it."""
PASSES = {"test images": "test", "training images": "nc"}


def run_result(
    settings: Settings,
    kernel: record.KernelChoice,
    counts: tuple[int, ...],
    network: record.NetworkResult,
    steps: str = record.EAGER,
) -> record.RunResult:
    """Record of a run; `counts`: training images of each class; `steps`: how they ran."""
    return record.RunResult(
        format=record.FORMAT,
        arm=settings.arm,
        settings=settings.experiment,
        train_images_per_class=counts,
        kernel=kernel,
        network=network,
        command=command_line(),
        steps=steps,
        **provenance(settings.threads, settings.device, distributed.world_size(), settings.precision),
    )


def network_result(
    parameters: int,
    epochs: Sequence[record.Epoch],
    radius: record.SpectralRadius | None,
    cost: record.Cost | None = None,
) -> record.NetworkResult:
    """Result of one network."""
    last, final = epochs[-record.AVERAGED :], epochs[-1]
    assert final.nc is not None  # the last epoch has it
    groups = {group: [getattr(epoch, group) for epoch in last] for group in record.GROUPS}
    accuracy = {group: record.Spread.of(values) for group, values in groups.items() if None not in values}
    spent = [round(sum(getattr(epoch.seconds, part) for epoch in epochs), 1) for part in ("train", "test", "metrics")]
    solves = [epoch.train_solver for epoch in epochs if epoch.train_solver]
    solver = None
    if solves:
        means: dict[str, Any] = {name: _mean(getattr(solve, name) for solve in solves) for name in record.SOLVER_MEANS}
        counts = {name: sum(getattr(solve, name) for solve in solves) for name in record.SOLVER_COUNTS}
        solver = record.SolverSummary(**means, **counts)
    return record.NetworkResult(
        parameters=parameters,
        accuracy=record.Accuracy(**accuracy),
        epochs_averaged=len(last),
        nc=final.nc,
        solver=solver,
        seconds=record.Seconds(*spent),
        curves=curves(epochs),
        spectral_radius=radius,
        cost=cost,
    )


def curves(epochs: Sequence[record.Epoch]) -> record.Curves:
    """Columns named after the fields of `record.Epoch`, and of its `nc` (None if it was not measured). A DEQ has
    columns of the solves in training, and of each pass with fixed weights (None without a pass)."""
    shots = (name for name in record.SHOTS if getattr(epochs[-1], name) is not None)
    names = ("epoch", "lr", "loss", "train_accuracy", *record.GROUPS, *shots)
    curves: record.Curves = {name: tuple(getattr(epoch, name) for epoch in epochs) for name in names}
    curves |= {name: tuple(epoch.nc[name] if epoch.nc else None for epoch in epochs) for name in record.MEASURED}
    if solves := [epoch.train_solver for epoch in epochs if epoch.train_solver]:
        curves |= {name: tuple(getattr(solve, name) for solve in solves) for name in record.SOLVED}
    for part in record.PASSES:
        passes = [getattr(epoch, f"{part}_solver") for epoch in epochs]
        if any(passes):
            columns = (*record.SOLVER_MEANS, *record.SOLVER_COUNTS)
            curves |= {
                f"{part}_{name}": tuple(solves_of_pass and getattr(solves_of_pass, name) for solves_of_pass in passes)
                for name in columns
            }
    return curves


def _mean(values: Iterable[record.Number]) -> record.Number:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def report(results: Sequence[record.RunResult]) -> str:
    """Results of one setting's arms as text: accuracy, with the paper's on CIFAR, NC1-NC4, and statistics of the
    solves."""
    settings = results[0].settings
    setting = on_cifar(settings.setting)
    printed = {} if settings.dataset.startswith("shapes") else PAPER.get(setting, {})
    apart = differences(settings) if setting in PAPER else ["it has no entry for this imbalance"]
    lines = [
        f"Test accuracy in % on {settings.setting} after {settings.epochs} epochs, and mean±deviation over the last "
        f"{results[0].network.epochs_averaged};",
        "neural collapse of the training images after the last; a last normalisation by itself lowers NC2 and NC3 as",
        "printed, and not the centred ones",
        f"not comparable with the paper: {', '.join(apart)}" if apart else "",
    ]
    for result in results:
        known = {group: result.network.quantity(group) for group in record.GROUPS}
        known |= {shot: result.network.curves[shot][-1] for shot in record.SHOTS if shot in result.network.curves}
        ended = ", ".join(f"{group} {value:.2f}" for group, value in known.items() if value is not None)
        lines += ["", f"{result.arm}: {ended}", f"  last epochs: {_groups(result.network.accuracy)}"]
        if paper := printed.get(result.settings.model):
            lines.append(f"  paper: {_groups(paper)}")
        names = {name: name.upper().replace("_CENTERED", " centred") for name in SIDE_BY_SIDE}
        metrics = {shown: result.network.quantity(name) for name, shown in names.items()}
        shown = (f"{name} {'undefined' if value is None else f'{value:.4g}'}" for name, value in metrics.items())
        lines += [f"  {', '.join(shown)}", _costs(result)]
    return "\n".join(lines)


def difference(results: Sequence[record.RunResult]) -> str:
    """Sentence on the DEQ's accuracy in these runs, next to the study's; "" unless both networks were run."""
    overall = {result.settings.model: result.network.quantity("overall") for result in results}
    deq, explicit = overall.get("deq"), overall.get("explicit")
    if deq is None or explicit is None:
        return ""
    return (
        f"The DEQ's overall accuracy is {deq - explicit:+.2f} points from the explicit network's in this run, and "
        f"{STUDIED} in the study (three settings, width 16, 95 % interval): one run cannot decide which is better."
    )


def _groups(accuracy: record.Accuracy) -> str:
    known = {group: getattr(accuracy, group) for group in record.GROUPS}
    return ", ".join(f"{group} {spread}" for group, spread in known.items() if spread)


def _costs(result: record.RunResult) -> str:
    settings, network = result.settings, result.network
    seconds, solver = network.seconds, network.solver
    text = (
        f"  {network.parameters} parameters; {seconds.train:.0f} s of training, "
        f"{seconds.test:.0f} s of testing, {seconds.metrics:.0f} s of metrics"
    )
    if solver:
        residual = "undefined" if solver.residual is None else f"{solver.residual:.1e}"
        text += (
            f"\n  solver {settings.solver}, gradient {settings.adjoint}, kernel {result.kernel.used}: "
            f"{solver.iterations:.1f} evaluations per sample in training, {100 * (solver.converged or 0):.2f} % "
            f"converged, mean residual {residual};\n  {solver.max_iter} samples stopped at "
            f"{settings.max_iter} evaluations, {solver.nonfinite} were not finite, "
            f"{solver.skipped} were left out of the loss"
        )
        shares = {name: network.curves.get(f"{part}_converged", (None,))[-1] for name, part in PASSES.items()}
        known = [f"{100 * share:.2f} % of the {name}" for name, share in shares.items() if share is not None]
        text += f";\n  in evaluation mode, with the final weights, {' and '.join(known)} converged" if known else ""
    return text
