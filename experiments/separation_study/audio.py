"""Experiment 6: a second of sound as a function of time, t -> amplitude, fitted by a DEQ and by FNNs."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from runs import style
from runs.files import reading
from runs.options import StudyError
from scipy import signal
from scipy.io import wavfile
from torch import Tensor

from .claims import Comparison, compare, comparison
from .frame import RECONSTRUCTION, Experiment, Picture, Section, Unit, experiment, notes
from .networks import DEQ, DOUBLE, Course, Trained, rivals, train
from .sawtooth import LEARNT
from .summary import Kinds, by_task, kinds, log_ratios, networks_table

RATE = 8000  # samples of the fitted second
RESOLUTION = 1e-14  # power density that 16 bits resolve at this rate
WIDTH = 32  # of the DEQ
DEPTH = 3  # hidden layers of the FNNs
OCTAVES = 12  # of the Fourier features: 1, 2, 4, ... periods a second
ENCODINGS = ("plain", "fourier")
SHARES = {"fitted": 0.8, "validation": 0.1, "unseen": 0.1}  # of the samples


@dataclass(frozen=True)
class Sizes:
    """Training, and the name and digest of each WAV file, or a chirp."""

    course: Course
    seeds: int
    recordings: tuple[tuple[str, str], ...] = (("chirp", "drawn"),)


@dataclass(frozen=True)
class Result:
    """DEQ, then FNNs with equal parameters and with equal FLOPs; for seed 0 also the WAV files of the recording and the
    fits, by name."""

    networks: tuple[Trained, ...]
    sounds: dict[str, bytes]


@dataclass(frozen=True)
class Sound:
    """Sound as a task: encoded times x (N, inputs), amplitudes y (N,) of mean 0 and variance 1, the indices of the
    samples in each part, and the part that batches are drawn from."""

    x: Tensor
    y: Tensor
    parts: dict[str, Tensor]
    drawn: str = "fitted"

    scale = 1.0

    def batch(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        """Draw x (B, inputs) and y (B,)."""
        part = self.parts[self.drawn]
        chosen = part[torch.randint(len(part), (size,), generator=generator)]
        return self.x[chosen], self.y[chosen]

    def errors(self, network: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Measure the mean squared error of each part, in units of the variance."""
        squares = (network(self.x) - self.y).square()
        return {name: float(squares[part].mean()) for name, part in self.parts.items()}


def read(path: Path) -> np.ndarray:
    """Return the loudest second of a WAV file, mono and at 8 kHz; Unreadable if there is none."""
    with reading(path, "--audio takes WAV files with a second of finite samples that is not silent"):
        path.name.encode()  # the name is part of records
        rate, samples = wavfile.read(path)
        if not 0 < rate <= len(samples) or not samples.size:
            raise ValueError(f"{len(samples)} samples at {rate} Hz, of {samples.nbytes} bytes")
        mono = samples.reshape(len(samples), -1).astype(np.float64).mean(1)
        power = np.concatenate([[0.0], np.square(mono).cumsum()])
        start = int(np.argmax(power[rate:] - power[:-rate]))
        second = mono[start : start + rate]
        if not np.isfinite(second).all() or not np.ptp(second):
            raise ValueError("its loudest second is not finite, or silent")
        resampled = np.asarray(signal.resample_poly(second, RATE, rate))
    return resampled


def as_task(samples: np.ndarray, encoding: str, seed: int) -> Sound:
    """Encode the times of a second, t itself in [-1, 1) or sines and cosines, and divide the samples at random."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    parts = order.split([round(share * len(samples)) for share in SHARES.values()])
    t = torch.arange(len(samples), dtype=DOUBLE)[:, None] / len(samples)
    phase = 2 * math.pi * t * 2.0 ** torch.arange(OCTAVES)
    x = 2 * t - 1 if encoding == "plain" else torch.cat([phase.sin(), phase.cos()], 1)
    amplitudes = torch.from_numpy((samples - samples.mean()) / samples.std())
    return Sound(x, amplitudes, dict(zip(SHARES, parts, strict=True)))


def as_wav(samples: Tensor, peak: float) -> bytes:
    """Make a WAV file of 16 bits, in which `peak` is the loudest."""
    content = io.BytesIO()
    scaled = (samples.nan_to_num() / peak).clamp(-1, 1) * 32767
    wavfile.write(content, RATE, scaled.round().to(torch.int16).numpy())
    return content.getvalue()


def measure(sizes: Sizes, unit: Unit, folder: Path | None = None) -> Result:
    """Train the networks on a recording of the folder, or on a chirp from 50 to 800 Hz."""
    recording, _, encoding = unit.task.rpartition("-")
    chirp = signal.chirp(np.arange(RATE) / RATE, 50, 1, 800)
    task = as_task(read(folder / f"{recording}.wav") if folder else chirp, encoding, unit.seed)
    learn = partial(train, task=task, course=sizes.course, seed=unit.seed, held_out=replace(task, drawn="validation"))
    inputs = task.x.shape[1]
    fits = [learn("DEQ", partial(DEQ, inputs, WIDTH))]
    fits += [learn(f"FNN, equal {rule}", make) for rule, make in rivals(fits[0][0], inputs, DEPTH).items()]
    with torch.no_grad():
        sounds = {"recording": task.y} | {trained.name: network(task.x) for trained, network in fits}
    wavs = {f"{name}.wav": as_wav(sound, float(task.y.abs().max())) for name, sound in sounds.items()}
    return Result(tuple(trained for trained, _ in fits), wavs if unit.seed == 0 else {})


def tasks(sizes: Sizes) -> list[str]:
    """Return a task for each recording and encoding."""
    return [f"{name}-{encoding}" for name, _ in sizes.recordings for encoding in ENCODINGS]


def section(sizes: Sizes, results: dict[Unit, Result]) -> Section:
    """Judge the DEQ's error against the FNNs' under either encoding, over all recordings."""
    networks = {task: kinds(by_seed) for task, by_seed in by_task(results).items()}
    claims = compare(
        [
            _comparison(encoding, rule, [every for task, every in networks.items() if task.endswith(encoding)])
            for encoding in ENCODINGS
            for rule in ("parameters", "FLOPs")
            if any(task.endswith(encoding) for task in networks)
        ]
    )
    heard = ", ".join(f"{name} ({digest[:8]})" for name, digest in sizes.recordings)
    items = notes("audio", rate=RATE, heard=heard, octaves=OCTAVES, width=WIDTH, depth=DEPTH, **SHARES)
    columns = {part: partial(Trained.error, name=part) for part in SHARES}
    table = networks_table("Errors on sound", RECONSTRUCTION, networks, columns)
    sounds = {unit.task: result.sounds for unit, result in results.items() if result.sounds}
    return Section([*items, *notes("matched")], claims, [table], [_picture(sounds)] if sounds else [])


def _comparison(encoding: str, rule: str, recordings: list[Kinds]) -> Comparison:
    fitted = partial(Trained.error, name="fitted")
    pairs = [(deq, fnn) for deq, *fnns in recordings for fnn in fnns if fnn[0].name.endswith(rule)]
    lowest = min(fitted(network) for pair in pairs for seeds in pair for network in seeds)
    differences = [log_ratios(*pair, fitted) for pair in pairs]
    return comparison("audio", differences, lowest <= LEARNT, encoding=encoding, rule=rule, lowest=lowest)


def _picture(tasks: dict[str, dict[str, bytes]]) -> Picture:
    figure, axes = style.panels(-(-len(tasks) // 2), min(2, len(tasks)), sharex=True, sharey=True)
    for axis, (task, sounds) in zip(axes.flat, tasks.items(), strict=False):
        for name, content in sounds.items():
            frequencies, power = signal.welch(wavfile.read(io.BytesIO(content))[1] / 32767, RATE)
            look = style.look(name) | {"marker": ""}
            axis.semilogy(frequencies, power, label=name.removesuffix(".wav"), **look)
        axis.set(title=task, xlabel="Hz", ylabel="power density", ylim=(RESOLUTION, None))
    style.legend(figure)
    return Picture("audio", "Spectra of the fits", RECONSTRUCTION, "Power density by Welch's method, seed 0.", figure)


AUDIO = experiment(
    __name__,
    "Audio",
    quick=Sizes(Course(150, 128, (0.003, 0.01), 1), 1),
    full=Sizes(Course(1000, 128, (0.003, 0.01, 0.03), 4), 5),
    files=attrgetter("sounds"),
)


def recorded(folder: Path) -> Experiment:
    """Make the experiment on the WAV files of a folder; StudyError if it holds none, or one that cannot be fitted."""
    paths = sorted(folder.glob("*.wav"))
    if not paths:
        raise StudyError(f"--audio {folder}: there must be a WAV file (*.wav) in it")
    for path in paths:
        read(path)
    recordings = tuple((path.stem, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths)
    sizes = {preset: replace(usual, recordings=recordings) for preset, usual in AUDIO.sizes.items()}
    return replace(AUDIO, sizes=sizes, measure=partial(measure, folder=folder))
