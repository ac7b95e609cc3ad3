"use strict";
// What the reader does, and what they see of it.

const by = (id) => document.getElementById(id);
const HORIZON_MOST = 1024;
const state = {name: "", text: "", table: null, forecast: null, chart: null, turn: 0};

/** Example series, made here: level, trend, seasons and a little noise that is always the same. */
const EXAMPLES = {
  monthly: {title: "Monthly sales", head: "month,sales", rows: 120, horizon: 24, row: (at, noise) =>
    `${2015 + Math.floor(at / 12)}-${String((at % 12) + 1).padStart(2, "0")},` +
    `${Math.round(220 + 1.6 * at + (46 + 0.3 * at) * Math.sin((2 * Math.PI * (at - 3)) / 12) + 12 * noise)}`},
  hourly: {title: "Hourly visitors", head: "time,visitors", rows: 336, horizon: 48, row: (at, noise) =>
    `${new Date(Date.UTC(2024, 4, 6) + at * 3600e3).toISOString().slice(0, 16).replace("T", " ")},` +
    `${Math.max(0, Math.round((at % 168 < 120 ? 130 : 80) * Math.max(0.06, Math.sin((Math.PI * ((at % 24) - 6)) / 15)) + 7 * noise))}`},
  gaps: {title: "Daily temperature, with gaps", head: "date,temperature", rows: 200, horizon: 21, row: (at, noise) =>
    `${new Date(Date.UTC(2024, 0, 1) + at * DAY).toISOString().slice(0, 10)},` +
    `${at % 37 > 31 ? "" : (9 - 8 * Math.cos((2 * Math.PI * at) / 365) + 2.5 * noise).toFixed(1)}`},
};

function exampleText({head, rows, row}) {
  let seed = 7;
  const noise = () => {
    seed = (seed * 48271) % 2147483647;
    return (2 * seed) / 2147483647 - 1;
  };
  return [head, ...Array.from({length: rows}, (_, at) => row(at, noise()))].join("\n");
}

// ---------------------------------------------------------------- input

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => new Option(text, value, false, value === chosen)));
}

/** Takes a text as the table to forecast from; columns are chosen, and can be chosen otherwise. */
function take(name, text) {
  Object.assign(state, {name, text});
  guarded(() => {
    state.table = null;
    const table = readTable(text, by("decimal").value), {names} = table;
    const kinds = names.map((_, at) => kindOf(table, at));
    const times = [...kinds.keys()].filter((at) => kinds[at] === "time" || counts(table, at));
    const numbers = [...kinds.keys()].filter((at) => kinds[at] === "number");
    const values = numbers.filter((at) => !times.includes(at));
    const named = values.find((at) => ["target", "y", "value"].includes(names[at].toLowerCase()));
    const column = named ?? values[0] ?? numbers[0] ?? 0;
    const label = (at) => (kinds[at] === "text" ? `${names[at]} (text)` : names[at]);
    options(by("column"), names.map((_, at) => [String(at), label(at)]), String(column));
    const time = times.find((at) => at !== column) ?? -1;
    options(by("time"), [["-1", "Row numbers"], ...times.map((at) => [String(at), names[at]])], String(time));
    state.table = table;
  });
  return forecast();
}

async function takeFile(file) {
  state.turn += 1; // a forecast that is under way is not shown
  Object.assign(state, {name: file.name, text: "", table: null, forecast: null});
  by("result").setAttribute("aria-busy", "false");
  by("values").value = "";
  by("example").value = "";
  let text = "";
  const read = await guarded(async () => {
    if (file.size > MOST_BYTES) decoded({length: file.size}, file.name);
    text = decoded(new Uint8Array(await file.arrayBuffer()), file.name);
    if (!text.trim()) throw new Problem(`${quoted(file.name)} is empty; give a column of numbers.`);
  });
  if (read) await take(file.name, text);
}

// ---------------------------------------------------------------- forecast

/** Runs what may raise a Problem, which is then shown in the place of a result. */
async function guarded(act) {
  try {
    await act();
    return true;
  } catch (error) {
    state.forecast = null;
    by("result").hidden = true;
    by("said").textContent = "";
    by("problem").hidden = false;
    by("problem").textContent = error instanceof Problem ? error.message
      : `This browser could not do it: ${String(error?.message ?? error).split("\n")[0].slice(0, 200)}`;
    return false;
  }
}

/** Milliseconds of a forecast: the median of a few, once the engine has warmed up. */
async function measure(act, turn) {
  const times = [];
  for (let spent = 0; times.length < 9 && spent < 500; spent += times.at(-1)) {
    const start = performance.now();
    await act();
    times.push(performance.now() - start);
    if (turn !== state.turn) return;
  }
  show(times.sort((a, b) => a - b)[Math.floor(times.length / 2)]);
}

function show(milliseconds) {
  by("milliseconds").textContent = milliseconds < 10 ? milliseconds.toFixed(1) : milliseconds.toFixed(0);
}

function horizonOf() {
  const horizon = Number(by("horizon").value);
  if (!Number.isInteger(horizon) || horizon < 1 || horizon > HORIZON_MOST) {
    throw new Problem(`The horizon is ${quoted(by("horizon").value)}; give a whole number from 1 to ${HORIZON_MOST}.`);
  }
  return horizon;
}

async function forecast() {
  if (!state.table || !state.model) return;
  const turn = ++state.turn; // of several in a row, the last one is shown
  await guarded(async () => {
    const horizon = horizonOf();
    const series = readSeries(state.table, Number(by("column").value), Number(by("time").value));
    const row = Float32Array.from(series.values);
    if (!row.slice(-MODEL.context_length).some(Number.isFinite)) {
      throw new Problem(`The last ${count(MODEL.context_length, "step")}, which the model reads, are all missing.`);
    }
    by("result").setAttribute("aria-busy", "true");
    const began = performance.now(), quantiles = await state.model(row, horizon);
    if (turn !== state.turn) return;
    show(performance.now() - began);
    state.forecast = {series, horizon, quantiles};
    setTimeout(() => turn === state.turn && measure(() => state.model(row, horizon), turn), 1000);
    by("problem").hidden = true;
    by("problem").textContent = "";
    by("result").hidden = false;
    present();
  });
  if (turn === state.turn) by("result").setAttribute("aria-busy", "false");
}

// ---------------------------------------------------------------- result

/** Pairs of levels that are as far from the median, as [percent, low, high], widest first. */
function intervals() {
  const levels = MODEL.quantiles, pairs = [];
  levels.forEach((level, low) => {
    const high = levels.findIndex((other) => Math.abs(level + other - 1) < 1e-6);
    if (level < 0.5 && high !== -1) pairs.push([Math.round(100 * (1 - 2 * level)), low, high]);
  });
  return pairs.sort((a, b) => b[0] - a[0]);
}

function present() {
  const {series, horizon, quantiles} = state.forecast, {values} = series;
  const [percent, lowAt, highAt] = intervals()[by("interval").selectedIndex];
  const median = quantiles[MODEL.quantiles.indexOf(0.5)], low = quantiles[lowAt], high = quantiles[highAt];
  const shownSteps = Math.min(values.length, Math.max(96, 4 * horizon), 2000);
  state.shown = {past: values.slice(-shownSteps), median, low, high, label: series.label,
    start: values.length - shownSteps, percent};
  redraw();
  const missing = values.reduce((sum, one) => sum + Number.isNaN(one), 0);
  const spread = Math.max(...high) - Math.min(...low);
  const text = (value) => shown(value, spread / 10, true);
  const first = series.label(values.length), last = series.label(values.length + horizon - 1);
  const name = state.table.names[Number(by("column").value)];
  by("source").textContent = [
    `${state.name}: ${count(values.length, "step")} of ${quoted(name)}`,
    missing ? `${count(missing, "value")} missing` : "",
    values.length > MODEL.context_length ? `the model reads the last ${MODEL.context_length.toLocaleString("en")}` : "",
  ].filter(Boolean).join(", ") + `. ${series.note}`;
  by("title").textContent = `${name}, ${count(horizon, "step")} ahead`;
  by("said").textContent = `Forecast of ${quoted(name)} from ${first} to ${last}: median ${text(median[0])} at first ` +
    `and ${text(median.at(-1))} at last; ${percent}% interval at last from ${text(low.at(-1))} to ${text(high.at(-1))}.`;
  by("chart").setAttribute("aria-label", `Chart. ${by("said").textContent} The table has all steps.`);
  by("band-name").textContent = `${percent}% interval`;
  tabulate(series, [low, median, high], percent, text);
}

function redraw() {
  if (state.shown && !by("result").hidden) state.chart = draw(by("chart"), state.shown);
}

function tabulate(series, columns, percent, text) {
  const tail = (100 - percent) / 2, level = (value) => `${Number(value.toFixed(1))}%`;
  by("table-head").replaceChildren(...[series.word, level(tail), "Median", level(100 - tail)].map((name) => {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = name;
    return cell;
  }));
  by("table-body").replaceChildren(...Array.from(columns[0], (_, step) => {
    const line = document.createElement("tr"), head = document.createElement("th");
    head.scope = "row";
    head.textContent = series.label(series.values.length + step);
    line.append(head, ...columns.map((values) => {
      const cell = document.createElement("td");
      cell.textContent = text(values[step]);
      return cell;
    }));
    return line;
  }));
}

/** All quantiles of the forecast as CSV; no text of the input is in it. */
function csvOf({series, horizon, quantiles}) {
  const lines = Array.from({length: horizon}, (_, step) =>
    [series.label(series.values.length + step), ...quantiles.map((one) => one[step])].join(","));
  return `${["step", ...MODEL.quantiles].join(",")}\n${lines.join("\n")}\n`;
}

function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csvOf(state.forecast)], {type: "text/csv"}));
  link.download = "forecast.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function point(event) {
  const box = by("chart").getBoundingClientRect(), {ahead, at, x, value} = state.chart.at(event.clientX - box.left);
  const {median, low, high, label, start, percent} = state.shown, tip = by("tip");
  const text = (one) => (Number.isFinite(one) ? shown(one, (Math.max(...high) - Math.min(...low)) / 10) : "missing");
  tip.textContent = ahead < 0 ? `${label(start + at)}\n${text(value)}`
    : `${label(start + at)}\n${text(median[ahead])}\n${percent}%: ${text(low[ahead])} to ${text(high[ahead])}`;
  tip.hidden = false;
  tip.style.left = `${Math.min(Math.max(x, tip.offsetWidth / 2), box.width - tip.offsetWidth / 2)}px`;
}

// ---------------------------------------------------------------- start

/** On a wide window there is room for all of the input. */
function unfold() {
  const wide = matchMedia("(min-width: 761px)"), adapt = () => { by("more").open = wide.matches; };
  wide.addEventListener("change", adapt);
  adapt();
}

function listen() {
  let waiting = 0;
  const later = (act) => { clearTimeout(waiting); waiting = setTimeout(act, 350); };
  by("example").addEventListener("change", (event) => showExample(event.target.value));
  by("file").addEventListener("change", (event) => {
    if (event.target.files[0]) takeFile(event.target.files[0]);
    event.target.value = "";
  });
  by("values").addEventListener("input", (event) => later(() => {
    by("example").value = "";
    take("Values", event.target.value);
  }));
  by("decimal").addEventListener("change", () => take(state.name, state.text));
  for (const id of ["column", "time"]) by(id).addEventListener("change", forecast);
  by("horizon").addEventListener("input", () => later(forecast));
  by("interval").addEventListener("change", () => state.forecast && present());
  by("download").addEventListener("click", download);
  by("chart").addEventListener("pointermove", point);
  by("chart").addEventListener("pointerdown", point);
  by("chart").addEventListener("pointerleave", () => { by("tip").hidden = true; state.chart?.leave(); });
  new ResizeObserver(redraw).observe(by("chart"));
  const over = (on) => document.body.classList.toggle("dropping", on);
  for (const kind of ["dragover", "drop", "dragleave"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      over(kind === "dragover");
      const file = kind === "drop" && event.dataTransfer.files[0];
      if (file) takeFile(file);
    });
  }
}

function showExample(name) {
  const example = EXAMPLES[name];
  if (!example) return;
  by("horizon").value = example.horizon;
  by("values").value = exampleText(example);
  return take(`Example, ${example.title.toLowerCase()}`, by("values").value);
}

async function start() {
  options(by("example"), [["", "Your own"], ...Object.entries(EXAMPLES).map(([key, {title}]) => [key, title])], "monthly");
  options(by("interval"), intervals().map(([percent]) => [String(percent), `${percent}%`]),
    intervals().some(([percent]) => percent === 80) ? "80" : undefined);
  listen();
  unfold();
  await guarded(async () => {
    const began = performance.now();
    for (const [file, there] of [["model.js", typeof MODEL], ["engine.js", typeof ENGINE], ["ort.wasm.min.js", typeof ort]]) {
      if (there === "undefined") throw new Problem(`${file} is missing beside this page; copy the whole folder.`);
    }
    state.model = await opened(MODEL, ENGINE);
    await state.model(new Float32Array(MODEL.context_length).fill(1), 1); // the first one is slower
    by("loaded").textContent = ((performance.now() - began) / 1000).toFixed(1);
    await showExample("monthly");
  });
  by("starting").hidden = true;
  document.body.dataset.ready = "true";
}

start();
