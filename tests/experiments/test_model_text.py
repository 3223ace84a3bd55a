"""text.py: tiny runs, and input that it refuses."""

import pytest
import text
import torch
from runs import Run, SettingsError, StudyError

OPTIONS = text.Text(steps=3, batch=2, context=16, width=16, heads=2)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    topics = {"a": "The quick brown fox jumps over the lazy dog.\n" * 30}
    monkeypatch.setattr(text, "topics", topics)
    monkeypatch.setattr(text, "WRITTEN", 20)


@pytest.mark.parametrize("arm", text.ARMS)
def test_an_arm_trains(tmp_path, arm):
    outcome = text.train(Run(OPTIONS, tmp_path, arm, seed=0))
    assert 2 < outcome.scores["loss, test"] < 5
    assert ("converged" in outcome.scores) == (arm == "deq")


@pytest.mark.parametrize("arm", text.ARMS)
def test_no_character_is_told_by_those_after_it(arm):
    torch.manual_seed(0)
    model = text.Language(arm, OPTIONS, 10).eval()
    if model.equilibrium is not None:
        model.equilibrium.eval_solver = text.deqfast.Picard(1e-6, 100)
    first = torch.randint(10, (1, 16))
    second = first.clone()
    second[0, 8:] = (second[0, 8:] + 1) % 10
    with torch.no_grad():
        a, b = model(first)[0][0], model(second)[0][0]
    torch.testing.assert_close(a[:8], b[:8], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(a[8:], b[8:], atol=1e-2)


def test_the_twin_has_as_many_parameters():
    options = text.Text()
    deq, twin = (sum(p.numel() for p in text.Language(arm, options, 65).parameters()) for arm in text.ARMS[:2])
    assert abs(deq - twin) < 0.05 * deq


def test_writing_begins_at_the_fixed_point():
    torch.manual_seed(0)
    model = text.Language("deq", OPTIONS, 10).eval()
    cold, warm, written = text.write(model, torch.randint(10, (12,)), OPTIONS)
    assert len(written) == 20 and min(cold, warm) >= 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"ten chars.", "10 characters; at least 340"),
        (b"\x89PNG\xff\xfe" * 1000, "UTF-8"),
        (b"a\0" * 1000, "zero byte"),
    ],
)
def test_a_text_that_cannot_serve(tmp_path, content, said):
    path = tmp_path / "it.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StudyError, match=said) as error:
        text.load(text.Text(data_root=str(path), context=16))
    assert "--data-root" in str(error.value) and "\n" not in str(error.value)


def test_a_folder_of_texts(tmp_path):
    with pytest.raises(StudyError, match="0 characters"):
        text.load(text.Text(data_root=str(tmp_path)))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 1000)
    corpus = text.load(text.Text(data_root=str(tmp_path)))
    assert corpus.characters == "ab" and [len(part) for part in corpus[2:]] == [1800, 100, 100]


def test_a_width_that_heads_do_not_divide():
    with pytest.raises(SettingsError, match="--width 100"):
        text.Text(width=100)
