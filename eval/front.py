"""The figure of the front page: what a model keeps against the time that a forecast takes.

    python eval/front.py --tables eval/results --output eval/results/front

Draws what `comparison.py` measured (`comparison-bolt.csv` in `--tables`), and Fracast-0 where
`peers.py` measured it (`peers-bolt.csv`), means over the seeds: WQL and MASE as ratios to the
original's, and the share of its skill that is kept, against the ratio of latencies. Folded models
are those of `testbed.FRONT_SIZES`. A model that takes longer than the axis is long stands at its
end, with its ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox
from output import parser_of
from testbed import FRONT_SIZES, REFERENCES, short_name

from tscompress.errors import DataError
from tscompress.plotting import GREY, MARKERS, PALETTE, new_figure, style_axes

MEASURES = {
    "WQL": "WQL, ratio (lower is better)",
    "MASE": "MASE, ratio (lower is better)",
    "skill": "share of skill kept (higher is better)",
}
_COLUMNS = ("kind", "label", "latency", *MEASURES)
_LONGEST = 1.2  # ratio of latencies; where the axes end
_FONT = 10.5  # points; some 12 pixels where the figure is 800 wide
Place = tuple[float, float, str, str]
#: Where a name may stand beside its point, nearer places first: offset in points, its alignment.
_PLACES: tuple[tuple[Place, ...], ...] = tuple(
    tuple(
        (dx, dy if dx == 0 else share * dy, ha, va)
        for dx, ha in ((8, "left"), (0, "center"), (-8, "right"))
        for dy, va in ((8, "bottom"), (0, "center"), (-8, "top"))
        if dx or dy
    )
    for share in (1 / 3, 1)
)

Points = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Look:
    """How one kind of model is named and drawn."""

    name: str
    color: str
    marker: str
    filled: bool = True
    size: float = 7.0


LOOKS = {
    "dense": Look("original", "black", "*", size=13),
    "fold + recovery": Look("folded, recovered", PALETTE[0], MARKERS[0]),
    "fold": Look("folded", PALETTE[5], MARKERS[0], filled=False),
    "SVD-LLM + recovery": Look("SVD-LLM, recovered", PALETTE[2], MARKERS[2]),
    "next smaller size": Look("next smaller size", PALETTE[1], MARKERS[1]),
    "Fracast-0": Look("Fracast-0", GREY, "h"),
}


def read(path: Path) -> pd.DataFrame:
    """A table of `peers.py` or `comparison.py`.

    Raises
    ------
    DataError
        There is none, or it is of a version that measured less.
    """
    if not path.is_file():
        raise DataError(f"there is no {path}; measure it with eval/reproduce.py {path.stem}.")
    frame = pd.read_csv(path)
    if missing := [column for column in _COLUMNS if column not in frame]:
        raise DataError(
            f"{path} lacks {', '.join(missing)}; measure it again with eval/reproduce.py "
            f"{path.stem}."
        )
    return frame


def points(comparison: pd.DataFrame, peers: pd.DataFrame | None) -> pd.DataFrame:
    """One row a model that is drawn: its kind, latency and measures, means over seeds."""
    if "shown" in comparison:  # what is not is of another recovery or other series
        comparison = comparison[comparison["shown"].astype(bool)]
    sizes = [size.label for size in FRONT_SIZES]
    frames = [comparison] if peers is None else [comparison, peers[peers["kind"] == "Fracast-0"]]
    frame = pd.concat(frames)
    frame = frame[frame["kind"].isin(LOOKS)]
    frame = frame[~frame["kind"].str.startswith("fold") | frame["label"].isin(sizes)]
    frame = frame.assign(label=frame["label"].fillna(""))
    means = frame.groupby(["kind", "label"], sort=False)[["latency", *MEASURES]].mean()
    return means.reset_index().sort_values("latency")


def draw(frame: pd.DataFrame, stem: Path) -> None:
    """``stem.png`` and ``stem.svg``."""
    figure = new_figure(10, 4.1)
    panels = figure.subplots(1, len(MEASURES))
    drawn = [
        _draw_panel(axes, frame[["kind", "latency", measure]], title)
        for axes, (measure, title) in zip(panels, MEASURES.items(), strict=True)
    ]
    figure.supxlabel("time of a forecast, ratio to the original", fontsize=_FONT)
    figure.draw_without_rendering()  # or no text knows how large it is
    for axes, found in zip(panels, drawn, strict=True):
        _name_kinds(axes, found)
    with matplotlib.rc_context({"svg.hashsalt": "front"}):
        figure.savefig(f"{stem}.svg", metadata={"Date": None})
    figure.savefig(f"{stem}.png", dpi=160)


def _draw_panel(axes: Axes, frame: pd.DataFrame, title: str) -> dict[str, Points]:
    """Points ``[N, 2]`` of each kind, drawn: time and a measure."""
    style_axes(axes)
    axes.set_title(title, fontsize=_FONT, loc="left")
    axes.tick_params(labelsize=_FONT - 1)
    axes.axhline(1, color=GREY, linewidth=0.8, zorder=1)
    axes.set_xlim(0, _LONGEST)
    axes.margins(y=0.12)
    drawn = {}
    for kind, look in LOOKS.items():
        of_kind = frame[frame["kind"] == kind]
        if len(of_kind):
            drawn[kind] = of_kind.drop(columns="kind").to_numpy()
            _draw_kind(axes, drawn[kind], look)
    axes.autoscale_view(scalex=False)
    return drawn


def _draw_kind(axes: Axes, found: Points, look: Look) -> None:
    """Points ``[N, 2]`` and the line through them; what takes too long, at the end of the axis."""
    x, y = np.minimum(found[:, 0], _LONGEST), found[:, 1]
    axes.plot(
        x, y, color=look.color, linewidth=1.6, marker=look.marker, ms=look.size, zorder=3,
        mfc=look.color if look.filled else "white", mew=1.4 if look.size < 10 else 0,
        clip_on=False,
    )  # fmt: skip


def _name_kinds(axes: Axes, drawn: Mapping[str, Points]) -> None:
    """The name of each kind in its colour beside one of its points, where it covers least."""
    taken = [box for found in drawn.values() for box in _boxes(axes, found)]
    for kind, found in drawn.items():
        look = LOOKS[kind]
        longest = found[:, 0].max()
        name = look.name if longest <= _LONGEST else f"{look.name}, {longest:.0f} × the time →"
        places = np.column_stack([np.minimum(found[:, 0], _LONGEST), found[:, 1]])
        text = axes.annotate(
            name, places[0], (0, 0), textcoords="offset points", color=look.color, fontsize=_FONT,
            zorder=5, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )  # fmt: skip
        text.set_in_layout(False)
        size = text.get_window_extent()
        choices = []
        for (x, y), place in ((at, one) for near in _PLACES for at in places for one in near):
            box = _box_at(axes, (x, y), place, size)
            choices.append((_covered(axes, box, taken), len(choices), (x, y), place, box))
        _, _, text.xy, (dx, dy, ha, va), box = min(choices)
        text.set(position=(dx, dy), ha=ha, va=va)
        taken.append(box)


def _box_at(axes: Axes, point: tuple[float, float], place: Place, size: Bbox) -> Bbox:
    """Pixels of a text of this size at a place beside a point."""
    dx, dy, ha, va = place
    x, y = axes.transData.transform(point) + np.array([dx, dy]) * axes.figure.dpi / 72
    left = x - size.width * {"left": 0.0, "center": 0.5, "right": 1.0}[ha]
    bottom = y - size.height * {"bottom": 0.0, "center": 0.5, "top": 1.0}[va]
    return Bbox.from_bounds(left, bottom, size.width, size.height)


def _boxes(axes: Axes, found: Points) -> list[Bbox]:
    """Pixels of points ``[N, 2]`` and of the lines between them."""
    corners = np.column_stack([np.minimum(found[:, 0], _LONGEST), found[:, 1]])
    places = axes.transData.transform(corners)
    steps = np.linspace(0, len(places) - 1, 12 * (len(places) - 1) + 1)
    along = [np.interp(steps, range(len(places)), places[:, axis]) for axis in (0, 1)]
    half = 0.05 * axes.figure.dpi
    return [
        Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in np.column_stack(along)
    ]


def _covered(axes: Axes, box: Bbox, taken: Sequence[Bbox]) -> float:
    """Pixels of a text that something else has, or that lie outside of the axes."""
    shared = (Bbox.intersection(box, other) for other in taken)
    inside = Bbox.intersection(box, axes.get_window_extent())
    outside = _area(box) - (0.0 if inside is None else _area(inside))
    return sum(_area(one) for one in shared if one is not None) + 10 * outside


def _area(box: Bbox) -> float:
    return float(box.width * box.height)


def main() -> None:
    parser = parser_of(__doc__, ".png and .svg")
    parser.add_argument("--tables", type=Path, default=Path("eval/results"), help="a directory")
    parser.add_argument("--model", choices=REFERENCES, default="reference/bolt")
    arguments = parser.parse_args()
    name = short_name(arguments.model)
    try:
        comparison = read(arguments.tables / f"comparison-{name}.csv")
        others = arguments.tables / f"peers-{name}.csv"
        peers = read(others) if others.is_file() else None
    except DataError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    draw(points(comparison, peers), Path(f"{arguments.output}-{name}"))


if __name__ == "__main__":
    main()
