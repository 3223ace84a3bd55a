"""Training of one network: epochs that depend only on (seed, epoch), the skip rule, evaluation and neural collapse."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from runs.options import StudyError
from runs.script import is_first
from runs.steps import EAGER, GRAPHED, graphed, state_of
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

import deqfast

from . import distributed
from .config import Settings
from .data import Source, StudyData, load
from .moments import Arrays, moments
from .networks import build, project
from .record import AVERAGED, GROUPS, SHOTS, SOLVER_COUNTS, Collapse, Epoch, Seconds, SolverSummary
from .rundir import RunDirectory

EVALUATION_BATCH = 250  # on a CPU, with 1000 the explicit network takes a third longer per image
WARM_UP = 0.05
PACE_STEPS = 3
DIVERGED = "the loss is no longer finite"


class SolverTally:
    """Sums over the solves of one pass, kept on the device until they are read."""

    _MEANS = {"iterations": "samples", "residual": "finite", "converged": "samples"}  # and the divisor of each
    _FIELDS = ("samples", "finite", *_MEANS, *SOLVER_COUNTS)

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(self._FIELDS), dtype=torch.float64, device=device)

    def add(self, sums: Tensor) -> None:
        """Add the sums of one solve, as ``sums_of`` returns them."""
        self._sums += sums

    @staticmethod
    def sums_of(solution: deqfast.Solution) -> Tensor:
        """Sums over the samples of one solve."""
        status, residual = solution.status, solution.residual_rel
        parts = (  # in the order of _FIELDS
            torch.ones_like(status),
            residual.isfinite(),
            solution.iterations,
            torch.where(residual.isfinite(), residual, 0),
            status == deqfast.Status.CONVERGED,
            (status == deqfast.Status.MAX_ITER) | (status == deqfast.Status.ESCAPED),
            status == deqfast.Status.NONFINITE,
            status == deqfast.Status.STALLED,
            ~usable(solution),
        )
        return torch.stack([part.sum(dtype=torch.float64) for part in parts])

    def summary(self) -> SolverSummary | None:
        """Summary over the samples of all processes; only finite residuals count. None if nothing was solved."""
        sums = dict(zip(self._FIELDS, distributed.total(self._sums).tolist(), strict=True))
        if not sums["samples"]:
            return None
        means: dict[str, Any] = {name: sums[name] / sums[by] if sums[by] else None for name, by in self._MEANS.items()}
        return SolverSummary(**means, **{name: int(sums[name]) for name in SOLVER_COUNTS})


@dataclass(frozen=True)
class Inference:
    """One pass with fixed weights: predicted and true labels (N,), features (N, D), and its solves, if it has any."""

    predictions: Tensor
    labels: Tensor
    features: Tensor
    solver: SolverSummary | None = None


def usable(solution: deqfast.Solution) -> Tensor:
    """Mask (B,) of the samples that training keeps: their solves stayed finite and ended nearer than they began."""
    return (solution.status != deqfast.Status.NONFINITE) & (solution.residual_rel <= 1)


def sample_losses(logits: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
    """Cross-entropy of each sample, 0 for those not kept, whose logits are replaced first: NaN times 0 is NaN."""
    losses = F.cross_entropy(torch.where(kept[:, None], logits, 0), labels, reduction="none")
    return torch.where(kept, losses, 0)


def learning_rate(settings: Settings, done: float) -> float:
    """Learning rate when a share `done` of the training is over."""
    if settings.schedule == "constant":
        return settings.lr
    return settings.lr * min(1.0, done / WARM_UP) * (1 + math.cos(math.pi * done)) / 2


def how_steps_run(settings: Settings) -> str:
    """GRAPHED, one launch a step: on one GPU. EAGER: on a CPU or several GPUs, with --eager or --compile, and if
    the host directs the solves, as with kernel torch or an unrolled gradient."""
    by_host = settings.eager or settings.compile or settings.kernel == "torch" or settings.adjoint == "unrolled"
    return EAGER if settings.device != "cuda" or by_host or distributed.world_size() > 1 else GRAPHED


def is_measured(settings: Settings, epoch: int) -> bool:
    """Return whether neural collapse is measured after an epoch, which takes a pass over the training images."""
    return epoch in (1, settings.epochs) or epoch % settings.metrics_every == 0


def is_tested(settings: Settings, epoch: int) -> bool:
    """Return whether the test images are evaluated after an epoch: in epochs over which accuracy is averaged, and with
    the metrics. Evaluating a DEQ takes a solve, as a step does."""
    return is_measured(settings, epoch) or epoch > settings.epochs - AVERAGED


class Trainer:
    """Network that the settings name, its optimiser, and its training data, of which every process takes its share."""

    def __init__(self, settings: Settings, data: StudyData) -> None:
        self.settings = settings
        self.data = data
        self.network = build(settings)
        shares = torch.tensor(data.counts, device=data.train_images.device) / sum(data.counts)
        self.offsets = shares.log() if settings.loss == "logit-adjusted" else torch.zeros_like(shares)
        self.parallel = distributed.parallel(self.network)
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), settings.lr, settings.momentum, weight_decay=settings.weight_decay, fused=True
        )
        self.steps = how_steps_run(settings)
        self._step: Callable[[Any], Any] = self._whole_step
        if self.steps == GRAPHED:
            self._step = graphed(self._step, self.optimizer, data.train_images.device)
        # If the first step is skipped, the momenta that it makes would stay unset.
        for parameter in self.network.parameters() if settings.momentum else ():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def state(self, epoch: int) -> dict[str, Any]:
        """State on which the epochs after `epoch` depend."""
        return {"epoch": epoch, "network": self.network.state_dict(), "optimizer": state_of(self.optimizer)}

    def run_epoch(self, epoch: int, progress: tqdm[Any]) -> tuple[Epoch, Arrays | None]:
        """Train for an epoch; test and measure neural collapse when they are due. Return the epoch's line, and the
        moments of the measurement."""
        start = time.perf_counter()
        trained = self.train_epoch(epoch, progress)
        middle = time.perf_counter()
        tested: dict[str, Any] = dict.fromkeys((*GROUPS, *SHOTS))
        if is_tested(self.settings, epoch):
            test = self.infer("test")
            tested = accuracies(test, self.data) | {"test_solver": test.solver}
        end = time.perf_counter()
        measured, saved = self.measure_collapse() if is_measured(self.settings, epoch) else ({}, None)
        seconds = (middle - start, end - middle, time.perf_counter() - end)
        spent = Seconds(*(round(part, 3) for part in seconds))
        return Epoch(epoch=epoch, seconds=spent, **trained, **tested, **{"nc": None, **measured}), saved

    def train_epoch(self, epoch: int, progress: tqdm[Any]) -> dict[str, Any]:
        """Make one pass over the augmented training images; return its fields of `Epoch`."""
        self.network.train()
        device, settings = self.data.train_images.device, self.settings
        tally, sums = SolverTally(device), torch.zeros(3, dtype=torch.float64, device=device)
        steps = self.data.steps(settings.batch_size)
        for step, (images, labels) in enumerate(self.data.epoch(settings.seed, epoch, settings.batch_size)):
            rate = learning_rate(settings, (epoch - 1 + (step + 0.5) / steps) / settings.epochs)
            self.optimizer.param_groups[0]["lr"] = rate
            sums += self.train_step(images, labels, tally)
            if progress.update():  # redrawn a few times per second: only then are the sums fetched from the device
                shown, _, count = sums.tolist()
                progress.set_postfix_str(f"epoch {epoch}, loss {shown / max(1, count):.3f}")
        distributed.share_statistics(self.network)
        loss, right, count = distributed.total(sums).tolist()
        # Weights that are not finite leave out every sample of a DEQ, whose loss is then over none.
        if not count or not math.isfinite(loss) or not all(p.isfinite().all() for p in self.network.parameters()):
            if not is_first():
                raise SystemExit(1)
            raise StudyError(f"{DIVERGED} in epoch {epoch}: --lr {settings.lr:g} is too large")
        return {
            "lr": rate,
            "loss": loss / count,
            "train_accuracy": 100 * right / count,
            "train_solver": tally.summary(),
        }

    def train_step(self, images: Tensor, labels: Tensor, tally: SolverTally) -> Tensor:
        """Make a step of the optimiser, if any sample of the whole batch is kept. Return loss, right answers and number
        of this process's kept samples. The host waits only for the solve, and for nothing if steps are graphs."""
        sums, solves = self._step((images, labels))
        if solves is not None:
            tally.add(solves)
        return sums

    def _whole_step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        images, labels = batch
        with autocast(self.settings):
            logits, _, solution = self.parallel(images)
        kept = torch.ones_like(labels, dtype=torch.bool) if solution is None else usable(solution)
        losses = sample_losses(logits + self.offsets, labels, kept)
        count = distributed.total(kept.sum())
        self.optimizer.zero_grad()
        # The gradients of the processes are averaged, but their sum is needed.
        (losses.sum() * distributed.world_size() / count.clamp(min=1)).backward()
        # A GradScaler sets this: if it is 1 on the device, the fused step is skipped.
        self.optimizer.found_inf = (count == 0).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        project(self.network, self.settings.e_w, self.settings.e_h)
        right = kept & (logits.argmax(1) == labels)
        sums = torch.stack([part.detach().sum(dtype=torch.float64) for part in (losses, right, kept)])
        return sums, None if solution is None else SolverTally.sums_of(solution)

    @torch.no_grad()
    def infer(self, split: str) -> Inference:
        """Make a pass over all samples of "train" or "test", not augmented; every process gets the whole result."""
        self.network.eval()
        tally = SolverTally(self.data.train_images.device)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for images, labels in self.data.plain(split, EVALUATION_BATCH):
            with autocast(self.settings):
                output = self.network(images)
            if output.solution is not None:
                tally.add(SolverTally.sums_of(output.solution))
            parts.append((output.logits.argmax(1), labels, output.features))
        predictions, labels, features = (distributed.gather(torch.cat(batches)) for batches in zip(*parts, strict=True))
        return Inference(predictions, labels, features, tally.summary())

    def measure_collapse(self) -> tuple[dict[str, Any], Arrays]:
        """Fields `nc` and `nc_solver` of `Epoch` from the training images, not augmented, under fixed weights; and
        their moments."""
        seen = self.infer("train")
        weight = self.network.classifier.weight.detach()
        result = deqfast.neural_collapse(seen.features, seen.labels, weight, num_classes=self.data.classes)
        numbers = {name: number for name, number in result._asdict().items() if isinstance(number, int | float)}
        collapse: Collapse = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        return {"nc": collapse, "nc_solver": seen.solver}, moments(seen.features, seen.labels, weight)


def train(settings: Settings, data: StudyData, run: RunDirectory) -> Trainer:
    """Train a network from the state in the run directory to the last epoch, with a line and a checkpoint per epoch."""
    trainer = Trainer(settings, data)
    state = distributed.from_first(run.restore)
    done = state["epoch"] if state else 0
    distributed.from_first(run.cut, done)  # drops lines logged after the checkpoint
    if state:
        run.take_over(state, network=trainer.network, optimizer=trainer.optimizer)
    if 0 < done < settings.epochs:
        print(f"{settings.arm}: continues after epoch {done}", flush=True)
    steps, first = data.steps(settings.batch_size), is_first()
    bar = {"desc": settings.arm, "unit": "batch", "disable": None if first else True}  # None: not a terminal
    with tqdm(total=settings.epochs * steps, initial=done * steps, **bar) as progress:
        for epoch in range(done + 1, settings.epochs + 1):
            line, saved = trainer.run_epoch(epoch, progress)
            distributed.from_first(run.append, line, saved)
            distributed.from_first(run.save, trainer.state(epoch))
            progress.write(describe(settings.arm, line, settings.epochs))
            sys.stdout.flush()
    return trainer


def pace(settings: Settings) -> tuple[float, float]:
    """Seconds that an image takes in a step of training and in evaluation, measured on images that are drawn here."""
    name, batch = "shapes" if settings.classes == 10 else "shapes100", settings.batch_size
    each, tested = -(-batch // settings.classes), max(batch, settings.classes)
    balanced = replace(settings, study="cifar_balanced", majority=None, ratio=None, imbalance="step")
    small = replace(balanced, dataset=name, n_majority=each, test_images=tested, evaluate="test")
    torch.set_num_threads(settings.threads)
    trainer = Trainer(small, load(Source(name, ""), small, torch.device(settings.device)))
    images, labels = next(trainer.data.epoch(0, 1, batch))
    trainer.network.train()
    tally = SolverTally(images.device)

    def seconds(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    step = min(seconds(lambda: trainer.train_step(images, labels, tally).tolist()) for _ in range(PACE_STEPS))
    return step / batch, seconds(lambda: trainer.infer("test").predictions.tolist()) / tested


def accuracies(test: Inference, data: StudyData) -> dict[str, Any]:
    """Fields of `Epoch` from the test images. A group's accuracy is the mean over its classes. Balanced classes have no
    groups."""
    right = torch.bincount(test.labels[test.predictions == test.labels], minlength=data.classes)
    per_class = 100 * right.double() / torch.bincount(test.labels, minlength=data.classes)
    sizes = torch.tensor(data.counts, device=per_class.device)
    first = torch.arange(data.classes, device=per_class.device) < data.majority
    masks = {"majority": first, "minority": ~first}
    masks |= {"many": sizes > 100, "medium": (sizes >= 20) & (sizes <= 100), "few": sizes < 20}
    groups = {name: per_class[mask].mean().item() if mask.any() else None for name, mask in masks.items()}
    if data.majority == data.classes:
        groups = dict.fromkeys(groups)
    return {"overall": per_class.mean().item(), **groups}


def autocast(settings: Settings) -> torch.autocast:
    """bfloat16 autocast if the settings ask for it."""
    return torch.autocast(settings.device, torch.bfloat16, enabled=settings.precision == "bf16")


def describe(arm: str, line: Epoch, epochs: int) -> str:
    """Describe a finished epoch in one line."""
    solver = line.train_solver
    parts = [f"{arm:12} {line.epoch:3}/{epochs}", f"loss {line.loss:.3f}"]
    if line.overall is not None:
        parts.append(f"test {line.overall:.2f} %")
    if line.minority is not None:
        parts[-1] += f" (majority {line.majority:.2f}, minority {line.minority:.2f})"
    if solver:
        parts.append(f"{solver.iterations:.1f} evaluations, {100 * (solver.converged or 0):.1f} % converged")
        if solver.skipped:
            parts.append(f"{solver.skipped} left out")
    parts.append(f"{line.seconds.total:.0f} s")
    return "  ".join(parts)
