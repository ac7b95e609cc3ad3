"use strict";
// From the text of a CSV to one series with its times. Nothing here touches the page.

/** What is wrong with the input, in one line for the reader. */
class Problem extends Error {}

const MOST_BYTES = 50e6, MOST_CELLS = 5e6, MOST_COLUMNS = 1000, FEWEST_VALUES = 3;
const LARGEST = 3.4028234663852886e38; // of float32
const BLANK = new Set(["", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-nan", "NAN", "null",
  "NULL", "None"]);
const POINT = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i;
const COMMA = /^[-+]?(\d+,?\d*|,\d+)(e[-+]?\d+)?$/i;
const GROUPED = {".": /^[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?$/, ",": /^[-+]?[1-9]\d{0,2}(\.\d{3})+(,\d*)?$/};
const DAY = 86400e3;

const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const quoted = (text) => `“${text.length > 40 ? `${text.slice(0, 40)}…` : text}”`;

/** Bytes of a file as text; what is no text is refused. */
function decoded(bytes, name) {
  if (bytes.length > MOST_BYTES) {
    throw new Problem(`${quoted(name)} has ${(bytes.length / 1e6).toFixed(0)} MB; at most ` +
      `${MOST_BYTES / 1e6} MB are read here: keep the latest rows.`);
  }
  const wide = bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16le"
    : bytes[0] === 0xfe && bytes[1] === 0xff ? "utf-16be" : "";
  if (!wide && bytes.subarray(0, 4096).includes(0)) {
    throw new Problem(`${quoted(name)} is no text; save the sheet as CSV and open that.`);
  }
  try {
    return new TextDecoder(wide || "utf-8", {fatal: true}).decode(bytes);
  } catch {
    return new TextDecoder("windows-1252").decode(bytes);
  }
}

/** Rows of cells. Cells in quotes may hold separators, line breaks and doubled quotes. */
function cellsOf(text, separator, mostRows = Infinity) {
  const rows = [];
  let row = [], start = 0, at = 0, cells = 0, inQuotes = false;
  const end = () => {
    if (row.length > 1 || inQuotes || row[0].trim() !== "") rows.push(row); // "" is a missing value
    cells += row.length;
    row = [];
    inQuotes = false;
    if (cells > MOST_CELLS) {
      throw new Problem(`The table has more than ${count(MOST_CELLS, "cell")}; keep the column ` +
        "to forecast, or the latest rows.");
    }
  };
  while (at <= text.length && rows.length < mostRows) {
    const quote = text[at] === '"' && at === start;
    if (quote) {
      inQuotes = true;
      let close = at + 1;
      while ((close = text.indexOf('"', close)) !== -1 && text[close + 1] === '"') close += 2;
      if (close === -1) throw new Problem("A quotation mark is opened and never closed.");
      row.push(text.slice(at + 1, close).replaceAll('""', '"'));
      at = close + 1;
      while (at < text.length && text[at] !== separator && !"\r\n".includes(text[at])) at += 1;
    } else {
      while (at < text.length && text[at] !== separator && text[at] !== "\n" && text[at] !== "\r") at += 1;
      row.push(text.slice(start, at));
    }
    if (text[at] !== separator || at >= text.length) {
      end();
      if (text[at] === "\r" && text[at + 1] === "\n") at += 1;
    }
    at += 1;
    start = at;
  }
  return rows;
}

/** The sign between cells: one that parts all of the first lines alike; "": there is none. */
function separatorOf(text, decimal) {
  const signs = decimal === "," ? [";", "\t", "|"] : [";", "\t", ",", "|"];
  let fallback = "";
  for (const sign of signs) {
    let widths;
    try {
      widths = cellsOf(text.slice(0, 1e5), sign, 20).map((row) => row.length);
    } catch { // a quotation mark that is not closed within these lines
      if (text.slice(0, text.search(/[\r\n]|$/)).includes(sign)) fallback ||= sign;
      continue;
    }
    if (text.length > 1e5) widths.pop();
    if (widths.length && widths[0] > 1 && widths.every((width) => width === widths[0])) return sign;
    if (widths[0] > 1) fallback ||= sign;
  }
  if (fallback) return fallback;
  const first = text.slice(0, 1e4).trim().split(/\s+/).slice(0, 50);
  const spaced = /\d[ \u00a0]+[-+\d.]/.test(text.slice(0, 1e4));
  return spaced && first.every((cell) => isNumber(cell, ".") || isNumber(cell, ",")) ? " " : "";
}

const isNumber = (cell, decimal) => (decimal === "," ? COMMA : POINT).test(cell) || GROUPED[decimal].test(cell);
const isBlank = (cell) => BLANK.has(cell.trim());

/** A table: names of columns, rows of cells.
 *  @param {string} text
 *  @param {"auto" | "." | ","} decimal */
function readTable(text, decimal) {
  text = text.replace(/^\ufeff/, "").replaceAll("\0", "\ufffd");
  if (!text.trim()) throw new Problem("There is nothing in it; give a column of numbers.");
  const separator = separatorOf(text, decimal);
  let rows = separator === " "
    ? text.trim().split(/[\r\n]+/).map((line) => line.trim().split(/\s+/))
    : cellsOf(text, separator || "\0");
  const written = (cell) => isNumber(cell.trim(), ".") || isNumber(cell.trim(), ",");
  if (rows.length === 1 && rows[0].length > 1 && rows[0].some(written)) { // a series in one line
    rows = rows[0].filter((cell, at, all) => at < all.length - 1 || cell.trim()).map((cell) => [cell]);
  }
  const width = rows[0].length;
  if (width > MOST_COLUMNS) {
    throw new Problem(`The table has ${count(width, "column")}; at most ${MOST_COLUMNS} are read: ` +
      "keep those you need.");
  }
  const uneven = rows.findIndex((row) => row.length !== width);
  if (uneven > 0) {
    throw new Problem(`Row ${uneven + 1} has ${count(rows[uneven].length, "cell")} and the first row ` +
      `${width}; each row needs the same number, and cells with a separator need quotation marks.`);
  }
  const sign = decimal === "auto" ? decimalOf(rows) : decimal;
  const plain = !isAboveAnIndex(rows, sign) &&
    rows[0].some((cell) => isNumber(cell.trim(), sign) || parsedTime(cell, "dmy"));
  const head = plain || rows[0].every(isBlank) ? [] : rows.shift().map((cell) => cell.trim());
  if (!rows.length) throw new Problem("There are names of columns and no rows below them.");
  const names = Array.from({length: width}, (_, at) => head[at] || (width === 1 ? "value" : `column ${at + 1}`));
  return {names, rows, decimal: sign, first: head.length ? 2 : 1};
}

/** Whether a first row is of names above the rows that pandas has numbered or dated: ",0". */
function isAboveAnIndex(rows, decimal) {
  const [first, ...index] = rows.map((row) => row[0].trim());
  if (first || rows[0].length < 2 || index.length < 2) return false;
  const start = isNumber(index[0], decimal) ? numberOf(index[0], decimal) : NaN;
  return index.every((cell, at) => cell === String(start + at) || parsedTime(cell, "dmy"));
}

/** "." or ",": what the numbers of the first rows show; both, or neither for sure, is refused. */
function decimalOf(rows) {
  let comma = "", point = "", unsure = "";
  for (const row of rows.slice(0, 1000)) {
    for (const raw of row) {
      const cell = raw.trim();
      if (/^[-+]?\d*,\d+(e[-+]?\d+)?$/i.test(cell)) {
        if (GROUPED["."].test(cell)) unsure ||= cell; else comma ||= cell;
      } else if (/^[-+]?\d*\.\d+(e[-+]?\d+)?$/i.test(cell)) {
        if (!GROUPED[","].test(cell)) point ||= cell;
      } else if (cell.includes(",") && cell.includes(".")) {
        if (GROUPED["."].test(cell)) point ||= cell;
        if (GROUPED[","].test(cell)) comma ||= cell;
      }
    }
  }
  if (comma && point) {
    throw new Problem(`Both ${quoted(comma)} and ${quoted(point)} are there; choose the decimal sign.`);
  }
  if (unsure && !comma && !point) {
    throw new Problem(`${quoted(unsure)} may be a thousand or a fraction; choose the decimal sign.`);
  }
  return comma ? "," : ".";
}

const numberOf = (cell, decimal) => Number(decimal === ","
  ? cell.replaceAll(".", "").replace(",", ".") : cell.replaceAll(",", ""));

/** Whether the first cells of a column that are not blank are numbers, times, or neither. */
function kindOf(table, column) {
  const cells = [];
  for (const row of table.rows) {
    if (!isBlank(row[column])) cells.push(row[column].trim());
    if (cells.length === 50) break;
  }
  const share = (test) => cells.filter(test).length / cells.length;
  if (share((cell) => isNumber(cell, table.decimal)) > 0.5) return "number";
  return share((cell) => parsedTime(cell, "dmy") || parsedTime(cell, "mdy")) > 0.5 ? "time" : "text";
}

/** Whether a column counts rows, or years: each value is one more than that before. */
function counts(table, column) {
  const {rows} = table, first = Number(rows[0][column]);
  return rows.length > 2 && Number.isInteger(first) &&
    rows.every((row, at) => row[column].trim() !== "" && Number(row[column]) === first + at);
}

/** Numbers of a column, NaN where missing; the first cell that is no usable number is refused. */
function valuesOf(table, column) {
  const {names, rows, decimal, first} = table, name = quoted(names[column]);
  const values = new Float64Array(rows.length);
  let there = 0;
  rows.forEach((row, at) => {
    const cell = row[column].trim();
    values[at] = BLANK.has(cell) ? NaN : isNumber(cell, decimal) ? numberOf(cell, decimal) : Infinity;
    if (Math.abs(values[at]) > LARGEST) {
      throw new Problem(isNumber(cell, decimal)
        ? `Row ${at + first} of ${name} is ${quoted(cell)}, beyond what the model computes with ` +
          "(3.4e38); divide the values by a power of ten."
        : `Row ${at + first} of ${name} is ${quoted(cell)}, which is no number; correct it, or write ` +
          "NA where the value is missing.");
    }
    there += !Number.isNaN(values[at]);
  });
  if (there < FEWEST_VALUES) {
    throw new Problem(`${name} has ${count(there, "value")}; a forecast needs at least ${FEWEST_VALUES}.`);
  }
  return values;
}

/** Milliseconds of a date or time, null if it is none. Days and months by `order` where unclear. */
function parsedTime(text, order) {
  const cell = text.trim();
  const iso = /^(\d{4})[-/](\d{1,2})(?:[-/](\d{1,2})(?:[T ](\d{1,2}):(\d{2})(?::(\d{2})(?:\.\d+)?)?)?)?(Z|[-+]\d{2}:?\d{2})?$/.exec(cell);
  const local = /^(\d{1,2})([./])(\d{1,2})\2(\d{4})(?:[ T](\d{1,2}):(\d{2})(?::(\d{2}))?)?$/.exec(cell);
  let parts;
  if (iso) parts = [iso[1], iso[2], iso[3] ?? 1, iso[4] ?? 0, iso[5] ?? 0, iso[6] ?? 0];
  else if (local) {
    const swapped = local[2] === "/" && order === "mdy";
    const [day, month] = swapped ? [local[3], local[1]] : [local[1], local[3]];
    parts = [local[4], month, day, local[5] ?? 0, local[6] ?? 0, local[7] ?? 0];
  } else return null;
  const [year, month, day, hour, minute, second] = parts.map(Number);
  const time = Date.UTC(year, month - 1, day, hour, minute, second);
  const back = new Date(time);
  const clock = hour < 24 && minute < 60 && second < 60;
  return back.getUTCMonth() === month - 1 && back.getUTCDate() === day && clock ? time : null;
}

/** Milliseconds by which the clock of a cell is ahead of UTC, 0 where it says nothing. */
function offsetOf(text) {
  const found = /:\d{2}(?:\.\d+)?([-+])(\d{2}):?(\d{2})$/.exec(text.trim());
  if (!found) return 0;
  const minutes = 60 * Number(found[2]) + Number(found[3]);
  return (found[1] === "-" ? -minutes : minutes) * 60000;
}

/** Milliseconds of all rows of a column. */
function timesOf(table, column) {
  const read = (order) => table.rows.map((row) => parsedTime(row[column], order));
  const first = read("dmy");
  const slashes = table.rows.some((row) => /^\d{1,2}\/\d{1,2}\//.test(row[column].trim()));
  let found = first;
  if (slashes) {
    const second = read("mdy");
    const [one, other] = [first, second].map((times) => !times.includes(null));
    if (one && other) {
      throw new Problem(`Days and months of ${quoted(table.names[column])} cannot be told apart; ` +
        "write 2024-03-31, or choose no column of times.");
    }
    found = one ? first : second;
  }
  const bad = found.indexOf(null);
  if (bad !== -1) {
    throw new Problem(`Row ${bad + table.first} of ${quoted(table.names[column])} is ` +
      `${quoted(table.rows[bad][column])}, which is no date as 2024-03-31; correct it, or choose no ` +
      "column of times.");
  }
  // Clocks change within a column: all are told by the clock of the first row.
  const offsets = table.rows.map((row) => offsetOf(row[column]));
  return found.map((time, at) => time - (offsets[at] - offsets[0]));
}

const months = (time) => new Date(time).getUTCFullYear() * 12 + new Date(time).getUTCMonth();

/** The even grid that times lie on: a step's number of a time, and its label. Null: there is none. */
function gridOf(times) {
  const sorted = [...new Set(times)].sort((a, b) => a - b);
  if (sorted.length < 2) return null;
  const day = (time) => new Date(time).getUTCDate();
  const iso = (time) => new Date(time).toISOString();
  const steps = (index) => {
    let least = Infinity;
    for (let at = 1; at < sorted.length; at += 1) least = Math.min(least, index(sorted[at]) - index(sorted[at - 1]));
    return least;
  };
  const lasts = sorted.every((time) => day(time + DAY) === 1), first = day(sorted[0]);
  const monthly = lasts || sorted.every((time) => day(time) === first);
  const least = monthly ? steps(months) : 0;
  let grid;
  if (least >= 1) {
    const start = months(sorted[0]);
    grid = {
      index: (time) => (months(time) - start) / least,
      label: (step) => {
        const month = start + step * least;
        return `${Math.floor(month / 12)}-${String((month % 12) + 1).padStart(2, "0")}`;
      },
    };
  } else {
    const start = sorted[0], least = steps((time) => time);
    const weekday = (time) => (new Date(time).getUTCDay() + 6) % 7; // Monday is 0
    const business = least === DAY && sorted.length > 9 && sorted.every((time) => weekday(time) < 5);
    const monday = start - weekday(start) * DAY;
    const whole = sorted.every((time) => time % DAY === 0) && least % DAY === 0;
    const minutes = sorted.every((time) => time % 60000 === 0) && least % 60000 === 0;
    grid = business ? {
      index: (time) => Math.floor((time - monday) / (7 * DAY)) * 5 + weekday(time) - weekday(start),
      label: (step) => {
        const from = step + weekday(start);
        return iso(monday + (Math.floor(from / 5) * 7 + (((from % 5) + 5) % 5)) * DAY).slice(0, 10);
      },
    } : {
      index: (time) => (time - start) / least,
      label: (step) => iso(start + step * least).slice(0, whole ? 10 : minutes ? 16 : 19).replace("T", " "),
    };
  }
  const end = grid.index(sorted.at(-1));
  const even = sorted.every((time) => Number.isInteger(grid.index(time))) && end < 4 * sorted.length;
  return even ? grid : null;
}

/** One series: values in even steps, NaN where missing, and the label of each step.
 *  @param {number} time column of times, -1 for none */
function readSeries(table, column, time) {
  const values = valuesOf(table, column);
  const numbered = {values, label: (step) => String(step + 1), word: "Step", note: ""};
  if (time < 0) return numbered;
  if (kindOf(table, time) === "number") {
    const start = Number(table.rows[0][time]);
    return counts(table, time)
      ? {...numbered, label: (step) => String(start + step), word: table.names[time]} : numbered;
  }
  const times = timesOf(table, time);
  const grid = gridOf(times);
  if (!grid) {
    const order = [...times.keys()].sort((one, other) => times[one] - times[other]);
    return {...numbered, values: Float64Array.from(order, (at) => values[at]), note: `Times in ${quoted(table.names[time])} have no even step, so rows are numbered.`};
  }
  const filled = new Float64Array(times.reduce((most, one) => Math.max(most, grid.index(one)), 0) + 1).fill(NaN);
  const seen = new Uint8Array(filled.length);
  times.forEach((one, at) => {
    const step = grid.index(one);
    if (seen[step]) {
      throw new Problem(`${quoted(table.rows[at][time])} comes twice in ${quoted(table.names[time])}; ` +
        "keep one row for each time, or choose no column of times.");
    }
    seen[step] = 1;
    filled[step] = values[at];
  });
  return {values: filled, label: grid.label, word: table.names[time], note: ""};
}
