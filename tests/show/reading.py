"""Reading what a figure says."""

from course_pp.show.chart import ChartFigure
from course_pp.show.timelines import Labels


def texts(figure: ChartFigure) -> list[str]:
    figure.draw_without_rendering()
    found = []
    for axes in figure.axes:
        found += [text.get_text() for text in axes.texts]
    return found + [text for text, *_ in _placed(figure)]


def labels(figure: ChartFigure) -> list[tuple[str, float, float, float]]:
    """Text, size and place of each label in a box, without the names and notes in the margins."""
    left, right = figure.axes[0].get_xlim()
    return [each for each in _placed(figure) if left <= each[2] <= right]


def rank_names(figure: ChartFigure) -> list[tuple[str, float]]:
    """The name of each row, and which row it is."""
    return [(text, y) for text, _, x, y in _placed(figure) if x < figure.axes[0].get_xlim()[0]]


def notes(figure: ChartFigure) -> list[str]:
    """The note in the right margin of each rank, from the top down."""
    _, right = figure.axes[0].get_xlim()
    from_top = sorted(_placed(figure), key=lambda each: each[3])
    return [text for text, _, x, _ in from_top if x > right]


def _placed(figure: ChartFigure) -> list[tuple[str, float, float, float]]:
    found = []
    for axes in figure.axes:
        for artist in axes.findobj(Labels):
            found += artist.placed
    return found


def title(figure: ChartFigure) -> str:
    figure_texts = [text.get_text() for text in figure.texts]
    return " ".join((figure.axes[0].get_title(loc="left") or figure_texts[0]).split())
