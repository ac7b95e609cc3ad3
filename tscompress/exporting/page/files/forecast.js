"use strict";
// Quantiles as tscompress.runtime computes them, in float32. A row is a Float32Array, NaN where
// missing; a forecast is one Float32Array of steps for each quantile level of the model.

const f32 = Math.fround;

/** Quantiles at `levels` of values that weigh the same, linear in the rank. */
function empirical(values, levels) {
  const sorted = Float32Array.from(values).sort(), last = sorted.length - 1;
  return levels.map((level) => {
    const rank = f32(f32(level) * last), below = Math.floor(rank), share = f32(rank - below);
    const low = sorted[below], high = sorted[Math.min(below + 1, last)], step = f32(high - low);
    return share < 0.5 ? f32(low + f32(share * step)) : f32(high - f32(step * f32(1 - share)));
  });
}

/** The quantile at `level` between `values` at ascending `known` levels; ends are continued. */
function between(values, known, level) {
  const size = known.length, at = f32(level);
  const levelOf = (place) => (place < 0 ? 0 : place < size ? f32(known[place]) : 1);
  const valueOf = (place) => values[Math.min(Math.max(place, 0), size - 1)];
  let above = 0;
  while (above < size && levelOf(above) <= at) above += 1;
  const low = levelOf(above - 1), gap = f32(levelOf(above) - low);
  const weight = gap === 0 ? 0 : f32(f32(at - low) / gap);
  return f32(valueOf(above - 1) + f32(weight * f32(valueOf(above) - valueOf(above - 1))));
}

/** Quantiles at `levels` of values with weights. */
function weighted(values, weights, levels) {
  const order = Array.from(values.keys()).sort((a, b) => values[a] - values[b] || a - b);
  const total = weights.reduce((sum, one) => f32(sum + one), 0);
  let sum = 0;
  const known = order.map((at) => f32(Math.min((sum += f32(weights[at] / total)), 1)));
  const sorted = order.map((at) => values[at]);
  return levels.map((level) => between(sorted, known, level));
}

/** How much of the probability each level stands for, by the trapezoidal rule. */
function masses(levels) {
  const edges = [0, ...levels.map(f32), 1];
  const found = levels.map((_, at) => f32(f32(edges[at + 2] - edges[at]) / 2));
  const sum = found.reduce((all, one) => f32(all + one), 0);
  return found.map((one) => f32(one / sum));
}

/** A row and what follows it, of which the model reads the last steps. */
function continued(row, ahead, most) {
  const whole = new Float32Array(row.length + ahead.length);
  whole.set(row);
  whole.set(ahead, row.length);
  return whole.slice(-most);
}

/** Rows of the same length as `context` and `observed`: padded before to whole patches, no NaN. */
function patched(rows, size) {
  const length = rows[0].length, steps = Math.ceil(length / size) * size;
  const context = new Float32Array(rows.length * steps), observed = new Float32Array(rows.length * steps);
  rows.forEach((row, at) => row.forEach((value, step) => {
    const place = at * steps + steps - length + step;
    if (Number.isFinite(value)) [context[place], observed[place]] = [value, 1];
  }));
  const dims = [rows.length, steps];
  return {context: {data: context, dims}, observed: {data: observed, dims}};
}

/** Of an output [rows, levels, steps]: row, then level, to steps. */
function unpacked({data, dims: [rows, levels, steps]}) {
  return Array.from({length: rows}, (_, row) => Array.from({length: levels}, (_, level) => {
    const start = (row * levels + level) * steps;
    return data.slice(start, start + steps);
  }));
}

/** For each step, quantiles by `quantilesOf` of what all rows and levels hold there. */
function pooled(rows, levels, quantilesOf) {
  const every = rows.flat(), steps = every[0].length;
  const found = levels.map(() => new Float32Array(steps));
  for (let step = 0; step < steps; step += 1) {
    quantilesOf(Float32Array.from(every, (one) => one[step])).forEach((value, level) => { found[level][step] = value; });
  }
  return found;
}

const joined = (parts, steps) => parts[0].map((_, level) =>
  Float32Array.from(parts.flatMap((part) => Array.from(part[level]))).slice(0, steps));

/** Chronos-Bolt. Beyond one call every quantile continues a path of its own. */
async function forecastBolt(model, run, row, steps) {
  const {quantiles, context_length: most, patch_size: size} = model;
  const call = async (rows) => unpacked(await run(patched(rows, size)));
  const context = row.slice(-most), [first] = await call([context]);
  const found = [first];
  let paths = quantiles.map(() => context);
  for (let done = first[0].length; done < steps; done += found.at(-1)[0].length) {
    paths = paths.map((path, at) => continued(path, found.at(-1)[at], most));
    found.push(pooled(await call(paths), quantiles, (values) => empirical(values, quantiles)));
  }
  return joined(found, steps);
}

const PATHS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9];

/** Chronos-2, one series that attends to itself alone, with nothing known ahead. */
async function forecastChronos2(model, run, row, steps) {
  const {quantiles, context_length: most, patch_size: size, prediction_length: longest} = model;
  const beside = (count, ahead) => {
    if (model.univariate) return {steps_ahead: {data: Float32Array.from(Array(ahead).keys()), dims: [ahead]}};
    const nothing = {data: new Float32Array(count * ahead), dims: [count, ahead]};
    const groups = BigInt64Array.from(Array(count).keys(), BigInt);
    return {group_ids: {data: groups, dims: [count]}, future: nothing, future_observed: nothing};
  };
  const call = async (rows, left) => {
    const ahead = Math.min(Math.ceil(left / size) * size, longest);
    return unpacked(await run({...patched(rows, size), ...beside(rows.length, ahead)}));
  };
  const [first] = await call([row.slice(-most)], steps), found = [first];
  if (first[0].length < steps && !PATHS.every((level) => quantiles.includes(level))) {
    throw new Problem(`This model forecasts at most ${longest} steps; choose a shorter horizon.`);
  }
  const order = Array.from(quantiles.keys()).sort((a, b) => quantiles[a] - quantiles[b]);
  const levels = order.map((at) => quantiles[at]), own = masses(quantiles);
  const weights = masses(PATHS).flatMap((path) => own.map((one) => f32(path * one)));
  let paths = PATHS.map(() => row);
  for (let done = first[0].length; done < steps; done += found.at(-1)[0].length) {
    const last = found.at(-1), ahead = PATHS.map((level) => last[0].map((_, step) =>
      between(order.map((at) => last[at][step]), levels, level)));
    paths = paths.map((path, at) => continued(path, ahead[at], most));
    found.push(pooled(await call(paths, steps - done), quantiles, (values) => weighted(values, weights, quantiles)));
  }
  return joined(found, steps);
}

const FORECASTS = {"chronos-bolt": forecastBolt, "chronos-2": forecastChronos2};

/** Bytes of text in base64, of a gzip stream. */
async function unzipped(text) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at += 1) bytes[at] = letters.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Undoes that of so many planes the bytes of each stand together. */
function interleaved(bytes, planes) {
  const found = new Uint8Array(bytes.length);
  let from = 0;
  for (let plane = 0; plane < planes; plane += 1) {
    for (let at = plane; at < bytes.length; at += planes) found[at] = bytes[from++];
  }
  return found;
}

/** Opens the model; the result forecasts `steps` after a row, and resolves to its quantiles.
 *  @param {object} model of model.js
 *  @param {object} engine of engine.js */
async function opened(model, engine) {
  const module = new Blob([await unzipped(engine.module)], {type: "text/javascript"});
  Object.assign(ort.env.wasm, {
    numThreads: 1, // more need headers that only a server can send
    wasmBinary: (await unzipped(engine.wasm)).buffer,
    wasmPaths: {mjs: URL.createObjectURL(module)},
  });
  const graph = interleaved(await unzipped(model.graph), model.planes);
  const session = await ort.InferenceSession.create(graph, {
    logSeverityLevel: 3,
    extra: {session: {disable_quant_qdq: "1"}},
  });
  const run = async (inputs) => {
    const tensors = Object.entries(inputs).map(([name, {data, dims}]) =>
      [name, new ort.Tensor(data instanceof BigInt64Array ? "int64" : "float32", data, dims)]);
    const {quantiles} = await session.run(Object.fromEntries(tensors));
    return {data: quantiles.data, dims: quantiles.dims};
  };
  return async (row, steps) => {
    const found = await FORECASTS[model.family](model, run, row, steps);
    if (!found.every((one) => one.every(Number.isFinite))) {
      throw new Problem("The values are too large, or too far apart, for the model's arithmetic; divide " +
        "them by a power of ten.");
    }
    return found;
  };
}
