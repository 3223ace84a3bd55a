"""Targets of deqfast's speed and memory, and how each is read from measured rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .record import Row

# Column of a target -> the text after its bound.
COLUMNS = {
    "gain": "x faster than",
    "peak_bytes": "x memory of",
    "floor_x": "x the time of its bytes at the copy rate",
    "ms": " ms",
    "ms_min": "x the time of",
    "busy": " of the time the device is busy",
    "error": " relative error",
    "host_waits": " host waits",
    "share_of_f": "x the time of f",
    "over_flop": "x the ratio of operations to the explicit network",
    "nc_share": " of an explicit epoch for NC1-NC4, given the features",
    "paper_hours": " hours for this network's 20 of the paper's 40 trainings, extrapolated",
}
GPU_KERNELS = ("cuda", "triton")
GPU = (
    *GPU_KERNELS,
    "cuda-graph",
    "triton-graph",
)  # the best of these counts; peak_bytes leaves out the memory of a graph
MOST = ("gain", "busy")  # at least the bound; all other columns at most
ITERATED = ("picard-128x8192", "anderson-m6-128x8192", "anderson-m6-bf16-128x8192", "broyden-n20-128x8192")


def named(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


@dataclass(frozen=True)
class Target:
    """Bound on a column of a row; with `against`, on the gain over that provider or the share of its memory."""

    section: str
    case: str | tuple[str, ...]  # the worst of several counts
    provider: str | tuple[str, ...]  # the best of several counts
    column: str  # of ``COLUMNS``; those of ``MOST`` are at least the bound, all others at most
    bound: float
    against: str | None = None
    device: str | None = None  # for a case whose providers have the same names on every device
    awaited: bool = False  # counts as missed until it is measured

    @property
    def on_gpu(self) -> bool:
        return self.provider in (GPU, GPU_KERNELS, _ONE_LAUNCH) or self.device == "cuda"

    @property
    def what(self) -> str:
        """Target in words."""
        who = " or ".join(named(self.provider)) if self.provider != GPU else "the best GPU kernel or graph"
        who += " on a GPU" if self.device == "cuda" else ""
        words = " ".join(filter(None, [COLUMNS[self.column], self.against]))
        return f"{', '.join(named(self.case))} {who}: {'>=' if self.column in MOST else '<='} {self.bound:g}{words}"

    def value(self, rows: Sequence[Row]) -> float | None:
        """Measured value of the best provider; None if the rows do not have it."""
        best, worst = (max, min) if self.column in MOST else (min, max)
        of_cases = []
        for case in named(self.case):
            own = [row for row in rows if (row["section"], row["case"]) == (self.section, case)]
            found = {row["provider"]: row for row in own if self.device in (None, row.get("device"))}
            values = [self._of(found[name], found) for name in named(self.provider) if name in found]
            of_cases.append(best((value for value in values if value is not None), default=None))
        return None if None in of_cases else worst(value for value in of_cases if value is not None)

    def _of(self, row: Row, found: dict[str, Row]) -> float | None:
        if self.column == "gain":
            return row.get("gains", {}).get(self.against)
        own = row.get(self.column)
        if self.against is None or own is None:
            return own
        theirs = found.get(self.against, {}).get(self.column)
        return own / theirs if theirs else None

    def met(self, value: float) -> bool:
        return value >= self.bound if self.column in MOST else value <= self.bound


# The study's training step: its time over the explicit network's, over the ratio of their floating-point operations.
FLOP_TARGET = 1.15
_NC1 = "nc1-2000x8192-K100-fp64"
# On two quiet CPU cores.
TARGETS = (
    *(Target("solves", case, "cpp", "gain", x, "torchdeq") for case, x in zip(ITERATED, (3, 4.5, 7, 11), strict=True)),
    *(Target("solves", case, "cpp", "floor_x", 1.15) for case in ITERATED),
    Target("solves", "broyden-n20-128x8192", "cpp", "peak_bytes", 1.0, "torchdeq"),
    Target("solves", "anderson-m6-bf16-128x8192", "cpp", "peak_bytes", 0.55, "torchdeq"),
    Target("nc", "nc-50000x512-K10-fp32", "cpp", "ms", 1000),  # NC1 to NC4
    Target("nc", _NC1, "cpp", "gain", 500, "pinv"),
    Target("nc", _NC1, "cpp", "error", 1e-12),
    *(
        target
        for case in ("width 16, batch 32, jfb", "width 64, batch 128, jfb")
        for target in (
            Target("training step", case, "deq", "over_flop", FLOP_TARGET, device="cpu"),
            Target("training step", case, "explicit", "nc_share", 0.03, device="cpu"),
        )
    ),
)
# Set for an H200.
_STEPS = ("picard-step-128x8192", "anderson-m6-bf16-step-32x65536", "broyden-n18-step-32x65536")
_IMAGE, _FC, _STUDY = "128x512x4x4-bf16", "fc-solve-128x256-bf16", "width 64, batch 128, jfb"
GPU_TARGETS = (
    Target("ops", _STEPS, GPU, "floor_x", 1 / 0.85),
    Target("ops", "anderson-m6-bf16-step-128x8192", GPU, "ms", 0.020),
    Target("ops", "anderson-m6-bf16-step-32x65536", GPU, "ms", 0.034),
    Target("ops", "broyden-n18-step-128x8192", GPU, "ms", 0.058),
    Target("solves", "anderson-m6-bf16-128x8192", GPU, "gain", 12, "torchdeq"),
    Target("solves", "broyden-n20-128x8192", GPU, "gain", 8, "torchdeq"),
    Target("solves", "anderson-m6-bf16-128x8192", GPU_KERNELS, "peak_bytes", 0.55, "torchdeq"),
    Target("solves", "broyden-n20-128x8192", GPU_KERNELS, "peak_bytes", 1.0, "torchdeq"),
    Target("solves", "broyden-n20-128x8192", GPU, "host_waits", 11),  # one, and one per second iteration
    Target("cells", f"solve-anderson-m6-bf16-{_IMAGE}", GPU, "share_of_f", 0.4),
    Target("cells", f"solve-anderson-m6-bf16-{_IMAGE}", GPU, "gain", 3, "torchdeq"),
    Target("ops", f"norm_act_residual-{_IMAGE}-fp32", GPU, "ms", 0.006),
    Target("fc", _FC, GPU, "ms", 0.120),
    Target("fc", _FC, GPU, "gain", 40, "torchdeq"),
    # Not a time: two passes take 0.1 ms; the host takes 2 to 4 ms for 82 launches, five waits and 0.8 ms of cuSOLVER's
    # SVD.
    Target("nc", "nc1-50000x512-K10-fp32", GPU, "gain", 2, "pinv"),
    Target("training step", _STUDY, "explicit", "nc_share", 0.01, device="cuda"),
    Target("training step", _STUDY, "deq", "over_flop", FLOP_TARGET, device="cuda"),
    Target("training step", _STUDY, "deq", "paper_hours", 1, device="cuda"),
)
# A whole solve in one launch, set for an H100: 20 evaluations, f included, nothing subtracted.
_ONE_LAUNCH = ("cuda-graph", "triton-graph")
_OWN = ("graph", "compiled")  # of section "rivals", whose cells are those of the rivals
_RIVALS = {
    solver: tuple(f"rivals-{f}-{solver}-{size}" for f, size in (("elementwise", "128x8192"), ("dense", "128x256")))
    for solver in ("picard", "anderson-m6", "broyden-n20")
}
H100_TARGETS = (
    *(
        Target("solves", case, GPU, "ms", bound, awaited=True)
        for case, bound in (
            ("picard-128x8192", 0.5),
            ("picard-fc-128x256", 0.5),
            ("anderson-m6-bf16-128x8192", 0.7),
            ("broyden-n20-128x8192", 1.2),
        )
    ),
    *(
        Target("rivals", _RIVALS[solver], _OWN, "ms_min", bound, "by-hand", "cuda", True)
        for solver, bound in (("picard", 2.0), ("anderson-m6", 1.5), ("broyden-n20", 1.5))
    ),
    *(Target("rivals", cases, _OWN, "gain", 1.0, "jaxopt", "cuda", True) for cases in _RIVALS.values()),
    Target("rivals", _RIVALS["picard"], _OWN, "gain", 1.0, "optimistix", "cuda", True),
    Target("solves", (*ITERATED, "picard-fc-128x256"), _ONE_LAUNCH, "busy", 0.5, awaited=True),
    Target("models", "median of those with a solve", "get_deq", "gain", 2.0, "torchdeq", "cuda", True),
)


def verdicts(rows: Sequence[Row]) -> list[tuple[Target, float | None, bool | None]]:
    """Targets with the measured value, and whether it is met; None for both if the rows do not have it."""
    found = [(target, target.value(rows)) for target in (*TARGETS, *GPU_TARGETS, *H100_TARGETS)]
    return [(target, value, None if value is None else target.met(value)) for target, value in found]
