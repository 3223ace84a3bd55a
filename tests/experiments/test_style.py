"""The style of all figures: which arm looks how, and the bytes of a PNG."""

from __future__ import annotations

import io

import pytest
from models import cells, graphs, images, looped, looped_text, restoration, scf, sudoku, text
from nc_study.figures import LABELS
from PIL import Image
from runs import style

FNNS = [f"FNN, {depth} hidden" for depth in (1, 3)]


@pytest.mark.parametrize(
    "arms",
    [
        *(LABELS, cells.ARMS, graphs.ARMS, images.ARMS, restoration.ARMS, sudoku.ARMS, text.ARMS, looped.ARMS),
        *(looped_text.ARMS, scf.ARMS[:4]),
        ["DEQ, free", "DEQ from the exact weights", *FNNS],
        ["recording", "DEQ", "FNN, equal parameters", "FNN, equal FLOPs"],
        ["DEQ", "DEQ, JFB", "diagonal network"],
    ],
)
def test_networks_of_one_figure_look_different_and_the_deq_the_same_in_all(arms):
    looks = {arm: style.look(arm) for arm in arms}
    assert len({look["color"] for look in looks.values()}) == len(looks)
    deqs = {"deq", "DEQ", "DEQ, free", "deq-implicit", "residual"} & looks.keys()
    assert all(looks[arm] == {"color": style.VERMILLION, "marker": "D"} for arm in deqs)


def test_a_name_without_a_look_is_named():
    with pytest.raises(KeyError, match="transformer: add the beginning of its name to KINDS"):
        style.look("transformer")


def test_a_png_has_few_colours_its_text_and_the_same_bytes_again():
    def drawn(**entries: str) -> bytes:
        figure, ((axis,),) = style.panels()
        style.band(axis, [1, 2], [[0, 1], [2, 3]], label="deq", **style.look("deq"))
        axis.plot([1, 2], [1, 2], label="deq")
        style.legend(figure)
        assert [entry.get_text() for entry in figure.legends[0].get_texts()] == ["deq"]
        return style.png(figure, **entries)

    picture = Image.open(io.BytesIO(content := drawn(data="of a record")))
    assert picture.mode == "P" and picture.width == round(150 * style.WIDTH) and picture.text == {"data": "of a record"}
    assert drawn(data="of a record") == content and drawn() != content
