"""The result of a run, made from its epochs, and the text that ends a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from . import distributed, provenance
from .config import Setting, Settings
from .paper import INCONSISTENT, PAPER, differences, on_cifar
from .record import (
    AVERAGED,
    COLLAPSE,
    FORMAT,
    GROUPS,
    SOLVER_MEANS,
    Accuracy,
    CollapseCurves,
    Curves,
    Epoch,
    KernelChoice,
    NetworkResult,
    Number,
    RunResult,
    Seconds,
    SolverColumns,
    SolverCurves,
    SolverSummary,
    SpectralRadius,
    Spread,
)


def run_result(
    settings: Settings, kernel: KernelChoice, counts: tuple[int, ...], networks: dict[str, NetworkResult]
) -> RunResult:
    """The record of a run; `counts`: training images of each class."""
    return RunResult(
        format=FORMAT,
        settings=settings.experiment,
        train_images_per_class=counts,
        kernel=kernel,
        networks=networks,
        command=distributed.command_line(),
        machine=provenance.machine(settings.threads, settings.device, distributed.world_size()),
        versions=provenance.versions(),
        commit=provenance.commit(),
        finished=provenance.now(),
    )


def network_result(
    parameters: int, epochs: Sequence[Epoch], majority: int, spectral_radius: SpectralRadius | None
) -> NetworkResult:
    """What came of one network; the first `majority` classes are the majority."""
    last, final = epochs[-AVERAGED:], epochs[-1]
    assert final.test.confusion is not None and final.nc is not None  # the last epoch has both
    solves = [epoch.train.solver for epoch in epochs if epoch.train.solver]
    return NetworkResult(
        parameters=parameters,
        accuracy=_accuracy_over(last),
        epochs_averaged=len(last),
        per_class=final.test.per_class,
        confusion=final.test.confusion,
        train_loss=final.train.loss,
        nc=final.nc,
        solver=_solver(solves) if solves else None,
        seconds=Seconds(
            *(round(sum(getattr(epoch.seconds, name) for epoch in epochs), 1) for name in ("train", "test", "metrics"))
        ),
        curves=curves(epochs, majority),
        spectral_radius=spectral_radius,
    )


def _accuracy_over(epochs: Sequence[Epoch]) -> Accuracy:
    groups = {group: [getattr(epoch.test, group) for epoch in epochs] for group in GROUPS}
    return Accuracy(**{group: Spread.of(values) for group, values in groups.items() if None not in values})


def _solver(solves: list[SolverSummary]) -> SolverSummary:
    values: dict[str, Any] = {name: _mean(getattr(solve, name) for solve in solves) for name in SOLVER_MEANS}
    for name in ("max_iter", "nonfinite", "stalled", "skipped"):
        values[name] = sum(getattr(solve, name) for solve in solves)
    return SolverSummary(**values, per_class=solves[-1].per_class)


def curves(epochs: Sequence[Epoch], majority: int) -> Curves:
    """The course of a training as columns; neural collapse has its own epochs, and a solver's group is the mean over
    the group's classes."""
    measured = [(epoch.epoch, epoch.nc) for epoch in epochs if epoch.nc]
    solves = [epoch.train.solver for epoch in epochs if epoch.train.solver]
    tests = {group: tuple(getattr(epoch.test, group) for epoch in epochs) for group in GROUPS}
    return Curves(
        epoch=tuple(epoch.epoch for epoch in epochs),
        lr=tuple(epoch.train.lr for epoch in epochs),
        loss=tuple(epoch.train.loss for epoch in epochs),
        train_accuracy=tuple(epoch.train.accuracy for epoch in epochs),
        **tests,
        nc=CollapseCurves(
            epoch=tuple(epoch for epoch, _ in measured),
            **{name: tuple(getattr(nc, name) for _, nc in measured) for name in COLLAPSE},
        ),
        solver=_solver_curves(solves, majority) if solves else None,
    )


def _solver_curves(solves: list[SolverSummary], majority: int) -> SolverCurves:
    def means(part: slice) -> SolverColumns:
        return SolverColumns(
            *(tuple(_mean(getattr(solve.per_class, name)[part]) for solve in solves) for name in SOLVER_MEANS)
        )

    return SolverCurves(
        **{name: tuple(getattr(solve, name) for solve in solves) for name in (*SOLVER_MEANS, "skipped")},
        majority=means(slice(0, majority)),
        minority=means(slice(majority, None)),
    )


def _mean(values: Iterable[Number]) -> Number:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def report(result: RunResult) -> str:
    """A result as text: the row beside the paper's, NC1-NC4, and how the solver fared."""
    return "\n\n".join((_accuracy(result), _collapse(result), _costs(result)))


def title(result: RunResult) -> str:
    """Data and imbalance of a run."""
    setting = result.setting
    if setting.majority is None:
        return f"{setting.dataset}, balanced"
    return f"{setting.dataset}, K_A = {setting.majority}, R = {setting.ratio}"


def _accuracy(result: RunResult) -> str:
    averaged = next(iter(result.networks.values())).epochs_averaged
    lines = [
        f"Test accuracy in % on {title(result)}: "
        f"mean±deviation over the last {averaged} of {result.settings.epochs} epochs",
        _row("", GROUPS if result.setting.majority is not None else GROUPS[:1]),
    ]
    lines += [_accuracy_row(model, network.accuracy) for model, network in result.networks.items()]
    setting = on_cifar(result.setting)
    if setting not in PAPER:
        return "\n".join([*lines, "  the paper has no entry for this imbalance"])
    lines += _paper_rows(setting, result.networks)
    apart = differences(result.settings)
    return "\n".join(lines + ([f"  not comparable with the paper: {', '.join(apart)}"] if apart else []))


def _paper_rows(setting: Setting, models: Iterable[str]) -> list[str]:
    marks = {model: "†" if (setting, model) in INCONSISTENT else "" for model in models}
    lines = [_accuracy_row(f"paper, {model}{mark}", PAPER[setting][model]) for model, mark in marks.items()]
    if any(marks.values()):
        lines.append("  † as printed: the overall accuracy is not the class mean of the other two")
    return lines


def _accuracy_row(name: str, accuracy: Accuracy) -> str:
    return _row(name, (str(spread) for group in GROUPS if (spread := getattr(accuracy, group))))


def _row(name: str, columns: Iterable[str]) -> str:
    return f"  {name:18}" + "".join(f"{column:>14}" for column in columns)


def _collapse(result: RunResult) -> str:
    lines = [
        f"Neural collapse of the training images after epoch {result.settings.epochs}",
        _row("", (name.upper() for name in COLLAPSE)),
    ]
    for model, network in result.networks.items():
        values = (getattr(network.nc, name) for name in COLLAPSE)
        lines.append(_row(model, ("undefined" if value is None else f"{value:.4g}" for value in values)))
    return "\n".join(lines)


def _costs(result: RunResult) -> str:
    lines = []
    for model, network in result.networks.items():
        seconds = network.seconds
        lines.append(
            f"{model}: {network.parameters} parameters; {seconds.train:.0f} s of training, "
            f"{seconds.test:.0f} s of testing, {seconds.metrics:.0f} s of metrics"
        )
        if network.solver:
            lines.append(_solver_line(network.solver, result))
    return "\n".join(lines)


def _solver_line(solver: SolverSummary, result: RunResult) -> str:
    settings = result.settings
    return (
        f"  solver {settings.solver}, gradient {settings.adjoint}, kernel {result.kernel.used}: "
        f"{solver.iterations:.1f} evaluations a sample, {100 * (solver.converged or 0):.2f} % converged, "
        f"mean residual {solver.residual:.1e};\n  {solver.max_iter} samples stopped at {settings.max_iter} "
        f"evaluations, {solver.nonfinite} were not finite, {solver.skipped} were left out of the loss"
    )
