"""Series of any number of files, one after another: a corpus larger than memory can be trained on.

Files are read in batches of records and take turns; a bounded buffer shuffles. Every series is held
against the evaluation suites when it is first read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from tscompress.data.leakage import evaluation_dataset_names, leaks
from tscompress.data.series import SUFFIXES, iterate_given, json_lines_targets, read_series
from tscompress.data.synthetic import FloatArray, cut_window
from tscompress.data.tables import (
    ID_COLUMNS,
    TARGET_COLUMNS,
    TIME_COLUMNS,
    check_rows,
    first_of,
    floats,
    naming_file,
    sort_by_time,
    whole,
)
from tscompress.errors import DataError, LeakError, OfflineError
from tscompress.io.files import user_path
from tscompress.io.untrusted import shown, single_line

ROWS_AT_ONCE = 65_536  # of a long table, read at once
LISTS_AT_ONCE = 256  # series of a table with one series a row, read at once
#: A series with fewer observed values has no forecast to learn from.
_MIN_OBSERVED = 3
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?::(?P<config>[\w.-]+))?")

Frame = Any
T = TypeVar("T")


def iterate_series(source: str | Path) -> Iterator[FloatArray]:
    """Series of a file, a directory of files or a Hub dataset, float32, each 1-D, in their order.

    CSV, Parquet, Arrow and JSON lines as :func:`tscompress.read_series` takes them, but without
    holding more than a batch of records: of a long table the rows of one series must follow one
    another, and no series goes on in another file. Parquet and Arrow may also have a list of values
    a row. A Hub dataset is ``owner/name`` or ``owner/name:config``; its train split is streamed,
    with the package ``datasets``, and all its columns of lists but the timestamps are series.

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
    return (values for _, values in _named_series(source))


def _named_series(source: str | Path) -> Iterator[tuple[str, FloatArray]]:
    """The file or dataset of each series, and the series."""
    path = user_path(source)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if _is_of_series(p))
        if not found:
            raise DataError(f"{str(path)!r} holds no file of {', '.join(SUFFIXES)}.")
        return chain.from_iterable(_named(file.name, _file_series(file)) for file in found)
    match = _HUB_ID.fullmatch(str(source))
    if match and not path.exists() and path.suffix.lower() not in SUFFIXES:
        return _named(str(source), _hub_series(match["repo"], match["config"]))
    return _named(path.name, _file_series(path))


def _is_of_series(path: Path) -> bool:
    """Whether a path in a directory of series is a file of them, not what datasets notes beside."""
    if path.name in ("dataset_info.json", "dataset_dict.json", "state.json"):
        return False
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _named(name: str, series: Iterable[FloatArray]) -> Iterator[tuple[str, FloatArray]]:
    return ((name, values) for values in series)


def _file_series(path: Path) -> Iterator[FloatArray]:
    if not path.is_file():
        raise DataError(f"there is no file {str(path)!r}.")
    suffix = path.suffix.lower()
    readers = {
        ".csv": _csv_frames,
        ".parquet": _parquet_frames,
        ".arrow": _arrow_frames,
        ".feather": _arrow_frames,
    }
    with naming_file(path):
        if suffix in (".jsonl", ".json"):
            with path.open(encoding="utf-8") as stream:
                for _, rows in json_lines_targets(stream):
                    yield from rows
        elif suffix in readers:
            yield from _table_series(path, readers[suffix](path))
        else:
            read_series(path)  # which says what is supported


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def _csv_frames(path: Path) -> Iterator[Frame]:
    columns = {str(column).lower(): column for column in pd.read_csv(path, nrows=0).columns}
    identifier = first_of(columns, ID_COLUMNS)
    # Types are guessed for each chunk anew: 007 would be a number in one and a name in the next.
    types = {} if identifier is None else {identifier: str}
    with pd.read_csv(path, chunksize=ROWS_AT_ONCE, dtype=types) as chunks:
        yield from chunks


def _parquet_frames(path: Path) -> Iterator[Frame]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        rows = _batch_rows(file.schema_arrow)
        for batch in file.iter_batches(batch_size=rows):
            yield whole(batch).to_pandas()


def _arrow_frames(path: Path) -> Iterator[Frame]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_file(source)
            batches: Iterable[Any] = (
                reader.get_batch(index) for index in range(reader.num_record_batches)
            )
        except pa.ArrowInvalid:  # the stream format, in which datasets keeps its files
            source.seek(0)
            batches = reader = pa.ipc.open_stream(source)
        rows = _batch_rows(reader.schema)
        for batch in batches:
            check_rows(batch.num_rows, batch.num_columns)
            whole(batch)
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows).to_pandas()


def _batch_rows(schema: Any) -> int:
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    many = any(is_a(field.type) for field in schema for is_a in lists)
    return LISTS_AT_ONCE if many else ROWS_AT_ONCE


def _table_series(path: Path, frames: Iterator[Frame]) -> Iterator[FloatArray]:
    first = next(frames, None)
    if first is None:
        raise ValueError("there are no rows")
    frames = chain([first], frames)
    by_lower = {str(column).lower(): column for column in first.columns}
    lists = [column for column in first.columns if _holds_lists(first[column])]
    time, target, identifier = (
        first_of(by_lower, names) for names in (TIME_COLUMNS, TARGET_COLUMNS, ID_COLUMNS)
    )
    if lists:
        wanted = [target] if target in lists else [name for name in lists if name != time]
        for frame in frames:
            for row in frame[wanted].itertuples(index=False):
                yield from chain.from_iterable(_rows_of(cell) for cell in row)
    elif target is None or identifier is None:
        yield from read_series(path)  # one series, or one a column
    else:
        yield from _runs(frames, identifier, target, time)


def _runs(frames: Iterator[Frame], identifier: Any, target: Any, time: Any) -> Iterator[FloatArray]:
    """Series of a long table: consecutive rows with the same id, over the ends of frames too.

    Raises
    ------
    ValueError
        The rows of a series do not follow one another.
    """
    held: Frame = None
    ended: set[int] = set()  # hashes of the ids before
    for frame in frames:
        if held is not None:
            frame = pd.concat([held, frame], ignore_index=True)
        numbers, names = pd.factorize(frame[identifier], use_na_sentinel=False)
        ends = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        for start, stop in pairwise([0, *ends, len(frame)]):
            if (name := hash(str(names[numbers[start]]))) in ended:
                raise ValueError(
                    f"rows of series {shown(names[numbers[start]])} do not follow one another; "
                    f"sort the file by {identifier}"
                )
            if stop < len(frame):
                ended.add(name)
                yield _run(frame.iloc[start:stop], target, time)
        held = frame.iloc[ends[-1] if len(ends) else 0 :]
    if held is not None and len(held):
        yield _run(held, target, time)


def _run(frame: Frame, target: Any, time: Any) -> FloatArray:
    values = floats(frame[target])
    return values if time is None else values[sort_by_time(frame[time])[0]]


def _holds_lists(column: Any) -> bool:
    known = column.dropna()
    return bool(len(known)) and isinstance(known.iloc[0], list | np.ndarray)


def _rows_of(cell: Any) -> Iterator[FloatArray]:
    """The series of one cell: a list of numbers, or of such lists."""
    if not isinstance(cell, list | np.ndarray) or not len(cell):
        return
    nested = isinstance(cell[0], list | np.ndarray)
    yield from (floats(row) for row in (cell if nested else [cell]))


def _hub_series(repo: str, config: str | None) -> Iterator[FloatArray]:
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
        for row in datasets.load_dataset(repo, config, split="train", streaming=True):
            names = {str(name).lower(): name for name in row}
            time = first_of(names, TIME_COLUMNS)
            target = first_of(names, TARGET_COLUMNS)
            wanted = [name for name in row if name != time] if target is None else [target]
            for name in wanted:
                cell = row[name]
                if isinstance(cell, list | np.ndarray) and not _is_text(cell):
                    yield from _rows_of(cell)
    except (datasets.exceptions.DatasetsError, RuntimeError, ValueError) as error:
        raise DataError(f"{repo!r} cannot be read from the Hub: {single_line(error)}.") from None
    except OSError as error:
        raise OfflineError(
            f"{repo!r} is no file here, and the Hub could not be reached "
            f"({type(error).__name__}); check the name and the network."
        ) from None


def _is_text(cell: Any) -> bool:
    return len(cell) > 0 and isinstance(cell[0], str)


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
    held_out_every
        Every so many series one is kept apart, in ``held_out``, and of fewer the last, unless it is
        the only one; 0: none.
    held_out_limit
        At most so many are kept apart; later ones are passed over.

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
        buffer_size: int = 1024,
        held_out_every: int = 10,
        held_out_limit: int = 256,
    ) -> None:
        self._sources = sources
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
                f"{_MIN_OBSERVED} observed values."
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
        """Windows of the series kept apart; of a single series none is, and these are of it."""
        series = self.held_out or self._buffer
        picks = rng.integers(len(series), size=count)
        return np.stack([cut_window(rng, series[pick], length) for pick in picks])

    def _endless(self) -> Iterator[FloatArray]:
        seen = 0
        while True:
            for where, values in _in_turns([_usable(source) for source in self._sources]):
                if not self._checked and leaks(values):
                    raise LeakError(
                        f"{where} belongs to the evaluation suites; scores would mean nothing. Use "
                        "other series."
                    )
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


def _usable(source: str | Path | Sequence[FloatArray]) -> Iterator[tuple[str, FloatArray]]:
    """Series with enough observed values, from the first to the last of these, and their names.

    Raises
    ------
    DataError
        At the end, if there was none.
    """
    if isinstance(source, str | Path):
        name, series = repr(str(source)), _named_series(source)
    else:
        name, series = "what was given", _named("", iterate_given(source))
    numbers: Counter[str] = Counter()
    found = False
    for file, values in series:
        number = numbers[file]
        numbers[file] += 1
        observed = np.flatnonzero(np.isfinite(values))
        if len(observed) >= _MIN_OBSERVED:
            found = True
            where = f"series {number}" + (f" of {file!r}" if file else "")
            yield where, values[observed[0] : observed[-1] + 1]
    if not found:
        raise DataError(f"{name} holds no series with {_MIN_OBSERVED} observed values.")


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
