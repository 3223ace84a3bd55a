"""How near class means and classifier are to the optima that the class sizes predict; exploratory, no verdict."""

from __future__ import annotations

from itertools import product

import torch
from runs.files import read_arrays

from deqfast.metrics import ClassGeometry, class_geometry

from ..config import Setting
from ..figures import ARMS
from ..rundir import RunDirectory
from .runs import Group, Run
from .tables import Row, over_seeds

TARGETS = {
    "simplex_centered": "simplex, centred",
    "simplex": "simplex",
    "orthogonal": "orthogonal frame",
    "seli": "SELI",
}
CLASSIFIER = {
    "simplex": "simplex",
    "orthogonal": "orthogonal frame",
    "seli": "SELI",
    "minority_cosine": "minority's cosine",
}


def geometry_rows(group: Group) -> list[Row]:
    """Show every arm in every imbalanced setting: distances after the last epoch, over seeds that saved class means."""
    found = []
    for setting, arm in product(group.settings, ARMS):
        runs = group.runs.get((setting, arm), {}).values()
        seeds = [geometry for run in runs if (geometry := geometry_of(run, setting))]
        if seeds and setting.majority:
            row: Row = {"setting, number of seeds": f"{setting.imbalance}, {len(seeds)}", "network": ARMS[arm][0]}
            for part, names in (("means", TARGETS), ("classifier", CLASSIFIER)):
                for name, shown in names.items():
                    row[f"{part}: {shown}"] = over_seeds([getattr(getattr(one, part), name) for one in seeds])
            found.append(row | {"CDNV": over_seeds([one.cdnv for one in seeds])})
    return found


def geometry_of(run: Run, setting: Setting) -> ClassGeometry | None:
    """Measure the geometry after a run's last epoch; None if the run has not saved its class means."""
    path = RunDirectory(run.path).moments
    if not path.exists():
        return None
    last = {name: torch.from_numpy(one[-1:])[0] for name, one in read_arrays(path).items() if name != "epoch"}
    return class_geometry(last["means"], last["counts"], last["weight"], last["traces"], setting.majority_classes)
