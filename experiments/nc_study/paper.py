"""Numbers printed by Sun & Shi (NeurIPS 2024, arXiv 2410.23391): Tables 1 to 4, the settings of each table and figure,
and every claim that the layer-peeled problems can judge."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from runs.options import StudyError, flag_of

from .config import BOTH, Experiment, Setting, preset_values
from .record import Accuracy, Spread

RATIOS = (10, 50, 100)
DATA_SETS = {"cifar": ("cifar10", "cifar100")}
"""Value of --dataset in addition to single data sets."""

# (K_A, R); the balanced case has neither.
Imbalance = tuple[int | None, int | None]
_BALANCED: Imbalance = (None, None)
TABLES: dict[str, tuple[Imbalance, ...]] = {
    "1": (_BALANCED,),
    **{table: tuple((majority, ratio) for ratio in RATIOS) for table, majority in (("2", 3), ("3", 5), ("4", 7))},
}
FIGURES: dict[str, tuple[Imbalance, ...]] = {
    "2": ((3, 10),),
    "3": (_BALANCED, (5, 100)),
    "4": ((3, 100),),
    "5": ((7, 100),),
}
COURSES: dict[Imbalance, tuple[str, str]] = {
    _BALANCED: ("Fig. 3a", "NC2 falls to 0.2"),
    (5, 100): ("Fig. 3b", "the axis of accuracy ends at 40 %"),
    (3, 100): ("Fig. 4", "the axis of accuracy ends at 28 %"),
    (7, 100): ("Fig. 5", "100 epochs"),
}
"""The figure that shows a setting's course of training on CIFAR-10, and what is known of its ranges."""

# Percent. Data, K_A, R | explicit: overall, majority, minority | DEQ: the same. Without K_A and R: balanced.
_ACCURACIES = """
cifar10        | 93.05±0.17 | 93.23±0.13
cifar100       | 64.35±0.20 | 64.77±0.36
cifar10  3  10 | 72.57±0.25 96.40±0.32 62.36±0.12 | 73.84±0.72 96.68±0.87 64.06±0.66
cifar10  3  50 | 44.32±0.23 96.80±0.29 21.83±0.20 | 46.08±1.06 96.63±0.98 24.42±1.32
cifar10  3 100 | 32.14±0.81 91.67±0.61 6.64±0.99 | 34.18±1.28 93.33±1.36 8.83±1.08
cifar100 3  10 | 41.41±0.56 73.03±0.62 27.86±0.39 | 43.72±0.60 74.16±0.82 30.67±0.53
cifar100 3  50 | 28.18±0.42 74.53±0.55 8.31±0.38 | 30.46±1.27 73.63±0.95 11.96±1.66
cifar100 3 100 | 23.43±0.92 73.46±0.56 1.99±1.06 | 24.78±1.93 74.89±0.88 3.31±2.45
cifar10  5  10 | 80.73±0.48 94.18±0.56 67.80±0.35 | 81.36±1.03 93.14±1.81 69.58±0.66
cifar10  5  50 | 63.08±0.87 91.02±0.89 35.14±0.65 | 65.03±1.90 90.88±2.83 39.18±1.46
cifar10  5 100 | 44.86±1.43 89.32±0.79 0.40±3.86 | 46.09±1.77 90.20±0.85 1.26±4.93
cifar100 5  10 | 52.62±0.86 74.10±1.03 31.10±0.70 | 53.31±0.98 72.90±1.65 33.72±0.79
cifar100 5  50 | 41.62±0.68 73.94±0.25 9.30±1.10 | 44.07±2.04 75.98±1.75 12.16±3.75
cifar100 5 100 | 37.33±2.29 74.24±1.13 0.42±3.04 | 39.11±2.46 75.79±0.96 2.42±5.89
cifar10  7  10 | 83.17±0.40 89.09±0.36 69.37±0.49 | 83.78±1.85 88.98±1.99 71.65±1.63
cifar10  7  50 | 66.91±0.39 80.90±0.57 34.26±0.30 | 69.47±1.86 82.91±2.22 38.12±1.61
cifar10  7 100 | 53.27±0.81 75.12±0.74 2.30±1.01 | 56.74±0.98 78.81±0.67 5.20±1.91
cifar100 7  10 | 59.11±0.84 71.93±0.65 29.20±0.92 | 60.51±0.88 72.90±1.19 31.13±0.83
cifar100 7  50 | 51.71±1.02 72.20±0.66 3.90±1.29 | 52.99±1.86 72.99±0.98 6.33±2.35
cifar100 7 100 | 50.72±0.60 72.46±0.58 0.00±0.00 | 51.79±0.92 73.98±0.66 0.00±0.00
"""


def _numbers() -> dict[Setting, dict[str, Accuracy]]:
    numbers: dict[Setting, dict[str, Accuracy]] = {}
    for line in _ACCURACIES.strip().splitlines():
        key, *columns = line.split("|")
        dataset, *imbalance = key.split()
        networks = numbers[Setting(dataset, *map(int, imbalance))] = {}
        for model, column in zip(BOTH, columns, strict=True):
            pairs = [value.split("±") for value in column.split()]
            networks[model] = Accuracy(*(Spread(float(mean), float(std)) for mean, std in pairs))
    return numbers


PAPER = _numbers()
"""Accuracy in percent by setting and network: mean and deviation over the last ten epochs."""

INCONSISTENT = frozenset(
    {
        (Setting("cifar10", 5, 10), "explicit"),
        (Setting("cifar10", 5, 100), "deq"),
        (Setting("cifar100", 7, 10), "deq"),
    }
)
"""Entries printed with an overall accuracy that is not the class mean of the other two."""


def on_cifar(setting: Setting) -> Setting:
    """Setting of the paper with the same imbalance and number of classes: shapes replace CIFAR."""
    return replace(setting, dataset="cifar10" if setting.classes == 10 else "cifar100")


def differences(experiment: Experiment, without: Collection[str] = ()) -> list[str]:
    """Differences of a run from the paper's experiment, except the options in `without`; empty if there are none."""
    found = []
    if experiment.dataset.startswith("shapes"):
        found.append(f"{experiment.dataset}, not CIFAR")
    wanted = {
        "imbalance": "step",
        "loss": "cross-entropy",
        "solver": "broyden",
        "tol": 1e-3,
        "max_iter": 20,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "scale": 1.0,
    }
    # The bounds are the paper's; it does not say how it kept them.
    wanted |= {name: 0.01 for name in ("e_w", "e_h") if getattr(experiment, name) is not None}
    for name, value in {**wanted, **preset_values("paper", experiment.classes)}.items():
        if name not in ("metrics_every", *without) and getattr(experiment, name) != value:
            found.append(f"{flag_of(name)[2:]} {getattr(experiment, name)} instead of {value}")
    return found


def settings_of(tables: str | None, figures: str | None, dataset: str) -> list[Setting]:
    """Settings of comma-separated numbers, or "all", of tables and figures, each once, in the paper's order.

    With dataset "cifar" the tables take both CIFAR sets and the figures, as in the paper, CIFAR-10.
    """
    named = DATA_SETS.get(dataset, (dataset,))
    chosen = _chosen("--table", tables, TABLES)
    found = [Setting(name, *imbalance) for table in chosen for name in named for imbalance in TABLES[table]]
    for figure in _chosen("--figure", figures, FIGURES):
        found += [Setting(named[0], *imbalance) for imbalance in FIGURES[figure]]
    return list(dict.fromkeys(found))


def _chosen(flag: str, text: str | None, known: dict[str, tuple[Imbalance, ...]]) -> list[str]:
    if text is None:
        return []
    numbers = list(known) if text == "all" else text.split(",")
    for number in numbers:
        if number not in known:
            raise StudyError(f"{flag} {text}: all, or some of {', '.join(known)} with commas between")
    return numbers


_LOWER_BOUND = "lower bound of the loss, its constant {name}"
_REPAIRED_BOUND = "that bound, its constant repaired, is the infimum"
_LOWER_LOSS = "the DEQ reaches a lower loss"

THEORY: dict[str, tuple[str, str]] = {
    "balanced nc1": ("Theorem 3.1, NC1", "features collapse to class means"),
    "balanced nc2": ("Theorem 3.1, NC2", "class means form a simplex ETF"),
    "balanced nc3": ("Theorem 3.1, NC3", "self-duality"),
    "balanced gram": ("Theorem 3.1, NC2", "W W^T = sqrt(E_W/E_H) W H = K E_W/(K-1) (I - 11^T/K)"),
    "balanced loss": ("Theorem B.3", _LOWER_LOSS),
    "bound explicit": ("(22)", _LOWER_BOUND),
    "bound deq": ("(33)", _LOWER_BOUND),
    "repaired explicit": ("(22)", _REPAIRED_BOUND),
    "repaired deq": ("(33)", _REPAIRED_BOUND),
    "two classes": ("(33)", "lower bound (repaired), two classes, E_H > 1/2"),
    "imbalanced nc1": ("Theorem 4.1, NC1", "features collapse to class means"),
    "imbalanced nc2 condition": ("Theorem 4.1, NC2", "condition E_H < 2 S_ij - m_ij < 1/(1-E_H) for all i, j"),
    "imbalanced nc2": ("Theorem 4.1, NC2", "Gram matrix of the DEQ nearer to the ETF, {scale}, {name}"),
    "imbalanced nc3 condition": ("Theorem 4.1, NC3", "condition E_H/(E_W+E_H) + E_H(1-E_H) < 2"),
    "imbalanced nc3": ("Theorem 4.1, NC3", "cos(h_k, w_k) larger for the DEQ in every class, {name}"),
    "imbalanced loss": ("Section 4", _LOWER_LOSS),
    "majority_nc1": ("Proposition 4.2", "majority features collapse to class means"),
    "majority_nc2": ("Proposition 4.2", "majority class means form a K_A-simplex ETF"),
    "majority_nc2_centered": ("Proposition 4.2", "they do so after centring"),
    "minority_weight": ("Proposition 4.2", "minority classifiers are 0"),
    "minority_feature": ("Proposition 4.2", "minority features are 0"),
    "minority_spread": ("Fang et al., Theorem 5", "minority classifiers are equal (Fang et al.)"),
    "limit alike": ("Proposition 4.2", "explicit network and DEQ nearly alike"),
}
"""Source and text of each claim about the optima of the layer-peeled problems (7), (9) and (10); `{name}` and `{scale}`
stand for the variant that is judged. The keys of Proposition 4.2 name the quantity in the record. Fang et al.: PNAS
2021."""
