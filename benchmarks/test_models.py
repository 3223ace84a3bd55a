"""Published models with the layer of torchdeq and of ``deqfast.compat``: differences, evaluations, times.

    OMP_NUM_THREADS=1 pytest benchmarks -m models --models-root FOLDER --record FILE

FOLDER has clones of the models' repositories; without them a skip says which commands make them. About six minutes.
"""

import pytest
from harness.entry import Skipped
from harness.models import SECTION, measure
from harness.tables import slug
from harness.zoo import ROWS


@pytest.mark.models
@pytest.mark.parametrize("model", ROWS, ids=lambda model: slug(model.name))
def test_model(board, pytestconfig, model):
    if board.device != "cpu":
        pytest.skip(f"section {SECTION} is measured on the CPU")
    pytest.importorskip("torchdeq")
    root = pytestconfig.getoption("--models-root")
    if root is not None and not root.is_dir():
        raise pytest.UsageError(f"--models-root or DEQFAST_MODELS: {root} is not a folder")
    turns = {"rounds": 1, "seconds": 0.1} if board.small else {}
    try:
        rows = measure(model, root, **turns)
    except Skipped as reason:
        pytest.skip(str(reason))
    for row in rows:
        board.add(row)
