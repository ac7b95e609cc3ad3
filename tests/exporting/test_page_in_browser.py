"""Pages in Chromium, opened from the disk: their numbers, input of all kinds, what they ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import Page, browser_path, open_page

from tscompress.errors import DownloadError
from tscompress.exporting.page.bundle import write_page
from tscompress.exporting.page.engine import Engine, find_engine
from tscompress.runtime.load import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium on PATH"),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    try:
        return find_engine()
    except DownloadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["chronos-bolt", "chronos-2"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def page(
    family: str, exported: dict[str, Path], engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    directory = tmp_path_factory.mktemp(f"site-{family}")
    write_page(directory, load(exported[family]), engine, name=family)
    with open_page(str(browser_path()), tmp_path_factory.mktemp("profile")) as found:
        found.show(1440, 900)
        found.open((directory / "index.html").as_uri())
        found.wait_for("document.body.dataset.ready", seconds=120)
        yield found
        assert found.said == [], "no error, nothing that the policy refused"
        assert all(one.startswith(("file:", "blob:")) for one in found.asked)


def shown(page: Page, text: str) -> str:
    """What the page says of a text as its input: of a forecast, or what is wrong."""
    page.evaluate(f"take('Values', {json.dumps(text)})")
    problem: str = page.evaluate("by('problem').hidden ? '' : by('problem').textContent")
    assert bool(problem) == page.evaluate("by('result').hidden")
    return problem or str(page.evaluate("by('source').textContent"))


def used(page: Page) -> list[float | None]:
    found: list[float | None] = page.evaluate("Array.from(state.forecast.series.values)")
    return found


def test_page_opens_with_a_forecast(page: Page) -> None:
    assert page.evaluate("by('table-body').rows.length") == 24
    assert page.evaluate("by('chart').querySelectorAll('path').length") == 3
    assert page.evaluate("by('said').textContent").startswith("Forecast of “sales”")


@pytest.mark.parametrize("steps", [3, 16, 37, 64, 150])
@pytest.mark.parametrize("horizon", [5, 16, 70])
@pytest.mark.filterwarnings("ignore:prediction_length")
def test_numbers_are_those_of_python(
    page: Page, family: str, exported: dict[str, Path], steps: int, horizon: int
) -> None:
    forecaster: Any = load(exported[family])
    values = np.sin(np.arange(steps) / 2) * 40 + np.arange(steps) ** 1.2 + 1e3
    if steps > 16:
        values[[0, 4, 5, 6, 20]] = np.nan
    text = "\n".join("NA" if np.isnan(one) else repr(float(one)) for one in values)
    page.evaluate(f"by('horizon').value = {horizon}")
    shown(page, f"y\n{text}\n")
    found = np.array(page.evaluate("state.forecast.quantiles.map((one) => Array.from(one))"))
    expected = np.asarray(forecaster.predict([values], horizon)[0]).reshape(found.shape)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    page.evaluate("by('horizon').value = 24")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("112, 118, 132, 129", [112, 118, 132, 129]),
        ("1 2 3.5 4", [1, 2, 3.5, 4]),
        ("1\r\n2\r\n3\r\n", [1, 2, 3]),
        ("y\n1\nNA\n\n3\nnull\n5\n", [1, None, 3, None, 5]),
        ("a,y\n1,1\n2,\n3,3\n4,4\n", [1, None, 3, 4]),
        ("datum;wert\n01.02.2024;1,5\n02.02.2024;-2,25\n04.02.2024;3\n", [1.5, -2.25, None, 3]),
        ("a\tb\n1\t1.234,5\n2\t2,5\n3\t7\n", [1234.5, 2.5, 7]),
        ('name,y\n"a, ""b""",1\n"c\nd",2\ne,"3,000.5"\n', [1, 2, 3000.5]),
        ("day,y\n2024-01-03,3\n2024-01-01,1\n2024-01-02,2\n", [1, 2, 3]),
        ("year,y\n2001,5\n2002,6\n2003,4\n", [5, 6, 4]),
        ("y\n1e3\n-2E-3\n+.5\n", [1000, -0.002, 0.5]),
        ("t,y\n2024-01-31,1\n2024-02-29,2\n2024-04-30,4\n2024-05-31,5\n", [1, 2, None, 4, 5]),
    ],
)
def test_input_that_is_read(page: Page, text: str, values: list[float | None]) -> None:
    shown(page, text)
    assert used(page) == values


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "nothing"),
        (" \n\n", "nothing"),
        ("date,y\n", "no rows"),
        ("y\n1\n2\nabc\n4\n", "“abc”"),
        ("name,city\na,b\nc,d\n", "“a”"),
        ("y\n1\n2\n1e308\n4\n", "“1e308”"),
        ("y\n1\nInfinity\n3\n", "“Infinity”"),
        ("y\n1e38\n-1e38\n3e38\n", "power of ten"),
        ("y\n1\n2\n", "at least 3"),
        ("y\nNA\nNA\nNA\n", "at least 3"),
        ("a,b\n1,2\n3\n", "Row 3"),
        ('a,b\n1,"2\n', "quotation mark"),
        ("a;b\n1,5;2\n1.5;3\n", "decimal sign"),
        ("a;b\n1,234;2\n5,678;3\n", "decimal sign"),
        ("date,y\n2024-01-01,1\n2024-01-01,2\n2024-01-03,3\n", "twice"),
        ("date,y\n01/02/2024,1\n02/02/2024,2\n03/02/2024,3\n", "Days and months"),
        ("date,y\n2024-01-01,1\nsoon,2\n2024-01-03,3\n", "“soon”"),
        (",".join(["1"] * 1500) + "\n" + ",".join(["1"] * 1500), "1,500 columns"),
    ],
)
def test_input_that_is_refused(page: Page, text: str, named: str) -> None:
    said = shown(page, text)
    assert named in said
    assert "\n" not in said


def test_the_decimal_sign_can_be_chosen(page: Page) -> None:
    page.evaluate("by('decimal').value = ','")
    shown(page, "1,5\n2,5\n4\n")
    assert used(page) == [1.5, 2.5, 4]
    page.evaluate("by('decimal').value = 'auto'")


def test_text_of_others_stays_text(page: Page) -> None:
    evil = "<img src=x onerror=document.title='run'>"
    assert evil in shown(page, f"n,{evil}\na,1\nb,2\nc,3\n")
    assert "<script>" in shown(page, "y\n1\n2\n<script>document.title='run'</script>\n")
    assert page.evaluate("document.title") == "Forecast in your browser"
    assert page.evaluate("document.images.length") == 0


def file(page: Page, content: str, name: str = "given.csv") -> str:
    """What the page says of a file, of which the content is an expression."""
    page.evaluate(f"takeFile(new File([{content}], {json.dumps(name)}))")
    found: str = page.evaluate("by('problem').textContent || by('source').textContent")
    return found


def test_files_of_all_sizes(page: Page) -> None:
    assert "is empty" in file(page, "''")
    assert "no text" in file(page, "new Uint8Array([80, 75, 3, 4, 0, 0])", "sheet.xlsx")
    assert "at most 50 MB" in file(page, "new Uint8Array(51e6)")
    assert "cells" in file(page, "'1,2\\n'.repeat(2600000)")
    assert "3 steps" in file(page, "new Uint8Array([255, 254, 49, 0, 10, 0, 50, 0, 10, 0, 51, 0])")
    rows = "'t,y\\n' + Array.from({length: 200000}, (_, i) => `${i},${i % 7}`).join('\\n')"
    assert "200,000 steps" in file(page, rows)
    assert page.evaluate("by('chart').querySelector('.past').getAttribute('d').length") < 1e5


def test_horizon_and_interval(page: Page, family: str) -> None:
    shown(page, "1,2,3,4,5")
    for horizon in ("0", "2.5", "", "5000"):
        page.evaluate(f"by('horizon').value = {horizon!r}; forecast()")
        page.wait_for("by('problem').textContent.includes('1024')")
    page.evaluate("by('horizon').value = 3; forecast()")
    page.wait_for("by('table-body').rows.length === 3")
    wide = page.evaluate("by('table-body').innerText")
    page.evaluate("by('interval').value = '20'; by('interval').dispatchEvent(new Event('change'))")
    assert page.evaluate("by('table-head').innerText").split() == ["Step", "40%", "Median", "60%"]
    assert page.evaluate("by('table-body').innerText") != wide
    page.evaluate("by('interval').value = '80'; by('horizon').value = 24")
    lines = page.evaluate("csvOf(state.forecast)").splitlines()
    assert lines[0].startswith("step,0.1,0.2")
    assert [line.split(",")[0] for line in lines[1:]] == ["6", "7", "8"]


@pytest.mark.parametrize("width", [360, 900, 1440])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    page.show(width, 800)
    shown(page, f"n,{'long' * 40}\na,1\nb,2\nc,3\n")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.show(1440, 900)


def test_page_is_used_by_keyboard_and_read_aloud(page: Page) -> None:
    page.evaluate("take('Values', '1,2,3,4'), document.activeElement.blur(), 0")
    page.wait_for("!by('result').hidden")
    reached = []
    for _ in range(14):
        page.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.className")
        )
    wanted = ["example", "file", "horizon", "interval", "values", "column", "time", "decimal"]
    assert [one for one in dict.fromkeys(reached) if one in wanted] == wanted
    assert {"download", "scroll"} <= set(reached)
    unnamed = page.evaluate(
        "Array.from(document.querySelectorAll('input, select, textarea'))"
        ".filter((one) => !one.labels.length).length"
    )
    assert unnamed == 0
    assert page.evaluate("by('said').getAttribute('aria-live')") == "polite"
    assert "table has all steps" in page.evaluate("by('chart').getAttribute('aria-label')")
