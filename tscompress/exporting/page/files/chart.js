"use strict";
// A chart of a series and its forecast, as SVG. All text is set as text.

const SVG = "http://www.w3.org/2000/svg";

function drawn(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

/** Round numbers from below `low` to above `high`. */
function ticksOf(low, high, most) {
  const raw = (high - low) / most || Math.abs(high) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((one) => one * power >= raw * 0.999);
  const start = Math.floor(low / step);
  const ticks = [];
  for (let at = start; at <= start + 20 && (ticks.length < 2 || ticks.at(-1) < high); at += 1) ticks.push(at * step);
  return ticks;
}

/** A number with as many digits as tell it from others that are `spread` apart.
 *  @param {boolean} even zeros at the end are kept, as in a column of numbers */
function shown(value, spread, even = false) {
  const size = Math.abs(value), apart = spread > 1e-9 * size ? spread : size || 1;
  if (size >= 1e7 || (size && Math.max(size, apart) < 1e-4)) return value.toExponential(3).replace("e+", "e");
  const digits = Math.min(Math.max(1 - Math.floor(Math.log10(apart)), 0), 6);
  return value.toLocaleString("en", {maximumFractionDigits: digits, minimumFractionDigits: even ? digits : 0});
}

/** Points as a path with gaps where a value is missing. */
function pathOf(points) {
  let open = false, path = "";
  for (const [x, y] of points) {
    if (Number.isNaN(y)) { open = false; continue; }
    path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    open = true;
  }
  return path;
}

/** Draws into `svg`; returns what is at a place: the step and the x of it.
 *  @param {{past: Float64Array, median: Float32Array, low: Float32Array, high: Float32Array,
 *    label: (step: number) => string, start: number}} forecast `start`: step of the first past value */
function draw(svg, forecast) {
  const {past, median, low, high, label, start} = forecast;
  const {width, height} = svg.getBoundingClientRect();
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const all = [...past.filter(Number.isFinite), ...low, ...high, ...median];
  const ticks = ticksOf(Math.min(...all), Math.max(...all), height < 300 ? 4 : 5);
  const spread = ticks.at(-1) - ticks[0], texts = ticks.map((tick) => shown(tick, spread / 10));
  const left = 12 + 7 * Math.max(...texts.map((text) => text.length)), right = width - 10;
  const top = 12, bottom = height - 30, count = past.length + median.length;
  const x = (at) => left + (at / Math.max(count - 1, 1)) * (right - left);
  const y = (value) => bottom - ((value - ticks[0]) / spread) * (bottom - top);
  ticks.forEach((tick, at) => {
    drawn(svg, "line", {x1: left, x2: right, y1: y(tick), y2: y(tick), class: "grid"});
    drawn(svg, "text", {x: left - 8, y: y(tick) + 4, class: "end"}, texts[at]);
  });
  const places = Math.max(2, Math.min(count, Math.floor((right - left) / 120)));
  for (let place = 0; place < places; place += 1) {
    const at = Math.round((place / (places - 1)) * (count - 1));
    const side = place === 0 ? "start" : place === places - 1 ? "end" : "middle";
    drawn(svg, "text", {x: x(at), y: height - 8, class: side}, label(start + at));
  }
  const now = past.length - 1;
  drawn(svg, "rect", {x: x(now), y: top, width: right - x(now), height: bottom - top, class: "ahead"});
  // The forecast begins at the last value, so that lines meet.
  const last = past[now], from = Number.isFinite(last) ? [[x(now), y(last)]] : [];
  const line = (values, first) => Array.from(values, (value, at) => [x(first + at), y(value)]);
  const lower = [...from, ...line(low, now + 1)], upper = [...from, ...line(high, now + 1)];
  drawn(svg, "path", {d: `${pathOf([...lower, ...upper.reverse()])}Z`, class: "band"});
  drawn(svg, "path", {d: pathOf(line(past, 0)), class: "past"});
  past.forEach((value, at) => { // alone between gaps
    const alone = !Number.isFinite(past[at - 1]) && !Number.isFinite(past[at + 1]);
    if (alone && Number.isFinite(value)) drawn(svg, "circle", {cx: x(at), cy: y(value), r: 2, class: "alone"});
  });
  drawn(svg, "path", {d: pathOf([...from, ...line(median, now + 1)]), class: "median"});
  const mark = drawn(svg, "g", {class: "mark", visibility: "hidden"});
  drawn(mark, "line", {y1: top, y2: bottom});
  const dot = drawn(mark, "circle", {r: 4});
  return {
    at(px) {
      const at = Math.min(Math.max(Math.round(((px - left) / (right - left)) * (count - 1)), 0), count - 1);
      const value = at <= now ? past[at] : median[at - now - 1];
      mark.setAttribute("visibility", "visible");
      mark.setAttribute("transform", `translate(${x(at)} 0)`);
      dot.setAttribute("cy", Number.isFinite(value) ? y(value) : -99);
      return {at, ahead: at - now - 1, x: x(at), value};
    },
    leave: () => mark.setAttribute("visibility", "hidden"),
  };
}
