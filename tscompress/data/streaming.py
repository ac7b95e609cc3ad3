"""Series of any number of files, one after another: a corpus larger than memory can be trained on.

Large files are read in batches of records; files take turns; a bounded buffer shuffles. Every
series is checked against the evaluation suites when it is first read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from tscompress.data.leakage import evaluation_dataset_names, leaks
from tscompress.data.reading.format import GivenSeries
from tscompress.data.reading.read import check_is_file, read_file, read_in_parts, series_of_parts
from tscompress.data.reading.summary import MIN_OBSERVED, SeriesSummary, summarize
from tscompress.data.reading.tables import SUFFIXES, kind_of, naming_file, record_parts
from tscompress.data.reading.time_grid import RegularSeries
from tscompress.data.reading.values import floats
from tscompress.data.series import DEFAULT_FORMAT, iterate_given
from tscompress.data.synthetic import FloatArray, cut_window
from tscompress.errors import DataError, LeakError, OfflineError
from tscompress.io.files import user_path
from tscompress.io.network import network_errors
from tscompress.io.untrusted import single_line

#: A larger file is read in parts.
WHOLE_FILE_BYTES = 2**26
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?::(?P<config>[\w.-]+))?")

T = TypeVar("T")


def iterate_series(source: str | Path, form: GivenSeries = DEFAULT_FORMAT) -> Iterator[FloatArray]:
    """Series of a file, a directory of files or a Hub dataset, float32, each 1-D, in their order.

    Files are read as :func:`tscompress.read_series` does. Of one that is larger than 64 MB no more
    than a batch of records is held: of a long table the rows of one series must then follow one
    another. A Hub dataset is ``owner/name`` or ``owner/name:config``; its train split is streamed,
    with the package ``datasets``, and read as a file with lists in its rows is.

    Raises
    ------
    DataError
        The source is missing, of another kind, or holds no series; rows of one series do not
        follow one another.
    LeakError
        A Hub dataset of the evaluation suites.
    OfflineError
        The Hub could not be reached.
    """
    return (values for _, values in _named_series(source, form))


def _named_series(source: str | Path, form: GivenSeries) -> Iterator[tuple[str, FloatArray]]:
    """The file or dataset of each series, and the series."""
    path = user_path(source)
    with naming_file(path):
        found = series_files(path) if path.is_dir() else None
    if found is not None:
        if not found:
            raise DataError(f"{str(path)!r} holds no file of {', '.join(SUFFIXES)}.")
        return chain.from_iterable(_values(f.name, _file_series(f, form), form) for f in found)
    match = _HUB_ID.fullmatch(str(source))
    if match and _is_on_hub(source):
        return _values(str(source), _hub_series(match["repo"], match["config"], form), form)
    return _values(path.name, _file_series(path, form), form)


def series_files(directory: Path) -> list[Path]:
    """The files of series in a directory, at any depth, not what datasets notes beside them."""
    notes = ("dataset_info.json", "dataset_dict.json", "state.json")
    return sorted(
        path
        for path in directory.rglob("*")
        if path.name not in notes
        and not path.name.startswith(".")
        and path.is_file()
        and kind_of(path)
    )


def summaries(sources: Iterable[str | Path], form: GivenSeries) -> Iterator[SeriesSummary]:
    """What the sources hold, file by file, but for those that are read in parts and the Hub's.

    Raises
    ------
    DataError
        A file cannot be read.
    """
    for source in sources:
        path = user_path(source)
        for file in series_files(path) if path.is_dir() else [path]:
            if file.is_file() and file.stat().st_size <= WHOLE_FILE_BYTES:
                yield summarize(read_file(file, form), hold_out=form.hold_out)


def check_sources(sources: Iterable[str | Path], form: GivenSeries, count: int = 1024) -> None:
    """Refuse what :class:`SeriesStream` would; of each source ``count`` series are looked at.

    Hub datasets are not, as that would need the network.

    Raises
    ------
    DataError, LeakError
    """
    for source in sources:
        if not _is_on_hub(source):
            for where, values in islice(_usable(source, form), count):
                if leaks(values):
                    raise _leaked(where)


def _is_on_hub(source: str | Path) -> bool:
    path = user_path(source)
    named = _HUB_ID.fullmatch(str(source)) is not None
    return named and not path.exists() and not kind_of(path)


def _leaked(where: str) -> LeakError:
    return LeakError(
        f"{where} belongs to the evaluation suites; scores would mean nothing. Use other series."
    )


def _values(
    name: str, series: Iterable[RegularSeries], form: GivenSeries
) -> Iterator[tuple[str, FloatArray]]:
    for one in series:
        yield name, floats(one.values[: max(0, len(one.values) - form.hold_out)])


def _file_series(path: Path, form: GivenSeries) -> Iterator[RegularSeries]:
    check_is_file(path)
    if path.stat().st_size <= WHOLE_FILE_BYTES:
        yield from read_file(path, form).series
        return
    with naming_file(path):
        for part in read_in_parts(path, form):
            yield from part


def _hub_series(repo: str, config: str | None, form: GivenSeries) -> Iterator[RegularSeries]:
    known = evaluation_dataset_names()
    for name in (config, repo, repo.rsplit("/", 1)[-1]):
        if name is not None and name.lower() in known and not (name == repo and config):
            raise LeakError(
                f"{name!r} belongs to the evaluation suites; scores would mean nothing. Use other "
                "series."
            )
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{repo!r} is no file; as a Hub dataset it needs the package datasets: "
            "pip install 'tscompress[eval]'."
        ) from None
    try:
        rows = datasets.load_dataset(repo, config, split="train", streaming=True)
        for series in series_of_parts((part, form) for part in record_parts(rows)):
            yield from series
    except (datasets.exceptions.DatasetsError, RuntimeError, ValueError) as error:
        raise DataError(f"{repo!r} cannot be read from the Hub: {single_line(error)}.") from None
    except network_errors() as error:
        raise OfflineError(
            f"{repo!r} is no file here, and the Hub could not be reached "
            f"({type(error).__name__}); check the name and the network."
        ) from None


# --------------------------------------------------------------------------------------------------
# Windows
# --------------------------------------------------------------------------------------------------


class SeriesStream:
    """Windows of series that are read as they are needed, in a shuffled order without end.

    A buffer of ``buffer_size`` series is held, each cut to at most ``longest`` steps at a random
    place. A draw takes a window of a random one of them, and the next series of the sources takes
    its place. Sources take turns; when all are read, they start again. What fits into the buffer is
    read once. The same seed and the same draws give the same windows.

    Parameters
    ----------
    sources
        What :func:`iterate_series` reads, or sequences of 1-D arrays.
    longest
        Longest window that will be asked for, in steps.
    form
        How files are written.
    held_out_every
        Every so many series one is kept apart, in ``held_out``, and of fewer the last, unless it is
        the only one; 0: none.
    held_out_limit
        At most this many are kept apart; later ones are passed over.
    known_apart
        No series is of an evaluation suite, so none is checked.

    Raises
    ------
    DataError, LeakError
        When what cannot be used is read, at the latest when it would be drawn.
    """

    def __init__(
        self,
        sources: Sequence[str | Path | Sequence[FloatArray]],
        *,
        longest: int,
        seed: int = 0,
        form: GivenSeries = DEFAULT_FORMAT,
        buffer_size: int = 1024,
        held_out_every: int = 10,
        held_out_limit: int = 256,
        known_apart: bool = False,
    ) -> None:
        self._sources = sources
        self._known_apart = known_apart
        self._form = form
        self._longest = 4 * longest
        self._rng = np.random.default_rng([seed, 1])
        self._held_out_every = held_out_every
        self._held_out_limit = held_out_limit
        self.held_out: list[FloatArray] = []
        self._checked = False  # whether all sources were read to their end once
        self._buffer: list[FloatArray] = []
        self._incoming = self._endless()
        self._buffer = list(islice(self._incoming, buffer_size))
        self._whole = len(self._buffer) < buffer_size
        if held_out_every and self._whole and not self.held_out and len(self._buffer) > 1:
            self.held_out.append(self._buffer.pop())
        if not self._buffer:
            raise DataError(
                f"no series of {len(sources)} source(s) is left to train on; each needs "
                f"{MIN_OBSERVED} observed values."
            )

    def sample(self, rng: np.random.Generator, count: int, length: int) -> FloatArray:
        """``count`` windows of ``length`` steps, ``[count, length]``; NaN on the left if short."""
        windows = np.empty((count, length), dtype=np.float32)
        for row in range(count):
            slot = int(rng.integers(len(self._buffer)))
            windows[row] = cut_window(rng, self._buffer[slot], length)
            if not self._whole:
                self._buffer[slot] = next(self._incoming)
        return windows

    def sample_held_out(self, rng: np.random.Generator, count: int, length: int) -> FloatArray:
        """Windows ``[count, length]`` of the series kept apart; of a single series, of that one."""
        series = self.held_out or self._buffer
        picks = rng.integers(len(series), size=count)
        return np.stack([cut_window(rng, series[pick], length) for pick in picks])

    def _endless(self) -> Iterator[FloatArray]:
        seen = 0
        while True:
            for where, values in _in_turns(
                [_usable(source, self._form) for source in self._sources]
            ):
                if not (self._checked or self._known_apart) and leaks(values):
                    raise _leaked(where)
                values = self._cut(values)
                seen += 1
                if self._held_out_every and seen % self._held_out_every == 0:
                    if not self._checked and len(self.held_out) < self._held_out_limit:
                        self.held_out.append(values)
                    continue
                yield values
            self._checked = True
            if not self._buffer:  # it is being filled, and all series fit
                return
            seen = 0

    def _cut(self, values: FloatArray) -> FloatArray:
        """At most ``longest`` steps, wherever they are: a long series comes again."""
        if len(values) <= self._longest:
            return values
        start = int(self._rng.integers(len(values) - self._longest + 1))
        return values[start : start + self._longest].copy()


def _usable(
    source: str | Path | Sequence[FloatArray], form: GivenSeries
) -> Iterator[tuple[str, FloatArray]]:
    """Series with enough observed values, from the first to the last of these, and their names.

    Raises
    ------
    DataError
        At the end, if there was none.
    """
    if isinstance(source, str | Path):
        name, series = repr(str(source)), _named_series(source, form)
    else:
        name = "what was given"
        series = (("", values) for values in iterate_given(source))
    numbers: Counter[str] = Counter()
    found = False
    for file, values in series:
        number = numbers[file]
        numbers[file] += 1
        observed = np.flatnonzero(np.isfinite(values))
        if len(observed) >= MIN_OBSERVED:
            found = True
            where = f"series {number}" + (f" of {file!r}" if file else "")
            yield where, values[observed[0] : observed[-1] + 1]
    if not found:
        raise DataError(f"{name} holds no series with {MIN_OBSERVED} observed values.")


def _in_turns(streams: Sequence[Iterator[T]]) -> Iterator[T]:
    left = list(streams)
    while left:
        for stream in tuple(left):
            try:
                value = next(stream)
            except StopIteration:
                left.remove(stream)
            else:
                yield value
