"""Deblurring and inpainting as an equilibrium: x* = D(x* - step A'(A x* - y)), with D a small convolutional denoiser.

A is a blur by a 9 x 9 Gaussian (deblur), or keeps half of the pixels (inpaint), with noise of 1 %. D is trained to
denoise at sigma = 25 first, then within its arm, on patches; arms share patches and D's start.
deq: the fixed point, differentiated by JFB. explicit-parameters: one step, with the same denoiser. explicit-compute:
several steps of the same denoiser, unrolled. In deblurring they cost the same as a training step of the DEQ, if a
differentiated step counts as three evaluations; in inpainting the DEQ's costs twice as much. Sources: Gilton, Ongie,
Willett, IEEE TCI 2021; Ryu et al., ICML 2019.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from runs import style
from runs.files import reading
from runs.options import StudyError, option
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import deqfast

from .frame import Example, Outcome, Record, Run, Training, descend

ARMS = ("deq", "explicit-parameters", "explicit-compute")
FOLDERS = {"train": "Train400", "restored": "Set12", "denoised": "BSD68"}
BLUR, NOISE, DENOISED = 9, 0.01, 25 / 255
STEPS_OF_TWIN = 5


@dataclass(frozen=True, kw_only=True)
class Restoration(Training):
    """Options of the model."""

    all_arms, files = ARMS, tuple(f"{folder}/*" for folder in FOLDERS.values())

    task: str = option("model", "what is undone", "deblur", choices=("deblur", "inpaint"))
    width: int = option("model", "channels of the denoiser", 32, minimum=1)
    depth: int = option("model", "convolutions of the denoiser", 5, minimum=2)
    tol: float = option("model", "relative residual of a solve", 1e-3, above=0.0)
    patch: int = option("training", "side of a patch in pixels", 48, minimum=16)
    batch: int = option("training", "patches of a step", 8, minimum=1)
    pretraining: int = option("training", "steps of training to denoise", 2000, minimum=1)
    steps: int = option("training", "steps of training to restore", 1000, minimum=1)
    lr: float = option("training", "learning rate of Adam, falling to 0 by a cosine", 5e-4, above=0.0)


class Measurement(NamedTuple):
    """Measurement of images (B, 1, H, W): y = A x + noise, and A as a transfer function or a mask."""

    y: Tensor
    transfer: Tensor
    mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return A x: a blur with circular borders, or a selection of pixels."""
        return self.mask * torch.fft.irfft2(torch.fft.rfft2(x) * self.transfer, s=x.shape[-2:])

    def adjoint(self, y: Tensor) -> Tensor:
        """Return A'y."""
        return torch.fft.irfft2(torch.fft.rfft2(self.mask * y) * self.transfer.conj(), s=y.shape[-2:])


def measure(task: str, x: Tensor, generator: torch.Generator | None = None) -> Measurement:
    """Measure images (B, 1, H, W)."""
    line = torch.exp(-0.5 * ((torch.arange(BLUR) - BLUR // 2) / 1.6).square())
    kernel = torch.zeros(x.shape)
    kernel[..., :BLUR, :BLUR] = torch.outer(line, line) / line.sum() ** 2
    transfer = torch.fft.rfft2(kernel.roll((-(BLUR // 2), -(BLUR // 2)), (-2, -1)))
    mask = torch.ones_like(x)
    if task == "inpaint":
        transfer, mask = torch.ones_like(transfer), (torch.rand(x.shape, generator=generator) < 0.5).to(x)
    exact = Measurement(x, transfer, mask)
    noise = NOISE * torch.randn(x.shape, generator=generator)
    return exact._replace(y=mask * (exact.forward(x) + noise))


class Denoiser(nn.Module):
    """x minus the noise that a stack of convolutions predicts (Zhang et al., TIP 2017, without normalisation)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [1, *[width] * (depth - 1), 1]
        layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in zip(widths[:-1], widths[1:], strict=True)]
        self.noise = nn.Sequential(*[part for layer in layers[:-1] for part in (layer, nn.ReLU())], layers[-1])

    def forward(self, x: Tensor) -> Tensor:
        return x - self.noise(x)


class Step(nn.Module):
    """Proximal gradient step, with the denoiser in place of the proximal map."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.log_size = nn.Parameter(torch.zeros(()))

    def forward(self, z: Tensor, known: Measurement) -> Tensor:
        return self.denoiser(z - self.log_size.exp() * known.adjoint(known.forward(z) - known.y))


class Restorer(nn.Module):
    """The equilibrium of a step, or a number of steps."""

    def __init__(self, arm: str, options: Restoration) -> None:
        super().__init__()
        self.step = Step(Denoiser(options.width, options.depth))
        self.steps = {"explicit-parameters": 1, "explicit-compute": STEPS_OF_TWIN}.get(arm, 0)
        solver = deqfast.Anderson(rtol=options.tol, max_iter=40, history_size=5)
        rows = Measurement(True, True, True)  # type: ignore[arg-type]  # per_sample takes x's structure, with flags
        self.block = deqfast.DEQBlock(self.step, solver, "jfb", warn=False, trace=True, per_sample=rows)

    def forward(self, known: Measurement) -> tuple[Tensor, deqfast.Solution | None]:
        """Return restored images, and for the equilibrium the Solution."""
        z = known.adjoint(known.y)
        if not self.steps:
            restored, solution = self.block(known, z0=z, return_solution=True)
            return restored, solution
        for _ in range(self.steps):
            z = self.step(z, known)
        return z, None


def read(folder: Path) -> list[Tensor]:
    """The images of a folder in grey, each (H, W) in [0, 1]."""
    images = []
    for path in sorted(path for path in folder.glob("*") if path.suffix.lower() in (".png", ".jpg", ".bmp")):
        with reading(path, f"--data-root {folder.parent} has images there"):
            images.append(torch.from_numpy(np.array(Image.open(path).convert("L"), dtype=np.float32)) / 255)
            if min(images[-1].shape) < BLUR:
                raise ValueError(
                    f"{' x '.join(map(str, images[-1].shape))} pixels; at least {BLUR}, a side of the blur"
                )
    if not images:
        raise StudyError(f"--data-root {folder.parent}: there must be images (*.png, *.jpg, *.bmp) in {folder}")
    return images


def load(options: Restoration) -> tuple[str, dict[str, list[Tensor]]]:
    """Name of the data, and images to train on, to restore and to denoise."""
    if options.data_root is not None:
        data = {use: read(Path(options.data_root) / name) for use, name in FOLDERS.items()}
        name = ", ".join(f"{FOLDERS[use]} ({len(images)})" for use, images in data.items())
    else:
        photographs = [
            torch.from_numpy(image.mean(axis=2, dtype=np.float32)) / 255 for image in load_sample_images().images
        ]
        held_out = [image[-192:, -192:] for image in photographs]
        data = {"train": [image[:, :-192] for image in photographs], "restored": held_out, "denoised": held_out}
        name = "scikit-learn's two photographs"
    if (least := min(min(image.shape) for image in data["train"])) < options.patch:
        raise StudyError(f"--patch {options.patch}: at most {least}, the least side of a training image")
    return name, data


def patches(images: Sequence[Tensor], options: Restoration) -> Tensor:
    """(B, 1, P, P): random patches, turned and mirrored at random."""
    size, chosen = options.patch, []
    for index in torch.randint(len(images), (options.batch,)).tolist():
        rows, columns = (int(torch.randint(side - size + 1, ())) for side in images[index].shape)
        patch = images[index][rows : rows + size, columns : columns + size]
        turns, mirrored = torch.randint(4, ()).item(), torch.randint(2, ()).item()
        chosen.append(torch.rot90(patch.flip(0) if mirrored else patch, int(turns)))
    return torch.stack(chosen)[:, None]


def psnr(x: Tensor, truth: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of an image in [0, 1]."""
    return -10 * math.log10(float((x.clamp(0, 1) - truth).square().mean()))


def trained(run: Run) -> tuple[Restorer, torch.optim.Optimizer, Callable[[Any], Any]]:
    """The model of an arm, its optimiser, and its step: from (what is given, images) to loss and Solution."""
    model = Restorer(run.arm, run.options).to(run.options.device)
    optimizer = torch.optim.Adam(model.parameters(), **run.fused)

    def learn(batch: tuple[Measurement | Tensor, Tensor]) -> tuple[Tensor, deqfast.Solution | None]:
        given, clean = batch
        output, solution = model(given) if isinstance(given, Measurement) else (model.step.denoiser(given), None)
        loss = mse_loss(output, clean)
        descend(loss, optimizer, clip=0.1)
        return loss.detach(), solution

    return model, optimizer, run.stepped(learn, optimizer)


def train(run: Run) -> Outcome:
    """Train the denoiser, then an arm around it, and measure it."""
    options: Restoration = run.options
    name, data = load(options)
    model, optimizer, learn = trained(run)
    for step in run.steps(options.pretraining + options.steps, model=model, optimizer=optimizer):
        restoring = step >= options.pretraining
        part, whole = (step - options.pretraining, options.steps) if restoring else (step, options.pretraining)
        optimizer.param_groups[0]["lr"] = options.lr * (0.5 + 0.5 * math.cos(math.pi * part / whole))
        clean = patches(data["train"], options)
        given = measure(options.task, clean) if restoring else clean + DENOISED * torch.randn_like(clean)
        if step == options.pretraining - 1:
            noisy = denoised(lambda x: model.step.denoiser(run.on_device(x)).cpu(), data["denoised"])
            run.rows.append({"step": step, "denoised": noisy})
        _, solution = learn((given, clean))
        run.rows += [{"evaluations": float(solution.iterations.float().mean())}] if solution else []
    scores, shown = evaluate(model.eval().cpu(), data["restored"], options)
    first, *solves = run.rows
    scores = {"PSNR": scores.pop("PSNR"), "denoising PSNR": first["denoised"], **scores}
    if solves:
        scores["evaluations, training"] = fmean(row["evaluations"] for row in solves)
    return Outcome(model, f"{options.task}; {name}", scores, shown)


@torch.no_grad()
def denoised(denoiser: Callable[[Tensor], Tensor], images: Sequence[Tensor]) -> float:
    """Mean PSNR over whole images at sigma = 25, with one draw of the noise."""
    generator = torch.Generator().manual_seed(0)
    noisy = [image + DENOISED * torch.randn(image.shape, generator=generator) for image in images]
    return fmean(psnr(denoiser(x[None, None])[0, 0], image) for x, image in zip(noisy, images, strict=True))


@torch.no_grad()
def evaluate(
    model: Restorer, images: Sequence[Tensor], options: Restoration
) -> tuple[dict[str, float], dict[str, Any]]:
    """Scores on whole images with one draw of mask and noise, and what the figure shows."""
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, float]] = []
    shown: dict[str, Any] = {"traces": []}
    for truth in images:
        known = measure(options.task, truth[None, None], generator)
        (restored, solution), seconds = timed(model, known)
        rows.append({"PSNR": psnr(restored[0, 0], truth), "PSNR, measured": psnr(known.y[0, 0], truth)})
        rows[-1]["s an image"] = seconds
        if solution is not None and solution.trace is not None:
            rows[-1] |= {"evaluations": float(solution.iterations), "converged": float(solution.converged)}
            shown["traces"].append(solution.trace[: int(solution.iterations), 0].tolist())
            if peer := deepinv_model(model.step, known, options):
                restored, seconds = timed(peer[0], known.y, peer[1])
                rows[-1] |= {"deepinv, PSNR": psnr(restored[0, 0], truth), "deepinv, s an image": seconds}
        if "truth" not in shown:
            middle = tuple(slice(side // 2 - 48, side // 2 + 48) for side in truth.shape)
            pictures = {"truth": truth, "measured": known.y[0, 0], "restored": model(known)[0][0, 0]}
            shown |= {part: (255 * x[middle].clamp(0, 1)).byte().tolist() for part, x in pictures.items()}
    shown["psnr"] = [row["PSNR"] for row in rows]
    return {name: fmean(row[name] for row in rows) for name in rows[0]}, shown


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return the result of a call, and its seconds."""
    start = time.perf_counter()
    return call(*arguments), time.perf_counter() - start


def deepinv_model(step: Step, known: Measurement, options: Restoration) -> tuple[Any, Any] | None:
    """Return this equilibrium as deepinv's own DEQ, with its Anderson acceleration, and its physics; None without
    deepinv."""
    with suppress(ImportError):
        from deepinv import optim, physics

        class Prior(nn.Module):
            def forward(self, x: Tensor, sigma: Any) -> Tensor:
                return step.denoiser(x)

        model = optim.PGD(
            data_fidelity=optim.L2(),
            prior=optim.PnP(denoiser=Prior()),
            stepsize=float(step.log_size.exp()),
            sigma_denoiser=DENOISED,
            max_iter=40,
            early_stop=True,
            thres_conv=options.tol,
            DEQ=True,
            anderson_acceleration=True,
        )
        return model, physics.LinearPhysics(A=known.forward, A_adjoint=known.adjoint)
    return None


def draw(records: Sequence[Record]) -> Figure:
    """A part of an image by every arm, and the residuals of the solves."""
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(record.arm, record)
    parts = next(iter(first.values())).shown
    names = {"deq": "DEQ", "explicit-parameters": "equal parameters", "explicit-compute": "equal compute"}
    figure = style.page(5.8, style.NARROW)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 2))[:, 0]
    pictures = {"measured": parts["measured"], "truth": parts["truth"]}
    pictures |= {
        f"{names[arm]}\n{record.shown['psnr'][0]:.2f} dB": record.shown["restored"] for arm, record in first.items()
    }
    axes = above.subplots(2, 3).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, (title, picture) in zip(axes, pictures.items(), strict=False):
        axis.imshow(picture, cmap="gray", vmin=0, vmax=255)
        axis.set_title(title)
    residuals = below.subplots()
    for record in records:
        for trace in record.shown["traces"]:
            residuals.semilogy(range(1, len(trace) + 1), trace, color=style.look(record.arm)["color"], alpha=0.4)
    residuals.set(xlabel="evaluation", ylabel="relative residual", title="solves of the DEQ, one line per image")
    return figure


EXAMPLE = Example(Restoration, train, draw, load)
