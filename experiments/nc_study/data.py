"""Images of a study: CIFAR or drawn shapes, the step imbalance, and crops and flips on the device."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs.options import StudyError
from torch import Tensor
from torch.nn import functional as F

from . import distributed
from .config import Settings
from .shapes import draw_shapes

PAD = 4
ROUNDING = 1e-12  # relative, of a power
NETWORK_SECONDS = 10.0
DAY_SECONDS = 86400.0  # no download takes that long
CHANNELS = {
    "cifar10": ((0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)),
    "cifar100": ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)),
}


@dataclass(frozen=True)
class Source:
    """Available data set: its name, why it replaces another one ("" if not), and its splits if they come from files."""

    name: str
    reason: str
    train: tuple[np.ndarray, np.ndarray] | None = None
    test: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True)
class StudyData:
    """uint8 images (N, 3, 32, 32) and labels of both splits on one device, and the channels' mean and deviation."""

    counts: tuple[int, ...]
    majority: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    mean: Tensor
    std: Tensor
    augmented: bool = True

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.counts)

    def steps(self, batch_size: int) -> int:
        """Batches in an epoch."""
        return -(-len(self.train_images) // batch_size)

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 images as channels-last floats with the data set's channel mean and deviation taken out."""
        scaled = (images.float() / 255 - self.mean[:, None, None]) / self.std[:, None, None]
        return scaled.contiguous(memory_format=torch.channels_last)

    def epoch(self, seed: int, epoch: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches of one epoch, cropped and flipped if the data are to be augmented. They depend only on
        (seed, epoch), on every device. Each of several processes gets its share of every batch."""
        device, total = self.train_images.device, len(self.train_images)
        stream = generator(seed, epoch)
        order = torch.randperm(total, generator=stream).to(device)
        offsets = torch.randint(2 * PAD + 1, (total, 2), generator=stream).to(device)
        flips = torch.randint(2, (total,), generator=stream).bool().to(device)
        for start in range(0, total, batch_size):
            part = distributed.share(start, min(start + batch_size, total))
            images = self.train_images[order[part]]
            images = crop_and_flip(images, offsets[part], flips[part]) if self.augmented else images
            yield self.normalise(images), self.train_labels[order[part]]

    def plain(self, split: str, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images of "train" or "test", or this process's share of them, in their order and not augmented. Without any
        images, an empty batch."""
        mine = distributed.share(0, len(getattr(self, f"{split}_labels")))
        images, labels = (getattr(self, f"{split}_{part}")[mine] for part in ("images", "labels"))
        for start in range(0, max(1, len(images)), batch_size):
            yield self.normalise(images[start : start + batch_size]), labels[start : start + batch_size]


def generator(*key: int) -> torch.Generator:
    """A private CPU generator for a key of integers: the same for the same key, unrelated for different ones."""
    word = np.random.SeedSequence(key).generate_state(1, np.uint32)[0]
    return torch.Generator().manual_seed(int(word))


def crop_and_flip(images: Tensor, offsets: Tensor, flips: Tensor) -> Tensor:
    """Image i padded by 4 black pixels, cut to its size at offsets[i] = (row, column), and mirrored if flips[i]."""
    size, sample = images.shape[-1], torch.arange(len(images), device=images.device)
    windows = F.pad(images, (PAD,) * 4).unfold(2, size, 1).unfold(3, size, 1)  # (N, 3, row, column, size, size)
    cut = windows[sample, :, offsets[:, 0], offsets[:, 1]]
    return torch.where(flips[:, None, None, None], cut.flip(3), cut)


def class_sizes(settings: Settings) -> list[int]:
    """Training images of each class: n_A for the first classes and n_A / R for the rest, or n_A for all. With the
    imbalance `exp`, n_A R^(-k / (K - 1)) for k = 0 .. K - 1, rounded down, at least 1."""
    if settings.imbalance == "exp":
        shares = np.arange(settings.classes) / (settings.classes - 1)
        exact = settings.n_majority / np.float64(settings.ratio or 1) ** shares
        whole = np.floor(exact * (1 + ROUNDING))  # a power that is a whole number may be rounded to less
        return [int(size) for size in whole.clip(min=1)]
    majority, minority = settings.setting.majority_classes, settings.n_majority // (settings.ratio or 1)
    return [settings.n_majority] * majority + [minority] * (settings.classes - majority)


def shuffled_classes(labels: np.ndarray) -> list[np.ndarray]:
    """Indices of each class, class after class, in the order of LDAM-DRW, which its random numbers give."""
    random = np.random.RandomState(0)
    by_label = [np.where(labels == label)[0] for label in range(labels.max() + 1)]
    for indices in by_label:
        random.shuffle(indices)
    return by_label


def select_images(labels: np.ndarray, sizes: list[int], held_out: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training images of each class, the first in LDAM-DRW's order; and of the last `held_out` of each
    class, which are not trained on."""
    order = shuffled_classes(labels)
    for label, (indices, size) in enumerate(zip(order, sizes, strict=True)):
        if len(indices) < size + held_out:
            kept = f" and {held_out} for --evaluate validation" if held_out else ""
            raise StudyError(f"--n-majority {size}{kept}: class {label} has {len(indices)} images")
    kept_out = [np.sort(indices[len(indices) - held_out :]) for indices in order]
    chosen = [indices[:size] for indices, size in zip(order, sizes, strict=True)]
    return np.concatenate(chosen), np.concatenate(kept_out)


def find_source(dataset: str, root: Path) -> Source:
    """Read the requested data set; `auto` takes shapes if CIFAR-10 is not available, and records why."""
    if dataset.startswith("shapes"):
        return Source(dataset, "")
    name = "cifar10" if dataset == "auto" else dataset
    try:
        return Source(name, "", *_read(name, root))
    except _CannotHave as reason:
        if dataset == "auto":
            return Source("shapes", str(reason))
        advice = "put its files under --data-root (experiments/README.md), or take --dataset shapes, which needs none"
        raise StudyError(f"--dataset {name}: {reason}; {advice}") from reason
    except OSError as error:
        raise StudyError(f"--data-root {root}: {error}") from error


def load(source: Source, settings: Settings, device: torch.device) -> StudyData:
    """Select the training and test images of the settings, and copy them to the device."""
    classes, sizes = settings.classes, class_sizes(settings)
    each = settings.test_images // classes
    held_out = each if settings.evaluate == "validation" else 0
    drawn = np.repeat(np.arange(classes), np.array(sizes) + held_out)
    train = source.train or draw_shapes(drawn, classes, seed=0)
    mean, std = CHANNELS.get(source.name) or _channels(train[0])
    trained, validated = select_images(train[1], sizes, held_out)
    if held_out:
        chosen = {"train": (train, trained), "test": (train, validated)}
    else:
        test = source.test or draw_shapes(np.arange(settings.test_images) % classes, classes, seed=1)
        chosen = {"train": (train, trained), "test": (test, _first_of_each(test[1], settings))}
    splits: dict[str, Tensor] = {}
    for name, ((images, labels), kept) in chosen.items():
        splits[f"{name}_images"] = torch.from_numpy(images[kept].transpose(0, 3, 1, 2).copy()).to(device)
        splits[f"{name}_labels"] = torch.from_numpy(labels[kept]).to(device)
    return StudyData(
        counts=tuple(sizes),
        majority=settings.setting.majority_classes,
        mean=torch.tensor(mean, dtype=torch.float32, device=device),
        std=torch.tensor(std, dtype=torch.float32, device=device),
        augmented=not settings.no_augmentation,
        **splits,
    )


def _channels(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each channel."""
    scaled = images.reshape(-1, 3).astype(np.float64) / 255
    return scaled.mean(axis=0), scaled.std(axis=0)


def _first_of_each(labels: np.ndarray, settings: Settings) -> np.ndarray:
    size = settings.test_images // settings.classes
    groups = [np.where(labels == label)[0][:size] for label in range(settings.classes)]
    if min(map(len, groups)) < size:
        raise StudyError(f"--test-images {settings.test_images}: the test set has {len(labels)}")
    return np.sort(np.concatenate(groups))


class _CannotHave(Exception):
    """Reason why a data set is neither on disk nor available from the network."""


def _read(name: str, root: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test split of the CIFAR files under root, which are unpacked or downloaded if they are missing."""
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:
        raise _CannotHave(f"torchvision, which reads the CIFAR files, cannot be imported ({error})") from error
    kind: Any = getattr(datasets, name.upper())
    folder, archive = root / kind.base_folder, root / kind.filename
    if not folder.exists() and archive.exists():
        if not datasets.utils.check_integrity(str(archive), kind.tgz_md5):
            raise StudyError(f"{archive} is damaged or not wholly downloaded: delete it to have it fetched again")
        kind(str(root), download=True)  # unpacks it
    elif not folder.exists():
        _download(kind, root)
    try:
        splits = [kind(str(root), train=train) for train in (True, False)]
    except RuntimeError as error:  # a wrong checksum
        advice = f"restore it, or delete {folder} to have it fetched again"
        raise StudyError(f"a file in {folder} is missing, damaged or not wholly copied: {advice}") from error
    return [(split.data, np.asarray(split.targets, dtype=np.int64)) for split in splits]


def _download(kind: Any, root: Path) -> None:
    """Fetch into a temporary folder first, so that a broken download leaves no files that look like data."""
    print(f"downloading {kind.url} to {root}", flush=True)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_SECONDS)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for old in root.glob(".download-*"):  # of processes that were killed
            if time.time() - old.stat().st_mtime > DAY_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as temporary:
            kind(temporary, download=True)
            os.replace(Path(temporary) / kind.base_folder, root / kind.base_folder)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        raise _CannotHave(f"not under {root}, and the download failed ({error})") from error
    finally:
        socket.setdefaulttimeout(before)
