"""A diagnosis: its findings on cells with known answers, and that its advice mends."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
import warnings

import pytest
import torch
from correctness import assert_close
from own_sums import LoopedFCCell
from torch import nn
from torchvision.models.resnet import BasicBlock

import deqfast
from deqfast import Broyden, DEQBlock, Neumann, Phantom, Picard, diagnose
from deqfast.diagnosis.measure import find_remedy
from deqfast.diagnosis.problem import Problem


def said(report: deqfast.Diagnosis) -> str:
    return " ".join(report.advice)


class TestFindings:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_contraction_and_gradients_of_a_multiple_of_the_identity(self, dtype):
        q, x = 0.6, torch.randn(5, 8, dtype=dtype)
        report = diagnose(DEQBlock(lambda z, x: q * z + x, adjoint=Neumann(3)), x, samples=2)
        assert report.converged and bool(report.settled.all())
        assert_close(report.radius, torch.full((5,), q).double(), 1e-3)
        assert_close(report.norm, torch.full((5,), q).double(), 1e-3)
        expected = {"JFB()": q, "Neumann(steps=3, relaxation=1.0)": q**3}
        expected["Phantom(steps=5, relaxation=0.5)"] = ((1 + q) / 2) ** 5
        assert report.gradients.keys() == expected.keys()
        for name, error in expected.items():
            for value in (report.gradients[name].estimated, report.gradients[name].measured):
                assert_close(value, torch.full((2,), error).double(), 1e-2)

    def test_a_norm_above_the_radius(self):
        matrix, x = torch.tensor([[0.5, 3.0], [0.0, 0.4]]).double(), torch.randn(3, 2).double()
        report = diagnose(lambda z, x: z @ matrix.T + x, x)
        assert_close(report.norm, torch.linalg.matrix_norm(matrix, 2).expand(3), 1e-3)
        assert_close(report.radius, torch.full((3,), 0.5).double(), 1e-2)

    def test_evaluations_of_each_solver_are_those_of_its_own_solve(self):
        weight, x = torch.diag(torch.linspace(0.0, 0.9, 16)), torch.randn(3, 16)
        report = diagnose(DEQBlock(lambda z, x: z @ weight + x, Picard(max_iter=10)), x)
        for run in report.runs:
            solver = type(run.solver)(1e-3, 200)
            needed = deqfast.solve(lambda z: z @ weight + x, torch.zeros(3, 16), solver)
            assert run.own == run.needs[1e-3] == int(needed.iterations.max())
        assert not report.converged and "Take solver=Anderson(): all samples" in said(report)

    def test_growth_without_a_fixed_point(self):
        report = diagnose(lambda z, x: z + x, torch.ones(4, 9))
        picard = next(run for run in report.runs if isinstance(run.solver, Picard))
        assert picard.length == pytest.approx([3.0 * k for k in range(1, 101)])
        assert not report.settled.any() and not report.gradients
        assert "No solver converges from here, and |f(z)| grows from 3 to " in said(report)

    @pytest.mark.parametrize(
        ("cell", "advice", "holds"),
        [
            (lambda z, x: torch.tanh(z / 2 + 1) + 0 * x, "the same for other x", lambda d: d.dependence.max() < 1e-4),
            (lambda z, x: z + 1e-4 * torch.tanh(x), "nearly the identity", lambda d: d.step.max() < 1e-3),
            (lambda z, x: torch.tanh(3 * z) + 1e-3 * x, "several fixed points", lambda d: d.spread.max() > 1),
            (lambda z, x: torch.tanh(0.5 * z.mean(0) + x), "pass groups=", lambda d: d.alone > 0.02),
            (lambda z, x: z / 2 + x + 0.1 * torch.randn_like(z), "from call to call", lambda d: d.difference > 0.01),
            (lambda z, x: 3 * torch.tanh(-2 * z) + x, 'adjoint="implicit"', lambda d: d.radius.max() > 1),
            (lambda z, x: (z + x).sqrt(), "not finite", lambda d: d.statuses["NONFINITE"] == len(d.settled)),
        ],
    )
    def test_conditions(self, cell, advice, holds):
        report = diagnose(DEQBlock(cell, Broyden(max_iter=40)), torch.randn(4, 8))
        assert advice in said(report) and holds(report)

    def test_groups(self):
        whole = DEQBlock(lambda z, x: torch.tanh(0.5 * z.mean(0) + x), groups="batch")
        assert (report := diagnose(whole, torch.randn(4, 8))).advice == [] and len(report.settled) == 1

    def test_tensors_of_different_size(self):
        def cell(z, x):
            return {"big": 0.5 * z["big"] + 1e4 * x, "small": 0.5 * z["small"] + 1e-4 * z["big"]}

        x, z0 = torch.randn(4, 8), {"big": torch.zeros(4, 8), "small": torch.zeros(4, 8)}
        scale = eval(re.search(r"set scale=(.*)\.$", diagnose(cell, x, z0).advice[0])[1])
        ratio = 2.0 ** (round(math.log2(scale["big"])) - round(math.log2(scale["small"])))
        report = diagnose(DEQBlock(cell, scale=scale, adjoint="implicit"), x, z0)
        divided = torch.tensor([[0.5, 0.0], [1e-4 * ratio, 0.5]]).double()
        assert_close(report.norm, torch.linalg.matrix_norm(divided, 2).expand(4), 1e-2)
        assert report.advice == []


class Cell(nn.Module):
    def __init__(self, body, last=None, drop=None):
        super().__init__()
        self.body, self.last, self.drop = body, last or nn.Identity(), drop or nn.Identity()

    def forward(self, z, x):
        return self.last(self.body(self.drop(z)) + x)


class TestAdviceMends:
    @staticmethod
    def follow(cell, x, changes, expected):
        """Do what each report of the cell says until it converges, and return the last one."""
        solver, advice = "Broyden()", []
        while not (report := diagnose(DEQBlock(cell, eval(solver)), x)).converged and len(advice) < 4:
            advice.append(report.advice[0])
            for pattern, change in changes.items():
                if match := re.search(pattern, advice[-1]):
                    cell = change(cell, *match.groups())
            if match := re.search(r"(?:Take solver=|Then )(\w+\(.*?\))(?: converges|:)", advice[-1]):
                solver = match[1]
        assert report.converged and len(advice) >= len(expected), (advice, report)
        assert all(each in given for each, given in zip(expected, advice, strict=False)), advice
        return report

    @staticmethod
    def with_last(cell, norm):
        return Cell(cell.body, eval(norm, {"torch": torch}))

    def test_a_basic_block_of_torchvision(self):
        def without_batch_norm(cell):
            return Cell(BasicBlock(16, 16, norm_layer=lambda channels: nn.GroupNorm(8, channels)))

        changes = {
            "BatchNorm2d.*use GroupNorm": without_batch_norm,
            r"by (torch.nn.GroupNorm\(1, 16\)) last": self.with_last,
            r"give it ([\d.]+) z in place of z": lambda cell, factor: lambda z, x: cell(float(factor) * z, x),
        }
        expected = ["cell.body.bn1 (BatchNorm2d)", "No solver converges from here, and |f(z)| grows"]
        self.follow(Cell(BasicBlock(16, 16)), torch.randn(4, 16, 8, 8), changes, expected)

    def test_a_pre_norm_transformer_block(self):
        cell = Cell(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True))
        changes = {r"by (torch.nn.LayerNorm\(32\)) last": self.with_last}
        report = self.follow(cell, torch.randn(4, 6, 32), changes, ["|f(z)| grows"])
        assert float(report.radius.max()) < 1


class TestReport:
    def test_the_block_stays_as_it_is(self):
        cell = Cell(nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8)), nn.Dropout(0.1))
        cell.body[0].bias.grad, cell.body[1].training = torch.ones(8), False
        block, x, calls = DEQBlock(cell, adjoint="implicit"), torch.randn(4, 8, requires_grad=True), []
        before, state = copy.deepcopy(block), torch.random.get_rng_state()
        block.cell.register_forward_hook(lambda *_: calls.append(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = diagnose(block, x)
        assert len(calls) >= report.evaluations and x.grad is None and block.backward_solution is None
        assert torch.equal(torch.random.get_rng_state(), state)
        assert [m.training for m in block.modules()] == [m.training for m in before.modules()]
        assert all(map(torch.equal, block.state_dict().values(), before.state_dict().values()))
        assert [p.grad is None for p in block.parameters()] == [False, True, True, True]
        assert torch.equal(cell.body[0].bias.grad, torch.ones(8))
        with pytest.warns(UserWarning, match="deqfast.diagnose"):
            block(x)

    def test_text_dictionary_and_figure(self, monkeypatch):
        report = diagnose(deqfast.FCCell(3, 8), torch.randn(4, 3), torch.zeros(4, 8))
        assert str(diagnose(DEQBlock(lambda z, x: z + x), torch.ones(2, 3))).count("\n") > 20
        assert max(map(len, str(report).splitlines())) <= 100 and "Neumann" in str(report)
        text = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert text["advice"] == report.advice and len(text["radius"]) == 4 and text["runs"][0]["needs"]["0.001"]
        assert len(report.figure().axes) == 3
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match="needs matplotlib"):
            report.figure()

    def test_the_same_twice_and_bad_arguments(self):
        block, x = DEQBlock(LoopedFCCell(3, 8)), torch.randn(2, 3)
        assert diagnose(block, x).to_dict() == diagnose(block, x).to_dict()
        for rows, options, match in ((2, {"samples": 0}, "samples"), (2, {"starts": -1}, "starts"), (0, {}, "one s")):
            with pytest.raises(ValueError, match=match):
                diagnose(block, x[:rows], **options)


class TestNumbersThatAreNotFinite:
    def test_a_value_at_a_random_state_is_a_finding_of_its_own(self):
        x = torch.rand(6, 16)
        report = diagnose(DEQBlock(lambda z, x: (z + 1).log() / 2 + 0 * z.sum(1, keepdim=True) + x, warn=False), x)
        count = int(report.step.isnan().sum())
        assert count and f"f is not finite at a random state as large as z* in {count} of 6 samples" in said(report)
        assert "nearly the identity" not in said(report)

    def test_a_jacobian_that_is_not_finite(self):
        report = diagnose(DEQBlock(lambda z, x: (z - z.detach()).abs().sqrt() + 0.5 * x, warn=False), torch.rand(3, 4))
        assert "The Jacobian at z* is not finite in 3 of 3" in said(report)


def test_cells_of_whole_batches_and_adjoints_of_ones_own():
    neighbours, linear = torch.tensor([1, 2, 3, 0]), nn.Linear(3, 3)

    class Own(Phantom):
        pass

    for cell in (
        lambda z, x: torch.tanh(0.3 * linear(z[neighbours]) + x),
        lambda z, x: [None][len(z) - 4] or torch.tanh(0.3 * linear(z) + x),
    ):
        report = diagnose(DEQBlock(cell, adjoint=Own(), warn=False), torch.randn(4, 3))
        assert report.converged and any(key.startswith("Own(") or "Own" in key for key in report.gradients)
        assert isinstance(report.advice, list) and str(report)


def test_advice_names_no_tolerance_that_is_refused():
    def cell(z, x):
        return torch.cat([(0.5 * z[:1] + x[:1]).bfloat16().to(z), 3 * z[1:] + x[1:]])

    block = DEQBlock(cell, Picard(1e-4, 30), warn=False)
    assert "rtol=1" not in said(diagnose(block, torch.randn(4, 3)))


def test_a_change_whose_answer_ignores_x_is_not_offered():
    """A smaller z makes 0 the answer of a product for every x, and of a sum it does not."""
    x, z0, solver = 1 + torch.rand(4, 1), torch.ones(4, 1), Broyden(1e-3, atol=1e-3)
    product, total = (
        Problem(DEQBlock(cell, solver)._plan(x, z0, None)) for cell in (lambda z, x: 3 * z * x, lambda z, x: z + x)
    )
    assert find_remedy(product) is None
    assert find_remedy(total).change.startswith("give it 0.5 z in place of z")
