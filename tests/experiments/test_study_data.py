"""Data: the selection of LDAM-DRW, drawn shapes, crops and flips, CIFAR files that are whole, damaged or absent."""

import hashlib
import pickle
import shutil
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from nc_study import data
from nc_study.config import settings_from
from nc_study.data import Source, class_sizes, crop_and_flip, find_source, load, select_images
from nc_study.shapes import draw_shapes
from runs.options import StudyError
from study_helpers import CPU, shapes_data
from torchvision.datasets import CIFAR10, CIFAR100, utils


def ldam_selection(targets, per_class):
    """The procedure of LDAM-DRW's IMBALANCECIFAR10 with rand_number = 0, on numpy's global generator."""
    np.random.seed(0)
    chosen = []
    for the_class, the_number in zip(np.unique(targets), per_class, strict=True):
        idx = np.where(targets == the_class)[0]
        np.random.shuffle(idx)
        chosen.extend(idx[:the_number])
    return chosen


@pytest.mark.parametrize("ratio", [10, 100])
def test_selection_equals_ldam_index_for_index(ratio):
    labels = np.random.default_rng(3).permutation(np.repeat(np.arange(10), 5000))
    settings = settings_from("cifar_lt", preset="paper", device="cpu", majority=5, ratio=ratio)
    per_class = [5000] * 5 + [int(5000 * (1 / ratio))] * 5
    assert select_images(labels, class_sizes(settings))[0].tolist() == ldam_selection(labels, per_class)
    with pytest.raises(StudyError, match="--n-majority 6000: class 0 has 5000 images"):
        select_images(labels, [6000] * 10)


@pytest.mark.parametrize(("classes", "most", "ratio"), [(10, 5000, 100), (100, 500, 10), (10, 500, 1)])
def test_the_long_tail_is_ldams(classes, most, ratio):
    """Its get_img_num_per_cls for imb_type "exp", with imb_factor = 1 / R."""
    expected = [int(most * ((1 / ratio) ** (cls_idx / (classes - 1.0)))) for cls_idx in range(classes)]
    given = {"preset": "paper", "device": "cpu", "imbalance": "exp", "ratio": ratio, "n_majority": most}
    assert class_sizes(settings_from("cifar_lt", dataset=f"cifar{classes}", **given)) == expected


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_the_long_tail_ends_at_its_ratio(dataset):
    """Where R divides n_A the last class has n_A / R images, although the power is rounded."""
    for ratio in range(2, 501):
        most = 5000 // ratio * ratio
        settings = settings_from(
            "cifar_lt", dataset=dataset, device="cpu", imbalance="exp", ratio=ratio, n_majority=most
        )
        sizes = class_sizes(settings)
        assert (sizes[0], sizes[-1]) == (most, most // ratio) and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("source", ["files", "drawn"])
def test_validation_images_are_training_images_that_are_not_trained_on(source):
    given = {"dataset": "cifar10", "device": "cpu", "n_majority": 20, "ratio": 4, "test_images": 50}
    settings = settings_from("cifar_lt", **given, evaluate="validation")
    given = Source("shapes", "")
    if source == "files":
        images, labels = draw_shapes(np.arange(300) % 10, 10, seed=3)
        given = Source("cifar10", "", (images, labels), (np.zeros_like(images), labels))
    study = load(given, settings, CPU)
    assert torch.bincount(study.train_labels).tolist() == [20] * 3 + [5] * 7
    assert torch.bincount(study.test_labels).tolist() == [5] * 10
    both = torch.cat([study.train_images, study.test_images]).flatten(1)
    assert len(both.unique(dim=0)) == len(both) and both.any(1).all(), "neither trained on nor from the test set"
    if source == "files":
        whole = load(given, replace(settings, evaluate="test"), CPU)
        assert torch.equal(study.train_images, whole.train_images), "what is trained on does not depend on it"
        with pytest.raises(StudyError, match="--n-majority 28 and 5 for --evaluate validation: class 0 has 30 images"):
            load(given, replace(settings, n_majority=28), CPU)


def test_crop_and_flip_agree_with_one_image_at_a_time():
    random = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (40, 3, 32, 32), generator=random).to(torch.uint8)
    offsets = torch.randint(9, (40, 2), generator=random)
    offsets[0], offsets[1] = torch.tensor([0, 0]), torch.tensor([8, 8])
    flips = torch.arange(40) % 2 == 1
    batch = crop_and_flip(images, offsets, flips)
    for image, (row, column), flip, result in zip(images, offsets.tolist(), flips, batch, strict=True):
        canvas = torch.zeros(3, 40, 40, dtype=torch.uint8)
        canvas[:, 4:36, 4:36] = image
        expected = canvas[:, row : row + 32, column : column + 32]
        assert torch.equal(result, expected.flip(2) if flip else expected)


def test_an_epoch_is_a_function_of_seed_and_epoch():
    settings = settings_from("cifar_lt", dataset="shapes", n_majority=20, test_images=40, device="cpu")
    study = shapes_data(settings)
    torch.manual_seed(0)
    first = list(study.epoch(1, 2, 16))
    torch.manual_seed(99)
    again = list(study.epoch(1, 2, 16))
    assert torch.bincount(torch.cat([labels for _, labels in first])).tolist() == list(study.counts)
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, again, strict=True))
    for seed, epoch in ((1, 3), (2, 2)):
        assert not torch.equal(first[0][0], next(iter(study.epoch(seed, epoch, 16)))[0])


def write_cifar(root, dataset, per_class, monkeypatch):
    """Files in the format of torchvision's CIFAR class, whose checksums it then expects; {"train", "test"} labels."""
    folder = root / dataset.base_folder
    folder.mkdir(parents=True)
    key, classes = ("labels", 10) if dataset.__name__ == "CIFAR10" else ("fine_labels", 100)
    random = np.random.default_rng(0)

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    labels = {}
    for split in ("train", "test"):
        drawn, entries = [], []
        for name, _ in getattr(dataset, f"{split}_list"):
            drawn.append(random.permutation(np.arange(per_class * classes) % classes))
            pixels = random.integers(256, size=(len(drawn[-1]), 3072), dtype=np.uint8)
            entries.append([name, write(name, {"data": pixels, key: drawn[-1].tolist()})])
        monkeypatch.setattr(dataset, f"{split}_list", entries)
        labels[split] = np.concatenate(drawn)
    md5 = write(dataset.meta["filename"], {dataset.meta["key"]: [str(label) for label in range(classes)]})
    monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": md5})
    return labels


@pytest.mark.parametrize(("name", "dataset", "classes"), [("cifar10", CIFAR10, 10), ("cifar100", CIFAR100, 100)])
def test_cifar_files_are_read(name, dataset, classes, tmp_path, monkeypatch):
    labels = write_cifar(tmp_path, dataset, per_class=4, monkeypatch=monkeypatch)
    source = find_source(name, tmp_path)
    assert (source.name, source.reason) == (name, "")
    monkeypatch.setattr(data, "_channels", lambda _: pytest.fail("the channels are known"))
    given = {"n_majority": 4, "ratio": 2, "majority": 3, "test_images": 2 * classes, "device": "cpu"}
    settings = settings_from("cifar_lt", dataset=name, **given)
    study = load(source, settings, CPU)
    assert list(study.counts) == [4] * (3 * classes // 10) + [2] * (7 * classes // 10)
    kept = ldam_selection(labels["train"], study.counts)
    assert study.train_labels.tolist() == labels["train"][kept].tolist()
    assert torch.equal(study.train_images[5], torch.from_numpy(source.train[0][kept[5]]).permute(2, 0, 1))
    assert torch.bincount(study.test_labels).tolist() == [2] * classes


@pytest.mark.parametrize(("dataset", "damage"), [("auto", "changed"), ("cifar10", "missing")])
def test_damaged_files_are_an_error_and_not_replaced_by_shapes(dataset, damage, tmp_path, monkeypatch):
    (tmp_path / CIFAR10.filename).write_bytes(b"\x1f\x8b half of it")
    with pytest.raises(StudyError, match="cifar-10-python.tar.gz is damaged or not wholly downloaded"):
        find_source(dataset, tmp_path)
    write_cifar(tmp_path, CIFAR10, per_class=1, monkeypatch=monkeypatch)
    assert find_source(dataset, tmp_path).name == "cifar10"
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"?" + content[101:]) if damage == "changed" else path.unlink()
    with pytest.raises(StudyError, match="cifar-10-batches-py is missing, damaged or not wholly copied: restore it"):
        find_source(dataset, tmp_path)


def test_what_is_not_there_is_downloaded_and_unpacked_or_replaced_by_shapes(tmp_path, monkeypatch):
    made, root, archive = tmp_path / "made", tmp_path / "new" / "data", tmp_path / CIFAR10.filename
    write_cifar(made, CIFAR10, per_class=1, monkeypatch=monkeypatch)
    with tarfile.open(archive, "w:gz") as file:
        file.add(made / CIFAR10.base_folder, CIFAR10.base_folder)
    content = archive.read_bytes()
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(content).hexdigest())
    monkeypatch.setattr(utils, "_get_redirect_url", lambda url, **given: url)
    monkeypatch.setattr(utils, "_urlretrieve", lambda url, path: shutil.copy(archive, path))
    archive.write_bytes(content[:1000])
    source = find_source("auto", root)
    assert source.name == "shapes" and "download failed" in source.reason and not list(root.iterdir())
    with pytest.raises(StudyError, match="--dataset cifar10: .*download failed"):
        find_source("cifar10", root)
    archive.write_bytes(content)
    source = find_source("auto", root)
    assert source.name == "cifar10" and len(source.train[0]) == 50
    assert [path.name for path in root.iterdir()] == [CIFAR10.base_folder]
    monkeypatch.setattr(data, "_download", lambda *_: pytest.fail("network"))
    assert find_source("cifar10", root).name == find_source("auto", tmp_path).name == "cifar10"
