"""How figures look: one style per kernel everywhere, readable in grey and by the colour-blind.

Colours are those of Okabe and Ito (2008), without their yellow, which vanishes on white paper.
Every series also has its own marker and line style. Dashed: nothing is shared between queries;
solid: the tree's sharing is used on our kernels; dotted and dash-dotted: other published rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

P = ParamSpec("P")
STYLE_FILE = Path(__file__).with_name("paper.mplstyle")
WIDTH_IN = 7.2  # text width of a two-column paper, inches

TIMES = "\N{MULTIPLICATION SIGN}"
BLACK, GREY = "#000000", "#7A7A7A"
ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"


@dataclass(frozen=True)
class SeriesStyle:
    """Colour, marker, line style and hatch of one series; hollow: the marker's face is white."""

    colour: str
    marker: str
    line: Any = "-"
    hatch: str = ""
    is_hollow: bool = False

    @property
    def face(self) -> str:
        """Marker face colour."""
        return "white" if self.is_hollow else self.colour

    def line_options(self) -> dict[str, Any]:
        """Keywords for Axes.plot."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.line,
            "markerfacecolor": self.face,
            "markeredgecolor": self.colour,
        }

    def dot_options(self) -> dict[str, Any]:
        """Keywords for Axes.plot of markers without a line."""
        return {**self.line_options(), "linestyle": "none"}


KERNEL_STYLES = {
    "dense": SeriesStyle(GREY, "x", ":"),
    "medusa_dense": SeriesStyle(GREY, "P", "-."),
    "radix_attention": SeriesStyle(ORANGE, "s", "--"),
    "flash_decoding": SeriesStyle(SKY, "^", "--"),
    "paged_attention": SeriesStyle(PURPLE, "v", "--"),
    "deft_node": SeriesStyle(GREEN, "D", "-"),
    "deft_node_chunk": SeriesStyle(BLUE, "p", "-"),
    "deft_flatten": SeriesStyle(VERMILLION, "o", "-"),
    "deft_paper": SeriesStyle(VERMILLION, "o", ":", is_hollow=True),
    "cascade_own": SeriesStyle(BLACK, "X", "-."),
}
_SPARE = [
    SeriesStyle(colour, marker, line, is_hollow=True)
    for (marker, line), colour in product(
        [("s", "-"), ("D", "--"), ("^", "-."), ("v", ":"), ("h", "-"), ("<", "--"), (">", "-.")],
        [BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, BLACK],
    )
]
# Traffic terms, most of it first: the stacking order.
TERM_STYLES = {
    "kv": (BLUE, ""),
    "q": (SKY, "////"),
    "out": (GREEN, "...."),
    "partial": (ORANGE, "\\\\\\\\"),
    "mask": (PURPLE, "xxxx"),
    "index": (GREY, "----"),
    "logits": (VERMILLION, "++++"),
}


def series_styles(labels: Iterable[str]) -> dict[str, SeriesStyle]:
    """A distinct style per label; a kernel's own style goes to its first label.

    Args:
        labels: kernel labels, the kernel id first (what follows a space tells variants apart).
    """
    styles: dict[str, SeriesStyle] = {}
    spare = iter(_SPARE)
    for label in ordered_labels(labels):
        own = KERNEL_STYLES.get(label.split(" ")[0])
        is_free = own is not None and own not in styles.values()
        styles[label] = own if own is not None and is_free else next(spare, _SPARE[0])
    return styles


def ordered_labels(labels: Iterable[str]) -> list[str]:
    """Labels in the order of legends: known kernels first, then the others by name."""
    known = list(KERNEL_STYLES)

    def place(label: str) -> tuple[int, str]:
        kernel = label.split(" ")[0]
        return (known.index(kernel) if kernel in known else len(known), label)

    return sorted(set(labels), key=place)


def style_context() -> AbstractContextManager[None]:
    """The project's matplotlib settings, on top of matplotlib's own defaults."""
    settings = matplotlib.rc_params_from_file(STYLE_FILE, use_default_template=False)
    # A context does not give the backend back, so it must not touch it.
    defaults = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")}
    return matplotlib.rc_context({**defaults, **settings})


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator: draw under the project's style, whatever the caller's settings are."""

    @wraps(draw)
    def inner(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with style_context():
            return draw(*args, **kwargs)

    return inner


def panels(
    rows: int, columns: int, height_in: float, width_in: float = WIDTH_IN, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A figure without pyplot's global state, and its [rows, columns] axes."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes


def legend_columns(width_in: float, labels: Sequence[str]) -> int:
    """Columns of a legend that fit a width: a handle and the longest label each (8 pt type)."""
    column_in = 0.6 + 0.055 * max((len(label) for label in labels), default=0)
    return max(1, min(len(labels), int(width_in / column_in)))


def legend_below(figure: Figure, handles: Sequence[Any]) -> None:
    """A legend under the panels, outside the data, as many columns as fit."""
    columns = legend_columns(figure.get_figwidth(), [str(one.get_label()) for one in handles])
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def series_handles(styles: dict[str, SeriesStyle], lines: bool = True) -> list[Line2D]:
    """Legend entries of kernels, as lines or as markers."""
    return [
        Line2D([], [], label=label, **(one.line_options() if lines else one.dot_options()))
        for label, one in styles.items()
    ]


def count_text(value: float) -> str:
    """Short text of a token or query count: 1024 -> "1k", 1000 -> "1000", 4000 -> "4000"."""
    number = int(value)
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return str(number)


def count_axis(axes: Axes, values: Iterable[float], label: str) -> None:
    """A log2 x axis with a tick at each value, save those too close to the one before."""
    known = sorted({float(value) for value in values if value > 0})
    axes.set_xscale("log", base=2)
    gap = (np.log2(known[-1]) - np.log2(known[0])) / 8 if known else 0.0
    ticks = known[:1]
    for value in known[1:]:
        if np.log2(value) - np.log2(ticks[-1]) >= gap:
            ticks.append(value)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [count_text(tick) for tick in ticks])
    axes.set_xlabel(label)


def plain_log(axis: Axis, values: Iterable[float]) -> None:
    """Log scale with 10, 100, 1000 instead of powers; 20 and 50 too where the values are close."""
    known = [value for value in values if value > 0]
    is_short = bool(known) and max(known) < 50 * min(known)
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_short else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def spread(values: Iterable[Any], most: int) -> list[Any]:
    """At most `most` of the sorted distinct values, the ends included, evenly spaced."""
    ordered = sorted(set(values))
    if len(ordered) <= most:
        return ordered
    return [
        ordered[at] for at in np.unique(np.linspace(0, len(ordered) - 1, most).round().astype(int))
    ]
