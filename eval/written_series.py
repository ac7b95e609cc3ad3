"""Files of series as people write them: each layout, separator, date style, encoding and defect.

``eval/series_files.py`` gives them to every command, ``eval/fuzz.py`` damages them, and
``tests/data/reading/test_reading.py`` holds what is read against what was written.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

DAYS = pd.date_range("2023-01-01", periods=40)
IDS = ["007", "7", "Köln", "north"]
VALUES = (np.random.default_rng(0).normal(2000, 300, (4, 40)) * 4).round() / 4  # [4, 40], exact


@dataclass(frozen=True)
class Written:
    """A file, and what sets it apart.

    Attributes
    ----------
    content
        The bytes; the path is where a library that only writes files may write one.
    options
        Of the command, without dashes.
    defect
        What a reader may stumble over, or how the file is packed.
    remedy
        Of a file that is refused: the option or word in the message that says what to do.
    """

    name: str
    content: Callable[[Path], bytes]
    options: Mapping[str, str] = field(default_factory=dict)
    layout: str = "long"
    separator: str = ","
    dates: str = "ISO 8601"
    encoding: str = "UTF-8"
    defect: str = ""
    remedy: str = ""

    def write(self, directory: Path) -> Path:
        """Write it into a directory; returns its path."""
        path = directory / self.name
        path.write_bytes(self.content(path))
        return path


def long(**columns: Any) -> pd.DataFrame:
    """A row a value, the series one below the other; ``columns`` replace others or are added."""
    frame = pd.DataFrame(
        {
            "item_id": np.repeat(IDS, len(DAYS)),
            "date": np.tile(DAYS, len(IDS)),
            "sales": VALUES.ravel(),
        }
    )
    return frame.assign(**columns)


def wide() -> pd.DataFrame:
    """A column a series."""
    return pd.DataFrame(VALUES.T, columns=IDS).assign(date=DAYS)[["date", *IDS]]


def rows(names: list[str]) -> pd.DataFrame:
    """As in M5: attributes that several rows share, an id, and a column a step."""
    attributes = {"id": IDS, "item_id": "x", "store": ["a", "b", "b", "b"]}
    return pd.concat([pd.DataFrame(attributes), pd.DataFrame(VALUES, columns=names)], axis=1)


def lists() -> pd.DataFrame:
    """Times and values of a series in one row."""
    times = [list(DAYS)] * len(IDS)
    return pd.DataFrame({"item_id": IDS, "timestamp": times, "target": VALUES.tolist()})


def csv(frame: pd.DataFrame, **how: Any) -> bytes:
    """As pandas writes it, in UTF-8 unless ``encoding`` is given."""
    encoding = how.pop("encoding", "utf-8")
    return frame.to_csv(index=False, **how).encode(encoding)


def zipped(path: Path, *members: str) -> bytes:
    """An archive of the long table under several names."""
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, csv(long()))
    return path.read_bytes()


def dates(form: str) -> Any:
    """For ``long(date=...)``: times in a form of strftime."""
    return lambda frame: frame["date"].dt.strftime(form)


def numbers(form: str) -> Any:
    """For ``long(sales=...)``: values in a form of str.format."""
    return lambda frame: frame["sales"].map(form.format)


def comma(frame: pd.DataFrame) -> Any:
    """For ``long(sales=...)``: 1.234,50."""
    text = frame["sales"].map("{:,.2f}".format)
    return text.str.translate(str.maketrans(",.", ".,"))


def _saved(path: Path, save: Callable[[Path], object]) -> bytes:
    save(path)
    return path.read_bytes()


def _seconds(frame: pd.DataFrame) -> Any:
    return (frame["date"] - pd.Timestamp(0)) // pd.Timedelta(1, "s")


def _list_lines(_: Path) -> bytes:
    frame = lists().assign(start="2023-01-01", freq="D").drop(columns="timestamp")
    return frame.to_json(orient="records", lines=True).encode()


def _row_lines(_: Path) -> bytes:
    frame = long(date=dates("%Y-%m-%d"))
    return frame.to_json(orient="records", lines=True).encode()


_DATED = [day.strftime("%Y-%m-%d") for day in DAYS]
_COUNTED = [f"d_{day}" for day in range(1, len(DAYS) + 1)]
_BERLIN = np.tile(DAYS.tz_localize("Europe/Berlin"), len(IDS))
_EVERY = {"target_column": "*"}

#: They hold the same series, to the bit.
GOOD: tuple[Written, ...] = (
    Written("long.csv", lambda p: csv(long())),
    Written("index.csv", lambda p: long().to_csv().encode(), defect="index of pandas"),
    Written("shuffled.csv", lambda p: csv(pd.concat([long()[::3], long()[1::3], long()[2::3]])),
            defect="rows in no order"),
    Written("semicolon.csv", lambda p: csv(long(), sep=";", decimal=","), separator=";",
            defect="decimal comma"),
    Written("bar.csv", lambda p: csv(long(), sep="|"), separator="bar"),
    Written("tabs.tsv", lambda p: csv(long(), sep="\t"), separator="tab"),
    Written("tabs.csv", lambda p: csv(long(), sep="\t"), separator="tab", defect="named .csv"),
    Written("days_first.csv", lambda p: csv(long(date=dates("%d.%m.%Y"))), dates="31.12.2023"),
    Written("slashes.csv", lambda p: csv(long(date=dates("%d/%m/%Y"))), dates="31/12/2023"),
    Written("american.csv", lambda p: csv(long(date=dates("%m/%d/%Y"))), dates="12/31/2023"),
    Written("short_years.csv", lambda p: csv(long(date=dates("%d.%m.%y"))),
            {"date_format": "%d.%m.%y"}, dates="31.12.23"),
    Written("compact.csv", lambda p: csv(long(date=dates("%Y%m%d"))), {"date_format": "%Y%m%d"},
            dates="20231231"),
    Written("utc.csv", lambda p: csv(long(date=dates("%Y-%m-%dT%H:%M:%SZ"))),
            dates="2023-12-31T00:00:00Z"),
    Written("seconds.csv", lambda p: csv(long(date=_seconds)), {"date_format": "s"},
            dates="seconds since 1970"),
    Written("thousands.csv", lambda p: csv(long(sales=numbers("{:,.2f}"))), defect="1,234.50"),
    Written("swiss.csv",
            lambda p: csv(long(sales=lambda f: numbers("{:,.2f}")(f).str.replace(",", "'"))),
            defect="1'234.50"),
    Written("german.csv", lambda p: csv(long(sales=comma), sep=";"), separator=";",
            defect="1.234,50"),
    Written("cp1252.csv", lambda p: csv(long(), encoding="cp1252"), {"encoding": "cp1252"},
            encoding="cp1252"),
    Written("utf16.csv", lambda p: csv(long(), encoding="utf-16"), {"encoding": "utf-16"},
            encoding="UTF-16"),
    Written("bom.csv", lambda p: b"\xef\xbb\xbf" + csv(long()), encoding="UTF-8 with a mark"),
    Written("covariates.csv", lambda p: csv(long(price=2.5, promotion=1)),
            {"target_column": "sales"}, defect="other columns of numbers"),
    Written("packed.csv.gz", lambda p: gzip.compress(csv(long())), defect="gzip"),
    Written("packed.csv.bz2", lambda p: bz2.compress(csv(long())), defect="bzip2"),
    Written("packed.csv.xz", lambda p: lzma.compress(csv(long())), defect="xz"),
    Written("packed.zip", lambda p: zipped(p, "sales.csv"), defect="zip"),
    Written("wide.csv", lambda p: csv(wide()), _EVERY, layout="wide"),
    Written("wide_index.csv",
            lambda p: wide().set_index("date").rename_axis(None).to_csv().encode(), _EVERY,
            layout="wide", defect="times without a name"),
    Written("rows.csv", lambda p: csv(rows(_DATED)), layout="a row a series"),
    Written("m5.csv", lambda p: csv(rows(_COUNTED)), {"frequency": "D"}, layout="a row a series",
            dates="d_1, d_2"),
    Written("long.parquet", lambda p: _saved(p, long().to_parquet), separator="Parquet"),
    Written("long.feather", lambda p: _saved(p, long().to_feather), separator="Arrow"),
    Written("berlin.parquet", lambda p: _saved(p, long(date=_BERLIN).to_parquet),
            separator="Parquet", dates="Europe/Berlin"),
    Written("lists.parquet", lambda p: _saved(p, lists().to_parquet), separator="Parquet",
            layout="lists in a row"),
    Written("lists.jsonl", _list_lines, separator="JSON lines", layout="lists in a row",
            dates="start and freq"),
    Written("rows.jsonl", _row_lines, separator="JSON lines"),
)  # fmt: skip


def _one(times: Any) -> bytes:
    return csv(pd.DataFrame({"date": times, "y": np.arange(float(len(times)))}))


def _column_each(names: list[str]) -> bytes:
    """A row a series, and a column for each of these names."""
    table = pd.DataFrame(VALUES[:, : len(names)], columns=names)
    return csv(pd.concat([pd.DataFrame({"id": IDS}), table], axis=1))


def _nineteen_and_short() -> bytes:
    tables = [long(item_id=np.repeat([f"{k}-{one}" for one in IDS], len(DAYS))) for k in range(5)]
    return csv(pd.concat(tables)[: -len(DAYS) + 2])


#: Two days in Berlin, when clocks are put back between them.
_AUTUMN = pd.date_range("2023-10-28", periods=49, freq="h", tz="Europe/Berlin")
_QUARTERS = [f"{year}Q{quarter}" for year in (2014, 2015, 2016) for quarter in (1, 2, 3, 4)]

#: They hold other series, or fewer values, and a summary says so.
OTHER: tuple[Written, ...] = (
    Written("gaps.csv", lambda p: csv(long().drop(index=[3, 4, 50])), defect="days without a row"),
    Written("empty_cells.csv", lambda p: csv(long(sales=VALUES.ravel()).replace(
        {"sales": {VALUES[0, 5]: None, VALUES[1, 9]: None}})), defect="empty cells"),
    Written("words.csv", lambda p: csv(long(sales=numbers("{:.2f}")).replace(
        {"sales": {f"{VALUES[0, day]:.2f}": word for day, word in
                   enumerate(("NA", "NaN", "n/a", "#N/A", "null", "None"), start=5)}})),
            defect="NA, NaN, n/a, #N/A, null, None"),
    Written("short.csv", lambda p: _nineteen_and_short(), defect="one of twenty has two values"),
    Written("values.csv", lambda p: csv(long()[["item_id", "sales"]]), {"frequency": "D"},
            dates="none"),
    Written("zeros.csv", lambda p: b"date,y\n" + b"".join(
        f"{day},{value}\n".encode() for day, value in zip(_DATED, ["-0.0", "0", "-0", "5"] * 10,
                                                          strict=True)),
            layout="one series", defect="negative zero"),
    Written("months.csv", lambda p: _one(pd.period_range("2019-11", periods=40,
            freq="M").astype(str)), layout="one series", dates="2023-01"),
    Written("quarters.csv", lambda p: _one(_QUARTERS), layout="one series", dates="2023Q1"),
    Written("quarter_columns.csv", lambda p: _column_each(_QUARTERS), layout="a row a series",
            dates="2023Q1"),
    Written("year_columns.csv", lambda p: _column_each(
        [str(year) for year in range(1990, 2020) if year != 1994]), layout="a row a series",
            dates="2023", defect="a year without a column"),
    Written("autumn_utc.csv", lambda p: _one(_AUTUMN.tz_convert("UTC").map(pd.Timestamp.isoformat)),
            layout="one series", dates="2023-12-31T00:00:00+00:00", defect="clocks put back"),
    Written("autumn.parquet", lambda p: _saved(p, pd.DataFrame(
        {"date": _AUTUMN, "y": np.arange(49.0)}).to_parquet), layout="one series",
            separator="Parquet", dates="Europe/Berlin", defect="clocks put back"),
    Written("kolkata.csv", lambda p: _one(pd.date_range(
        "2023-10-28", periods=49, freq="h", tz="+05:30").map(pd.Timestamp.isoformat)),
            layout="one series", dates="2023-12-31T00:00:00+05:30"),
)  # fmt: skip

_EARLY = long()[lambda frame: frame["date"].dt.day <= 12]
_JUNK = np.random.default_rng(0).bytes(4000)
_ORDER = np.tile(range(len(DAYS)), len(IDS))
_LISTED = lists().assign(more=VALUES.tolist()).rename(columns={"target": "sales"})
#: They are ambiguous or broken.
REFUSED: tuple[Written, ...] = (
    Written("days.csv", lambda p: csv(_EARLY.assign(date=dates("%d/%m/%Y"))), dates="01/02/2023",
            defect="day or month first", remedy="--date-format"),
    Written("years.csv", lambda p: csv(long(date=dates("%d.%m.%y"))), dates="31.12.23",
            defect="years of two digits", remedy="--date-format"),
    Written("numbers.csv", lambda p: csv(long(date=_ORDER)), dates="0, 1, 2",
            defect="numbers for times", remedy="--date-format"),
    Written("all_columns.csv", lambda p: csv(wide()), layout="wide", defect="which are series",
            remedy="--target-column"),
    Written("two.csv", lambda p: csv(long(price=2.5)), defect="two columns of numbers",
            remedy="--target-column"),
    Written("store.csv",
            lambda p: csv(long(target=1.0).rename(columns={"item_id": "shop"})),
            defect="unusual name of the ids", remedy="--id-column"),
    Written("week.csv", lambda p: csv(long().rename(columns={"date": "week", "sales": "y"})),
            defect="unusual name of the times", remedy="--time-column"),
    Written("stores.csv",
            lambda p: csv(wide().set_axis(["week", "s_1", "s_2", "s_3", "s_4"], axis=1)),
            layout="a column a series", defect="unusual name of the times, counted series",
            remedy="--time-column"),
    Written("no_header.csv", lambda p: csv(wide()[[IDS[0]]], header=False),
            layout="one series", defect="no header", remedy="--target-column"),
    Written("no_ids.csv", lambda p: csv(rows(_COUNTED).drop(columns="id")),
            layout="a row a series", dates="d_1, d_2", defect="no ids", remedy="--id-column"),
    Written("commas.csv", lambda p: csv(long(sales=numbers("{:,.0f}"))), defect="1,234",
            remedy="--decimal"),
    Written("dots.csv",
            lambda p: csv(long(sales=lambda f: numbers("{:,.0f}")(f).str.replace(",", ".")),
                          sep=";"), separator=";", defect="1.234", remedy="--decimal"),
    Written("latin.csv", lambda p: csv(long(), encoding="cp1252"), encoding="cp1252",
            remedy="--encoding"),
    Written("both.csv", lambda p: b"a;b,c;d\n1;2,3;4\n", separator="; and ,",
            remedy="--separator"),
    Written("cells.csv", lambda p: b"date,y\n2024-01-01,1,5\n2024-01-02,2,5\n",
            layout="one series", defect="decimal comma", remedy="--separator"),
    Written("again.csv", lambda p: csv(pd.concat([long(), long().head(1)])),
            defect="a row twice", remedy="repeat a time"),
    Written("header.csv", lambda p: csv(long()) + csv(long().iloc[:0]),
            defect="the header again", remedy="'date'"),
    Written("text.csv", lambda p: csv(long().astype(object).replace(VALUES[0, 3], "closed")),
            defect="a word among numbers", remedy="'closed'"),
    Written("irregular.csv",
            lambda p: b"date,y\n2024-01-01,1\n2024-01-02,2\n2024-01-03 07:00,3\n",
            layout="one series", defect="a time between days", remedy="--frequency"),
    Written("zones.csv", lambda p: _one(_AUTUMN.map(pd.Timestamp.isoformat)),
            layout="one series", dates="2023-12-31T00:00:00+01:00", defect="clocks put back",
            remedy="UTC"),
    Written("autumn.csv", lambda p: _one(_AUTUMN.tz_localize(None).map(pd.Timestamp.isoformat)),
            layout="one series", dates="2023-12-31T00:00:00", defect="clocks put back",
            remedy="UTC"),
    Written("no_id.csv", lambda p: csv(long(item_id=[None, *["a"] * (len(long()) - 1)])),
            defect="a row without an id", remedy="have no id"),
    Written("two.zip", lambda p: zipped(p, "a.csv", "b.csv"), defect="two files in a zip",
            remedy="one file"),
    Written("lists_twice.parquet", lambda p: _saved(p, _LISTED.to_parquet), separator="Parquet",
            layout="lists in a row", defect="two columns of lists", remedy="--target-column"),
    Written("times.parquet", lambda p: _saved(p, lists().assign(
        timestamp=[list(DAYS[1:])] * len(IDS)).to_parquet), separator="Parquet",
            layout="lists in a row", defect="one time too few", remedy="39 times for 40 values"),
    Written("day_columns.csv", lambda p: csv(rows(_COUNTED).drop(columns="d_6")),
            layout="a row a series", dates="d_1, d_2", defect="d_6 is not there", remedy="'d_7'"),
    Written("comment.csv", lambda p: b"# of 2023\n" + csv(long()), defect="a line above the header",
            remedy="than the header"),
    Written("total.csv", lambda p: csv(long()) + b"total,,9\n", defect="a sum below",
            remedy="no time"),
    Written("huge.csv", lambda p: b"date,y\n2024-01-01,1e308\n2024-01-02,2\n2024-01-03,3\n",
            layout="one series", defect="1e308", remedy="'1e308'"),
    Written("wide_characters.csv", lambda p: csv(long(), encoding="utf-16"), encoding="UTF-16",
            remedy="--encoding"),
    Written("empty.csv", lambda p: b"", layout="none", defect="empty", remedy="No columns"),
    Written("header_alone.csv", lambda p: csv(long()[:0]), defect="no rows", remedy="no rows"),
    Written("zeros_alone.csv", lambda p: bytes(4000), layout="none", defect="bytes of zero",
            remedy="zero bytes"),
    Written("random.csv", lambda p: _JUNK, layout="none", defect="random bytes",
            remedy="--encoding"),
    Written("random.parquet", lambda p: _JUNK, layout="none", separator="Parquet",
            defect="random bytes", remedy="Parquet"),
    Written("random.feather", lambda p: _JUNK, layout="none", separator="Arrow",
            defect="random bytes", remedy="IPC"),
    Written("random.csv.gz", lambda p: _JUNK, layout="none", defect="random bytes, named gzip",
            remedy="gzip"),
    Written("cut.csv.gz", lambda p: gzip.compress(csv(long()))[:-300], defect="half of a gzip",
            remedy="ended"),
)  # fmt: skip
