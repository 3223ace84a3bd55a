"""The carry: finished samples make room for new ones, and nothing else changes."""

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deqfast import Carry, DEQBlock, Picard, Status


def numbered(count, size=4):
    """Batches of (x, number), x random (size, 3)."""
    x, number = torch.randn(count, 3), torch.arange(count)
    return [(x[at : at + size], number[at : at + size]) for at in range(0, count, size)]


def halves(z, x):
    return 0.5 * torch.tanh(z) + x


def block(**options):
    return DEQBlock(halves, Picard(1e-3, 3, **options), warn=False)


def test_finished_samples_are_replaced_in_place_and_the_others_keep_state_and_age():
    batches = numbered(8)
    carry = Carry(lambda data: 10.0 + data[0], batches, size=5)
    before, x = carry.data, torch.cat([x for x, _ in batches])
    assert carry.data[1].tolist() == [0, 1, 2, 3, 4] and carry.taken == 5 and torch.equal(carry.z, 10 + x[:5])
    z = torch.randn(5, 3, requires_grad=True)
    carry.advance(2 * z, torch.tensor([False, True, False, True, False]))
    assert carry.data[1].tolist() == [0, 5, 2, 6, 4] and carry.age.tolist() == [1, 0, 1, 0, 1]
    assert torch.equal(carry.data[0], x[carry.data[1]]) and not carry.z.requires_grad
    assert torch.equal(carry.z[[0, 2, 4]], 2 * z[[0, 2, 4]]) and torch.equal(carry.z[[1, 3]], 10 + x[5:7])
    assert before[1].tolist() == [0, 1, 2, 3, 4]  # a backward pass may still need it
    carry.advance(z + 1, torch.zeros(5, dtype=torch.bool))
    assert carry.age.tolist() == [2, 1, 2, 1, 2] and carry.taken == 7 and not carry.z.requires_grad


def test_at_the_end_finished_samples_leave():
    carry = Carry(lambda data: data[0], numbered(7), size=5)
    carry.advance(carry.z, torch.ones(5, dtype=torch.bool))
    assert carry.data[1].tolist() == [5, 6] and carry.age.tolist() == [0, 0]
    carry.advance(carry.z + 1, torch.tensor([True, False]))
    assert carry.data[1].tolist() == [6] and carry.age.tolist() == [1] and torch.equal(carry.z, carry.data[0] + 1)
    carry.advance(carry.z, torch.ones(1, dtype=torch.bool))
    assert len(carry) == 0 and carry.z.shape == (0, 3) and carry.taken == 7


def test_every_sample_is_solved_as_in_a_long_solve():
    """Plain iteration continued from the carry makes the same iterates; so is the number of evaluations."""
    batches = numbered(30)
    x = torch.cat([x for x, _ in batches])
    solved, loop = torch.full((30, 3), torch.nan), block()
    whole = DEQBlock(halves, Picard(1e-3, 100))(x, return_solution=True)[1]
    carry, ages = Carry(loop, batches, size=8), torch.zeros(30, dtype=torch.int64)
    with torch.no_grad():
        while len(carry):
            x, number = carry.data
            z, solution = loop(x, z0=carry.z, return_solution=True)
            done = solution.status != Status.MAX_ITER
            solved[number[done]], ages[number[done]] = z[done], 3 * carry.age[done] + solution.iterations[done]
            carry.advance(z, done)
    # The best iterate of a step that does not converge is its last one, which the next step evaluates again.
    assert (ages >= whole.iterations).all() and ages.max() <= 3 * whole.iterations.max()
    gap = (halves(solved, torch.cat([x for x, _ in batches])) - solved).norm(dim=1)
    assert (gap <= 1e-3 * (solved.norm(dim=1) + gap)).all()


@pytest.mark.parametrize(
    ("device", "samples", "rows", "copies"),
    [
        ("cpu", 12, [], 0),
        ("cpu", 12, [1, 3], 0),
        ("cpu", 5, [1, 3], 0),
        ("meta", 12, [1], 2),
        ("meta", 12, [0, 1, 2, 3], 4),
    ],
)
def test_the_host_waits_once_and_for_copies_between_devices(device, samples, rows, copies):
    """It reads the number of finished samples. Data on "meta" stand for data on another device than the states."""

    aten, waits = torch.ops.aten, []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            moved = func is aten._to_copy.default and kwargs.get("device", args[0].device) not in (None, args[0].device)
            if moved or func in (aten.nonzero.default, aten._local_scalar_dense.default):
                waits.append(func)
            return func(*args, **(kwargs or {}))

    carry = Carry(lambda data: torch.zeros(len(data[0]), 3), numbered(samples), size=5, device=device)
    z, done = carry.z, torch.zeros(5, dtype=torch.bool).index_fill(0, torch.tensor(rows).long(), True)
    with Reads():
        carry.advance(z, done)
    assert sorted(map(str, waits)) == ["aten._to_copy.default"] * copies + ["aten.nonzero.default"]
    assert carry.taken == min(samples, 5 + len(rows))


def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    batches = iter(numbered(40, 7))
    carry = Carry(block(), batches, size=4)
    carry.advance(carry.z + 1, torch.tensor([True, False, False, False]))
    torch.save(carry.state_dict(), tmp_path / "carry.pt")
    rest = list(batches)
    carry._batches, other = iter(rest), Carry(block(), rest, size=4)
    other.load_state_dict(torch.load(tmp_path / "carry.pt", weights_only=True))
    seen = set(range(carry.taken))
    for step in range(40):
        for each in (carry, other):
            each.advance(each.z * 0.5 + 1, each.age >= step % 3)
        assert torch.equal(carry.z, other.z) and torch.equal(carry.age, other.age) and carry.taken == other.taken
        assert all(map(torch.equal, carry.data, other.data))
        seen |= set(other.data[1].tolist())
    assert seen == set(range(40)) and other.taken == 40 and len(other) == 0
    ended = Carry(block(), numbered(4), size=4)
    ended.load_state_dict(other.state_dict())
    assert len(ended) == 0 and ended.taken == 40


def test_a_loaded_state_goes_to_the_devices_of_the_carry():
    state = Carry(block(), numbered(7, 7), size=4).state_dict()
    carry = Carry(lambda data: torch.zeros(len(data[0]), 3), numbered(8), size=4, device="meta")
    carry.load_state_dict(state)
    assert {leaf.device.type for leaf in (*carry.data, carry.z, carry.age, *carry._next(7))} == {"meta"}
    carry = Carry(lambda data: torch.zeros(len(data[0]), 3), numbered(8), size=4, device="meta")
    assert carry.z.device.type == "cpu"  # this one has begun
    carry.load_state_dict(state)
    carry.advance(carry.z, torch.ones(4, dtype=torch.bool))
    assert [leaf.device.type for leaf in (*carry.data, carry.z, carry.age)] == ["meta", "meta", "cpu", "cpu"]
    assert carry.taken == 8


def test_a_wrong_state_changes_nothing():
    carry = Carry(block(), numbered(12, 7), size=4)
    state = carry.state_dict()
    x, number = state["data"]
    for changed, message in (
        ({"z": state["z"][:, :2]}, r"the state's z must have rows of .*\(3,\).*got .*\(2,\)"),
        ({"z": torch.zeros(5, 3)}, "the state's z must have 4 rows"),
        ({"z": 1.0}, "the state's z must hold tensors"),
        ({"data": (x,)}, "the state's data must have the structure"),
        ({"data": (x.double(), number)}, "the state's data must have rows of .*float32.*got .*float64"),
        ({"age": torch.zeros(2).long()}, "the state's age must have 4 rows"),
        ({"age": torch.zeros(4)}, "the state's age must have rows of .*int64.*got .*float32"),
        ({"rest": (torch.zeros(4, 7), number)}, "the state's rest must have rows of"),
        ({"rest": []}, "the state's rest must hold tensors"),
        ({"taken": -1}, "the state's taken must be at least 0, got -1"),
        ({"steps": 1}, r"the state must be a dict of \['data', .*\], got .*'steps'"),
        (None, "the state must be a dict of"),
    ):
        wrong = state | {"data": (x + 1, number + 1), "z": state["z"] + 1, "age": state["age"] + 1} | (changed or {})
        with pytest.raises((ValueError, TypeError), match=message):
            carry.load_state_dict(changed and wrong)
        kept, expected = (pytree.tree_leaves(each) for each in (carry.state_dict(), state))
        assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(kept, expected, strict=True))
