"""The picture of who wrote which rectangle of a checkpoint's tensors."""

import io
from dataclasses import dataclass

import pytest
from matplotlib.patches import Rectangle
from PIL import Image

from course_pp import show
from course_pp.show.chart import ChartFigure
from tests.show.reading import texts, title


@dataclass
class Piece:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int


ROWS = [Piece((0, 0), (24, 32), 0), Piece((24, 0), (24, 32), 1)]
COLUMNS = [Piece((0, 0), (32, 48), 2), Piece((0, 48), (32, 48), 13)]
NORM = [Piece((0,), (32,), 1)]


def boxes(figure: ChartFigure) -> list[tuple[float, ...]]:
    """Left, top, width and height in inches of each piece, without the grey boxes below them."""
    found = []
    for patch in figure.axes[0].patches:
        if isinstance(patch, Rectangle) and patch.get_linestyle() != ":":
            found.append((*patch.get_xy(), patch.get_width(), patch.get_height()))
    return found


def test_each_piece_is_drawn_in_its_place_with_the_number_of_its_rank() -> None:
    figure = show.pieces({"up": ROWS, "down": COLUMNS, "norm": NORM})
    assert title(figure) == "3 tensors in 5 pieces, by ranks 0, 1, 2 and 13"
    top, bottom, left, right, norm = boxes(figure)
    assert bottom == pytest.approx((top[0], top[1] + top[3], *top[2:]))
    assert right == pytest.approx((left[0] + left[2], *left[1:]))
    assert norm[3] == left[3] == pytest.approx(2 * top[3])
    written = texts(figure)
    assert {"rank 2", "rank 13", "up\n48 × 32", "down\n32 × 96", "norm\n32"} <= set(written)
    assert sum(text in ("0", "rank 0") for text in written) == 1


def test_checkpoints_are_drawn_side_by_side_and_what_one_lacks_is_called_absent() -> None:
    figure = show.pieces(
        {"PP 4": {"up": ROWS}, "TP 2": {"up": ROWS[:1], "step": [Piece((), (), 0)]}}
    )
    assert title(figure) == "PP 4: 2 pieces; TP 2: 2 pieces"
    assert {"PP 4", "TP 2", "absent", "step\none number"} <= set(texts(figure))
    assert "PP 4, step (one number): absent" in figure.alt_text
    assert "TP 2, step (one number): rank 0 wrote []" in figure.alt_text


def test_the_alt_text_names_every_rectangle_and_what_is_missing() -> None:
    figure = show.pieces({"up": ROWS, "down": COLUMNS[1:]})
    up, down = figure.alt_text.split(";")
    assert "up (48 × 32)" in up
    assert "rank 0 wrote [0:24, 0:32] and rank 1 wrote [24:48, 0:32]" in up
    assert "down (32 × 96)" in down
    assert "rank 13 wrote [0:32, 48:96], 1,536 numbers" in down


def test_it_shows_itself_with_its_alt_text_under_any_title() -> None:
    heading = "Who wrote what " * 8
    figure = show.pieces({"a name that is longer than any other": ROWS}, title=heading)
    data, metadata = figure._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == figure.alt_text
    width, _ = Image.open(io.BytesIO(data["image/png"])).size
    assert width == pytest.approx(2 * metadata["image/png"]["width"], abs=1)
    assert title(figure) == heading.strip()


def test_many_ranks_differ_in_number_and_in_colour_or_hatch() -> None:
    figure = show.pieces({"w": [Piece((i, 0), (1, 96), i) for i in range(16)]})
    looks = {(patch.get_facecolor(), patch.get_hatch()) for patch in figure.axes[0].patches[1:]}
    assert len(looks) == 16
