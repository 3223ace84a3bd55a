"""Closed forms about the layer-peeled problems, the paper's conditions, and what is computed to hold them against.

With x = K/(K-1) sqrt(E_W E_H) and a simplex ETF for classifier and features, the loss is log(1 + (K-1) exp(-g x)),
where g is by how much the layer stretches the features against a norm of sqrt(E_H). Under a constraint on the final
features g = 1. Under one on h0, a layer with equal singular values on the K-1 dimensions gives g = E_H/sqrt(K-1)
(explicit) or 1/(1 - E_H/sqrt(K-1)) (DEQ); more than that no ETF can have.

No layer stretches any feature by more than g = E_H (explicit) or 1/(1 - E_H) (DEQ), and with this g the same formula
bounds the loss of every feasible point: the logits are W A h0 with ||A|| <= g in the spectral norm, so that their
nuclear norm is at most ||W||_F g ||h0||_F, and over a nuclear ball a simplex ETF is best, by symmetry and convexity.

For small bounds on h0 the ETF need not be the optimum. Let q be the logits' singular values over their sum: ||q|| is 1
for logits of rank one and 1/sqrt(K-1) for a simplex ETF. With s = sqrt(E_W E_H), to leading order the log K - loss of
the DEQ is s (1 + E_H ||q||) - s^2 ||q||^2 / 2, as the best layer adds E_H q_i / ||q|| to direction i; it is greatest
at ||q|| = sqrt(E_H/E_W): at the ETF only from E_W = (K-1) E_H on. The explicit network's is at most s E_H in first
order, at rank one, where the norm of W_EX is in the one direction that is used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .problem import Optimum, Problem

SAME = 1e-5
"""Relative difference up to which two numbers of two solves count as the same."""


def margin(classes: int, e_w: float, e_h: float) -> float:
    """Return x = K/(K-1) sqrt(E_W E_H), the margin of a simplex ETF with norms at the constraints."""
    return classes / (classes - 1) * math.sqrt(e_w * e_h)


def etf_stretch(problem: Problem) -> float:
    """Return g of the best layer for a simplex ETF: equal singular values on its K-1 dimensions."""
    if problem.features == "final":
        return 1.0
    share = problem.e_h / math.sqrt(problem.classes - 1)
    return share if problem.model == "explicit" else 1 / (1 - share)


def largest_stretch(problem: Problem) -> float:
    """Return the largest g that a feasible layer has."""
    if problem.features == "final":
        return 1.0
    return problem.e_h if problem.model == "explicit" else 1 / (1 - problem.e_h)


def closed_form_loss(problem: Problem, stretch: float) -> float:
    """Return the loss of a balanced simplex ETF whose features are stretched by g."""
    x = stretch * margin(problem.classes, problem.e_w, problem.e_h)
    return math.log1p((problem.classes - 1) * math.exp(-x))


def paper_bounds(problem: Problem) -> dict[str, float]:
    """Return (22) of the explicit network or (33) of the DEQ, with the C1 and C2 that Remark B.2 calls best.

    "printed": as it stands. "repaired": its constant taken over from Lemma B.1 instead. (19) turns the lemma
    log-softmax <= M1 margin + M2 into loss >= -M1 margin + C4, and there -M2 has to stand: the C4 that is printed is
    M2 / N with C1 and C2 exchanged, a negative number. Repaired, and at the best C1 and C2, the bound is
    log(1 + (K-1) exp(-margin)), with x for the margin in (22) and 2x in (33).
    """
    classes, n = problem.classes, len(problem.labels)
    x = (1 if problem.model == "explicit" else 2) * margin(classes, problem.e_w, problem.e_h)
    q = (classes - 1) / (classes - 1 + math.exp(x))  # C1 / (C1 + C2)
    printed = ((1 - q) * math.log((1 - q) / (classes - 1)) + q * math.log(q)) / n
    repaired = -q * math.log(q / (classes - 1)) - (1 - q) * math.log(1 - q)
    return {"printed": -q * x + printed, "repaired": -q * x + repaired}


def certified_gap(problem: Problem, optimum: Optimum) -> float:
    """Return how far the loss can at most be above the global minimum.

    The loss is convex in the scaled logits X = (h / radius)(w / radius)^T, which lie in a nuclear ball; its
    linearisation at X bounds it from below everywhere in the ball (the Frank-Wolfe gap).
    """
    with torch.no_grad():
        h, weight = problem.outputs(optimum.point), problem.weight(optimum.point)
        radius = math.sqrt(problem.classes * problem.e_w)
        residual = torch.softmax(h @ weight.T, 1)
        residual[torch.arange(len(residual)), problem.labels] -= 1
        gradient = problem.weights[:, None] * residual * problem.radii * radius
        scaled = (h / problem.radii) @ (weight / radius).T
        lowest = -largest_stretch(problem) * torch.linalg.matrix_norm(gradient, 2)
        return float((gradient * scaled).sum() - lowest)


def simplex_gram(classes: int) -> Tensor:
    """Return Theorem 4.1's S with alpha = 1: the Gram matrix (K, K) of a simplex ETF of unit vectors."""
    return (classes * torch.eye(classes, dtype=torch.float64) - 1) / (classes - 1)


def relative_distance(value: Tensor, target: Tensor) -> float:
    """Return the Frobenius distance of two matrices over the norm of the second."""
    return float(torch.linalg.matrix_norm(value - target) / torch.linalg.matrix_norm(target))


def gram_condition(backbone_means: Tensor, e_h: float) -> dict[str, float]:
    """Count the entries that meet Theorem 4.1's E_H < 2 S_ij - m_ij < 1/(1-E_H), m the Gram matrix of h0's class means.

    It cannot hold for all i, j, whatever E_H > 0, h0 and the scale of S: the entries of S add up to 0, so those of
    2S - m to -|sum of the means|^2 <= 0, where the condition asks for more than K^2 E_H ("sum" and "needed").
    """
    entries = 2 * simplex_gram(len(backbone_means)) - backbone_means @ backbone_means.T
    met = (entries > e_h) & (entries < 1 / (1 - e_h))
    return {
        "met": int(met.sum()),
        "met_off_diagonal": int(met.sum() - met.diagonal().sum()),
        "entries": entries.numel(),
        "sum": float(entries.sum()),
        "needed": entries.numel() * e_h,
    }


def cosine_condition(e_w: float, e_h: float) -> float:
    """Return the left side of Theorem 4.1's E_H/(E_W+E_H) + E_H(1-E_H) < 2; it is always below 1.25."""
    return e_h / (e_w + e_h) + e_h * (1 - e_h)


def gram_distances(means: Tensor, e_h: float) -> dict[str, float]:
    """Return the distance of the Gram matrix of the final class means (K, D) from S at three scales."""
    gram, target = means @ means.T, simplex_gram(len(means))
    unit = gram / torch.linalg.matrix_norm(gram) - target / torch.linalg.matrix_norm(target)
    return {
        "alpha = 1": float(torch.linalg.matrix_norm(gram - target)),
        "alpha = E_H": float(torch.linalg.matrix_norm(gram - e_h * target)),
        "scale-free": float(torch.linalg.matrix_norm(unit)),
    }


def cosines(means: Tensor, weight: Tensor) -> list[float | None]:
    """Return cos(h_k, w_k) of each class; None where a vector has collapsed to less than 1e-5 of the longest of its
    kind."""
    sizes = [torch.linalg.vector_norm(rows, dim=1) for rows in (means, weight)]
    there = (sizes[0] > SAME * sizes[0].max()) & (sizes[1] > SAME * sizes[1].max())
    values = torch.nn.functional.cosine_similarity(means, weight, dim=1, eps=0)
    return [value if exists else None for value, exists in zip(values.tolist(), there.tolist(), strict=True)]
