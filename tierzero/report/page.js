"use strict";
// Draws the charts and the timeline from the data that stands in the page. Text goes in as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const style = () => getComputedStyle(document.documentElement);
const color = (name) => style().getPropertyValue(`--${name}`).trim() || "#888";
const SVG = "http://www.w3.org/2000/svg";

function make(parent, tag, attributes = {}, text = null) {
  const svg = parent.namespaceURI === SVG || tag === "svg";
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return parent.appendChild(element);
}

// Numbers as a person reads them.

function scaled(value, unit) {
  for (const [limit, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= limit * 0.9995) return `${(value / limit).toPrecision(3)} ${prefix}${unit}`;
  return `${Math.round(value)} ${unit}`;
}
const bytes = (value) => scaled(value, "B");
const rate = (value) => `${bytes(value)}/s`;
function seconds(value) {
  if (value === 0) return "0 s";
  if (Math.abs(value) < 1e-3) return `${(value * 1e6).toPrecision(3)} µs`;
  if (Math.abs(value) < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  return `${value.toPrecision(3)} s`;
}
const plain = (value) => (value === 0 || Math.abs(value) >= 0.01 ? String(Number(value.toPrecision(4))) : value.toExponential(2));

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((candidate) => candidate >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

// The tip beside the pointer.

const tip = make(document.body, "div", { class: "tip", role: "status", hidden: "" });
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 16 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${below ? event.clientY + 16 : event.clientY - tip.offsetHeight - 10}px`;
}
const hideTip = () => { tip.hidden = true; };

// Charts over the steps.

const BARS = 160;

// Neighbouring steps as one where there are more than fit: means of what is there.
function binned(chart) {
  const size = Math.ceil(chart.x.length / BARS);
  if (size <= 1) return chart;
  const groups = (values) => {
    const found = [];
    for (let at = 0; at < values.length; at += size) {
      const known = values.slice(at, at + size).filter((value) => value !== null);
      found.push(known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null);
    }
    return found;
  };
  const ends = chart.x.filter((_, at) => at % size === 0);
  return { ...chart, x: ends, size, series: chart.series.map((one) => ({ ...one, values: groups(one.values) })) };
}

function extent(chart) {
  const values = chart.series.flatMap((one) => one.values.filter((value) => value !== null));
  let high = Math.max(...values, 0), low = 0;
  if (chart.stacked) high = Math.max(...chart.x.map((_, at) => chart.series.reduce((sum, one) => sum + (one.values[at] || 0), 0)));
  if (chart.tight) [low, high] = [Math.min(...values), Math.max(...values)];
  for (const limit of chart.limits || []) if (!chart.stacked) high = Math.max(high, limit.value);
  if (high <= low) high = low + 1;
  return chart.tight ? [low - (high - low) * 0.05, high + (high - low) * 0.05] : [low, high * 1.05];
}

function drawChart(figure, given) {
  figure.replaceChildren();
  const chart = binned(given);
  if (!chart.x.length) return;
  const width = Math.max(260, figure.clientWidth), height = chart.height || 200;
  const box = { left: 58, right: 12, top: 10, bottom: 24 };
  const svg = make(figure, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": chart.title });
  const [low, high] = extent(chart);
  const inner = width - box.left - box.right, slot = inner / chart.x.length;
  const x = (at) => box.left + (at + 0.5) * slot;
  const y = (value) => box.top + (height - box.top - box.bottom) * (1 - (value - low) / (high - low));
  for (const value of ticks(low, high, 4)) {
    make(svg, "line", { class: "grid", x1: box.left, x2: width - box.right, y1: y(value), y2: y(value) });
    make(svg, "text", { x: box.left - 6, y: y(value) + 4, "text-anchor": "end" }, chart.format(value));
  }
  const every = Math.ceil(chart.x.length / Math.max(2, Math.floor(inner / 70)));
  chart.x.forEach((step, at) => {
    if (at % every === 0) make(svg, "text", { x: x(at), y: height - 6, "text-anchor": "middle" }, String(step));
  });
  if (chart.stacked) drawBars(svg, chart, x, y, slot);
  else for (const one of chart.series) drawLine(svg, one, x, y);
  for (const limit of (chart.limits || []).filter((limit) => limit.value <= high))
    make(svg, "line", { class: "limit", stroke: color(limit.color), x1: box.left, x2: width - box.right, y1: y(limit.value), y2: y(limit.value) });
  followPointer(svg, chart, box, slot, x, height);
  drawLegend(figure, chart);
}

function drawBars(svg, chart, x, y, slot) {
  const width = Math.max(0.5, Math.min(slot > 5 ? slot - 1 : slot, 40));
  chart.x.forEach((_, at) => {
    let base = 0;
    for (const one of chart.series) {
      const value = one.values[at] || 0;
      if (value > 0)
        make(svg, "rect", {
          x: x(at) - width / 2, width, fill: color(one.color),
          y: y(base + value), height: Math.max(0, y(base) - y(base + value)),
        });
      base += value;
    }
  });
}

function drawLine(svg, one, x, y) {
  let path = "", pen = "M";
  one.values.forEach((value, at) => {
    if (value === null) { pen = "M"; return; }
    path += `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  make(svg, "path", { d: path, fill: "none", stroke: color(one.color), "stroke-width": 2, "stroke-linejoin": "round" });
  if (one.values.length === 1 && one.values[0] !== null) make(svg, "circle", { cx: x(0), cy: y(one.values[0]), r: 3, fill: color(one.color) });
}

function followPointer(svg, chart, box, slot, x, height) {
  const cursor = make(svg, "line", { class: "cursor", y1: box.top, y2: height - box.bottom, visibility: "hidden" });
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const at = Math.floor((event.clientX - frame.left - box.left) / slot);
    if (at < 0 || at >= chart.x.length) return;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(at));
    cursor.setAttribute("visibility", "visible");
    const size = chart.size || 1;
    const lines = [size > 1 ? `steps from ${chart.x[at]}, mean of ${size}` : `step ${chart.x[at]}`];
    const shown = chart.series.filter((one) => one.values[at] !== null && (!chart.stacked || one.values[at] > 0));
    for (const one of shown.reverse()) lines.push(`${one.label}: ${chart.format(one.values[at])}`);
    if (chart.stacked) lines.push(`together: ${chart.format(shown.reduce((sum, one) => sum + one.values[at], 0))}`);
    showTip(event, lines.join("\n"));
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
}

function drawLegend(figure, chart) {
  if (chart.series.length < 2 && !(chart.limits || []).length) return;
  const list = make(figure, "ul", { class: "legend" });
  for (const one of chart.series) {
    const item = make(list, "li");
    make(item, "i", { style: `background: var(--${one.color})` });
    item.append(one.label);
  }
  for (const limit of chart.limits || []) {
    const item = make(list, "li");
    make(item, "i", { class: "dashed", style: `border-color: var(--${limit.color})` });
    item.append(`${limit.label}: ${chart.format(limit.value)}`);
  }
}

// The timeline: one canvas, in microseconds from the end of the step before.

const SIDE = 84, TOP = 22, GAP = 7;
const view = { shown: null, from: 0, to: 1, rows: [] };
const canvas = document.getElementById("lanes");

// A row of the canvas for each row of a lane, and for each depth of spans that nest.
function layOut(shown) {
  let y = TOP;
  const places = new Map();
  shown.lanes.forEach((lane, number) => {
    const height = lane.rows > 3 ? 9 : 16;
    for (let row = 0; row < lane.rows; row++) places.set(number * 1000 + row, { y: y + row * height, height: height - 1 });
    lane.y = y;
    y += lane.rows * height + GAP;
  });
  return { places, height: y };
}

function showTimeline(shown) {
  Object.assign(view, { shown, from: 0, to: shown.end, ...layOut(shown) });
  view.from = Math.min(0, ...shown.spans.map((span) => span[4]));
  view.least = view.from;
  drawTimeline();
}

function drawTimeline() {
  const { shown, from, to } = view;
  const width = Math.max(200, canvas.parentElement.clientWidth), ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${view.height}px`;
  canvas.width = width * ratio;
  canvas.height = view.height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.clearRect(0, 0, width, view.height);
  pen.font = "11px system-ui, sans-serif";
  const x = (time) => SIDE + ((time - from) / (to - from)) * (width - SIDE);
  drawAxis(pen, x, width);
  pen.save();
  pen.beginPath();
  pen.rect(SIDE, 0, width - SIDE, view.height);
  pen.clip();
  const colors = shown.kinds.map(color);
  for (const span of shown.spans) drawSpan(pen, span, x, width, colors);
  pen.restore();
  pen.fillStyle = color("soft");
  for (const lane of shown.lanes) pen.fillText(lane.name, 0, lane.y + 11);
}

function drawAxis(pen, x, width) {
  const { from, to } = view;
  pen.fillStyle = color("soft");
  pen.strokeStyle = color("rule");
  for (const time of ticks(from, to, Math.max(2, Math.floor((width - SIDE) / 110)))) {
    pen.beginPath();
    pen.moveTo(x(time), TOP - 4);
    pen.lineTo(x(time), view.height);
    pen.stroke();
    const label = seconds(time / 1e6);
    pen.fillText(label, Math.min(x(time) + 3, width - pen.measureText(label).width), 12);
  }
}

function drawSpan(pen, span, x, width, colors) {
  const [lane, row, kind, name, start, length] = span;
  const left = x(start), right = x(start + length);
  if (right < SIDE || left > width) return;
  const place = view.places.get(lane * 1000 + row), wide = Math.max(right - left - 0.5, 0.8);
  pen.fillStyle = colors[kind];
  pen.fillRect(left, place.y, wide, place.height);
  const inside = Math.max(left, SIDE), room = Math.min(right, width) - inside - 8;
  if (place.height < 12 || room < 30) return;
  const text = view.shown.names[name];
  if (pen.measureText(text).width > room) return;
  pen.fillStyle = readableOn(colors[kind]);
  pen.fillText(text, inside + 4, place.y + 11);
}

function readableOn(background) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(background.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#0b0b0b" : "#ffffff";
}

// Where on the time axis the pointer is.
function timeAt(event) {
  const frame = canvas.getBoundingClientRect();
  return view.from + ((event.clientX - frame.left - SIDE) / (frame.width - SIDE)) * (view.to - view.from);
}

function spanAt(event) {
  const frame = canvas.getBoundingClientRect(), y = event.clientY - frame.top;
  const slack = (2 * (view.to - view.from)) / (frame.width - SIDE), time = timeAt(event);
  return view.shown.spans.find((span) => {
    const place = view.places.get(span[0] * 1000 + span[1]);
    return y >= place.y && y < place.y + place.height + 1 && time >= span[4] - slack && time <= span[4] + span[5] + slack;
  });
}

function describeSpan([, , color, name, start, length, nbytes]) {
  const kind = view.shown.kinds[color], moves = length > 0 && !data.unmoved.includes(kind);
  const lines = [view.shown.names[name], `${seconds(length / 1e6)}, from ${seconds(start / 1e6)}`];
  if (nbytes) lines.push(moves ? `${bytes(nbytes)}, ${rate(nbytes / (length / 1e6))}` : bytes(nbytes));
  if (data.hints[kind]) lines.push(data.hints[kind]);
  return lines.join("\n");
}

function moveTo(from, to) {
  const least = view.least, most = view.shown.end, span = Math.min(Math.max(to - from, 1), most - least);
  view.from = Math.min(Math.max(from, least), most - span);
  view.to = view.from + span;
  drawTimeline();
}

function zoom(factor, around = (view.from + view.to) / 2) {
  moveTo(around - (around - view.from) * factor, around + (view.to - around) * factor);
}

function listenToTimeline() {
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => { grip = { time: timeAt(event) }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { grip = null; });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("pointermove", (event) => {
    if (grip) {
      const shift = grip.time - timeAt(event);
      moveTo(view.from + shift, view.to + shift);
    }
    const span = spanAt(event);
    if (span) showTip(event, describeSpan(span));
    else hideTip();
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, timeAt(event));
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event)));
  canvas.addEventListener("keydown", (event) => {
    const width = view.to - view.from;
    const actions = {
      "+": () => zoom(0.6), "-": () => zoom(1.6), 0: () => moveTo(view.least, view.shown.end),
      ArrowLeft: () => moveTo(view.from - width / 5, view.to - width / 5),
      ArrowRight: () => moveTo(view.from + width / 5, view.to + width / 5),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  });
  const press = (id, action) => document.getElementById(id).addEventListener("click", action);
  press("closer", () => zoom(0.6));
  press("further", () => zoom(1.6));
  press("all", () => moveTo(view.least, view.shown.end));
}

function chooseTimeline() {
  const choice = document.getElementById("choice");
  data.timelines.forEach((one, at) => make(choice, "option", { value: at }, one.title));
  choice.value = String(data.chosen);
  choice.addEventListener("change", () => showTimeline(data.timelines[Number(choice.value)]));
  const legend = document.getElementById("kinds");
  for (const [name, label] of data.legend) {
    const item = make(legend, "li");
    make(item, "i", { style: `background: var(--${name})` });
    item.append(label);
  }
  listenToTimeline();
  showTimeline(data.timelines[data.chosen]);
}

// All of it.

const FORMATS = { seconds, bytes, rate, plain };
function drawCharts() {
  for (const [id, chart] of Object.entries(data.charts))
    drawChart(document.getElementById(id), { ...chart, format: FORMATS[chart.format], x: data.steps });
}
drawCharts();
if (data.timelines.length) chooseTimeline();
const redraw = () => { drawCharts(); if (view.shown) drawTimeline(); };
let waiting = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.documentElement.dataset.drawn = "yes";
