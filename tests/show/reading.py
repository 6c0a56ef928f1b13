"""Reading what a figure says."""

from course_pp.show.chart import ChartFigure
from course_pp.show.rows import Labels


def texts(figure: ChartFigure) -> list[str]:
    figure.draw_without_rendering()
    return [*(text.get_text() for axes in figure.axes for text in axes.texts), *(label[0] for label in labels(figure))]


def labels(figure: ChartFigure) -> list[tuple[str, float, float, float]]:
    """Text, size and place of each label in a box."""
    return [each for axes in figure.axes for artist in axes.findobj(Labels) for each in artist.placed]


def title(figure: ChartFigure) -> str:
    figure_texts = [text.get_text() for text in figure.texts]
    return (figure.axes[0].get_title(loc="left") or figure_texts[0]).strip()
