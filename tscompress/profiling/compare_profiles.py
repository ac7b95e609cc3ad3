"""Several rank profiles side by side: a table, and what :mod:`.compared_figures` draws of them.

Compared is what the paper compares across modalities ("Understanding Transformers for Time
Series", Fig. 2a, 4, 5, 12): spectra of the embedded inputs, ranks of W_Q by layer and against the
width, and relative singular values of W_Q and of the feed-forwards.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from tscompress.errors import DataError, UsageError
from tscompress.io.arguments import check_list
from tscompress.io.files import new_directory, user_path, write_text_atomically
from tscompress.io.strict import Strict
from tscompress.io.text import counted, listed, numbered
from tscompress.linalg import even_picks
from tscompress.profiling.compared_figures import COMPARED_FIGURES, save_compared_figures
from tscompress.profiling.rank_profile import PROFILE_FILE, RankProfile, Spectrum, WeightProfile
from tscompress.profiling.tables import MAX_TABLE_EPSILONS

COMPARED_FILE = "compared_ranks.csv"
#: What :meth:`ProfileComparison.save` writes.
COMPARED_FILES = (COMPARED_FILE, *COMPARED_FIGURES)
#: As many as there are colours that can be told apart.
MOST_PROFILES = 12
#: Steps of rounding to four digits that later values of a spectrum may be above earlier ones.
_ROUNDING = 1.001


class ComparedRank(Strict):
    """Mean ε-rank of the matrices of one kind in one model.

    Attributes
    ----------
    profile
        Its name in the comparison.
    matrix
        ``embedding``, ``W_Q``, or ``feed-forward`` (all of its projections).
    kind
        Of attention: ``encoder``, ``decoder``, ``cross``, ...; of the embedding, its inputs.
    d_model
        Width that the matrices read; of an embedding, the width that it has.
    matrices
        How many there are.
    mean_rank, mean_share
        Of these matrices: mean ε-rank, and mean of ε-rank / full rank, in [0, 1].
    """

    profile: str
    family: str
    matrix: str
    kind: str
    d_model: int
    matrices: int
    epsilon: float
    mean_rank: float
    mean_share: float


class ProfileComparison:
    """Profiles with the same ε, by name.

    Attributes
    ----------
    profiles
        Name to profile, in the order given.
    epsilons
        Of all of them, in descending order.
    """

    def __init__(self, profiles: dict[str, RankProfile]) -> None:
        self.profiles = profiles
        self.epsilons = next(iter(profiles.values())).epsilons

    def __repr__(self) -> str:
        listing = ", ".join(map(repr, self.profiles))
        return f"ProfileComparison({listing}; ε = {_shown(self.epsilons)})"

    def rows(self) -> list[ComparedRank]:
        """Mean ranks by profile, matrix, kind and ε."""
        return [row for name in self.profiles for row in self._rows_of(name)]

    def _rows_of(self, name: str) -> Iterator[ComparedRank]:
        profile = self.profiles[name]
        group = profile.embedding[0]
        widths = (weight.in_features for weight in profile.weights if weight.role == "q")
        # A table may have fewer rows than columns.
        width = next(widths, group.spectrum.full_rank)
        yield from self._means(name, "embedding", group.name, width, [group.spectrum])
        chosen = {
            "W_Q": [weight for weight in profile.weights if weight.role == "q"],
            "feed-forward": [weight for weight in profile.weights if weight.part == "feed_forward"],
        }
        for matrix, weights in chosen.items():
            for kind in dict.fromkeys(weight.kind for weight in weights):
                members = [weight for weight in weights if weight.kind == kind]
                spectra = [weight.spectrum for weight in members]
                yield from self._means(name, matrix, kind, members[0].in_features, spectra)

    def _means(
        self, name: str, matrix: str, kind: str, width: int, spectra: Sequence[Spectrum]
    ) -> Iterator[ComparedRank]:
        for index, epsilon in enumerate(self.epsilons):
            yield ComparedRank(
                profile=name,
                family=self.profiles[name].family,
                matrix=matrix,
                kind=kind,
                d_model=width,
                matrices=len(spectra),
                epsilon=epsilon,
                mean_rank=fmean(spectrum.ranks[index] for spectrum in spectra),
                mean_share=fmean(spectrum.relative_ranks()[index] for spectrum in spectra),
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "profiles": list(self.profiles),
            "epsilons": list(self.epsilons),
            "rows": [row.model_dump(mode="json") for row in self.rows()],
        }

    def table(self) -> Table:
        """A row a profile and kind of attention, in % of full rank, for a terminal."""
        shown = even_picks(len(self.epsilons), MAX_TABLE_EPSILONS).tolist()
        epsilons = [self.epsilons[index] for index in shown]
        title = f"ε-rank in % of full rank, at ε = {_shown(epsilons)}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("profile", "attention"):
            table.add_column(heading)
        for heading in ("width", "layers", "embedded inputs", "W_Q", "feed-forward"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name in self.profiles:
            self._add_rows(table, name, epsilons)
            table.add_section()
        return table

    def _add_rows(self, table: Table, name: str, epsilons: Sequence[float]) -> None:
        rows = [row for row in self._rows_of(name) if row.epsilon in epsilons]
        embedded = [row for row in rows if row.matrix == "embedding"]
        label, embedding = escape(name), _shares(embedded)
        # Feed-forwards have the kind of the attention before them, which may be without queries.
        for kind in dict.fromkeys(row.kind for row in rows if row.matrix != "embedding") or [""]:
            queries = [row for row in rows if (row.matrix, row.kind) == ("W_Q", kind)]
            feeds = [row for row in rows if (row.matrix, row.kind) == ("feed-forward", kind)]
            first = (queries or feeds or embedded)[0]
            layers = str(queries[0].matrices) if queries else ""
            cells = (embedding, _shares(queries), _shares(feeds))
            table.add_row(label, kind, str(first.d_model), layers, *cells)
            label, embedding = "", ""

    def save(self, directory: str | Path, *, force: bool = False) -> list[Path]:
        """Write ``compared_ranks.csv`` and the figures; returns the paths.

        Raises
        ------
        OutputExistsError
            The directory holds something and ``force`` is false, or something that is not ours.
        """
        target = user_path(directory)
        with new_directory(target, force=force, writes=COMPARED_FILES) as new:
            write_text_atomically(new / COMPARED_FILE, self._csv())
            drawn = save_compared_figures(self.profiles, new)
        return [target / COMPARED_FILE, *(target / path.name for path in drawn)]

    def _csv(self) -> str:
        stream = io.StringIO()
        writer = csv.DictWriter(stream, tuple(ComparedRank.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.model_dump() for row in self.rows())
        return stream.getvalue()


def compare_profiles(
    profiles: Sequence[RankProfile | str | Path], *, names: Sequence[str] | None = None
) -> ProfileComparison:
    """Put the rank profiles of several models side by side.

    Parameters
    ----------
    profiles
        Two to twelve: results of :func:`tscompress.profile`, or paths of what
        ``tscompress profile --output`` wrote, ``profile.json`` or its directory.
    names
        One for each, for the table and the figures; by default those of the models.

    Raises
    ------
    UsageError
        There are too few or too many, they were measured at different ε, or names do not fit.
    DataError
        A file holds no rank profile, or one whose numbers cannot be.
    """
    check_list("profiles", profiles, (RankProfile, str, Path), "profiles or paths of their files")
    if not 2 <= len(profiles) <= MOST_PROFILES:
        given = counted(len(profiles), "profile")
        raise UsageError(f"got {given}; give 2 to {MOST_PROFILES}.")
    read = [one if isinstance(one, RankProfile) else read_profile(one) for one in profiles]
    places = [
        repr(one.model) if isinstance(one, RankProfile) else repr(str(one)) for one in profiles
    ]
    for place, profile in zip(places, read, strict=True):
        if profile.epsilons != read[0].epsilons:
            raise UsageError(
                f"{places[0]} has ranks at ε = {_shown(read[0].epsilons)}, {place} at ε = "
                f"{_shown(profile.epsilons)}; profile both with the same --epsilon."
            )
    return ProfileComparison(dict(zip(_names(read, names), read, strict=True)))


def _names(profiles: Sequence[RankProfile], names: Sequence[str] | None) -> list[str]:
    """Distinct names: those given, or those of the models, numbered where two are the same."""
    if names is None:
        found: list[str] = []
        for profile in profiles:
            found.append(numbered(profile.model, found))
        return found
    check_list("names", names, (str,), "texts")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise UsageError(f"names are {listed(twice)} twice; give each profile one of its own.")
    if len(names) != len(profiles) or not all(name.strip() for name in names):
        raise UsageError(
            f"{len(names)} names were given for {len(profiles)} profiles; give each one, not empty."
        )
    return list(names)


def read_profile(path: str | Path) -> RankProfile:
    """The profile in ``path``, or in ``profile.json`` of a directory.

    Raises
    ------
    DataError
        There is none, or its numbers cannot be: see :func:`check_profile`.
    """
    place = user_path(path)
    if place.is_dir():
        place = place / PROFILE_FILE
    (profile, *_) = RankProfile.read_file(place)
    check_profile(profile, str(path))
    return profile


def check_profile(profile: RankProfile, place: str) -> None:
    """Refuse numbers that no profile has.

    Raises
    ------
    DataError
        ε are not in (0, 1) and falling, nothing is embedded, or a spectrum is none: values not
        from 1 down to 0, or ranks that do not belong to the ε.
    """
    found = profile.epsilons
    if not found or not all(0 < one < 1 for one in found) or not _falling(found):
        raise DataError(f"{place!r} has ε = {_shown(found)}; they lie in (0, 1), largest first.")
    if not profile.embedding:
        raise DataError(f"{place!r} has no embedded inputs; profile the model again.")
    for name, spectrum in _spectra(profile):
        reason = _wrong(spectrum, len(found))
        if reason is not None:
            raise DataError(f"{place!r} has no spectrum of {name!r}: {reason}.")


def _spectra(profile: RankProfile) -> Iterator[tuple[str, Spectrum]]:
    for group in profile.embedding:
        yield group.name, group.spectrum
    weights: Iterable[WeightProfile] = profile.weights
    for weight in weights:
        for spectrum in (weight.spectrum, *weight.heads):
            yield weight.name, spectrum
    for entry in profile.inputs:
        yield entry.name, entry.spectrum


def _wrong(spectrum: Spectrum, epsilons: int) -> str | None:
    """Why these are no singular values and ranks; None if they can be."""
    values = spectrum.relative
    if not values or not all(math.isfinite(value) and 0 <= value <= 1 for value in values):
        return "relative singular values lie in [0, 1]"
    if not _falling(values):
        return "relative singular values fall"
    if len(values) != spectrum.full_rank:
        return f"{len(values)} singular values cannot have full rank {spectrum.full_rank}"
    if len(spectrum.ranks) != epsilons:
        return f"{len(spectrum.ranks)} ranks do not belong to {epsilons} ε"
    if not all(0 <= rank <= spectrum.full_rank for rank in spectrum.ranks):
        return "a rank is beyond the full rank"
    return None


def _falling(values: Sequence[float]) -> bool:
    return all(later <= earlier * _ROUNDING for earlier, later in pairwise(values))


def _shares(rows: Sequence[ComparedRank]) -> str:
    return " ".join(f"{100 * row.mean_share:3.0f}" for row in rows)


def _shown(epsilons: Iterable[float]) -> str:
    return ", ".join(f"{epsilon:g}" for epsilon in epsilons) or "nothing"
