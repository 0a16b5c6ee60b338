"use strict";
// Draws the trace in #data: for each device the stacked memory of its tags, and below it the
// driver's free memory. Dragging zooms, a double click or Escape shows everything, the legend hides
// tags.
(() => {
  const trace = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = ["#4e79a7", "#f0a03c", "#59a14f", "#d4606a", "#8f6bb0", "#3fa7a0", "#c9a227",
    "#b0738f", "#7a8794", "#96704f"];
  const MOST_ROWS = 500, MOST_IN_TIP = 20;
  const colour = (tag) => COLOURS[trace.tags.indexOf(tag) % COLOURS.length];
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hidden = new Set();
  const charts = [];
  const tip = document.getElementById("tip");

  const scaled = (value, base, units, digits) => {
    let at = 0;
    while (Math.abs(value) >= base && at < units.length - 1) { value /= base; at += 1; }
    return `${at === 0 ? Math.round(value) : value.toFixed(digits)} ${units[at]}`;
  };
  const bytes = (n) => scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], 1);
  const tick = (n) => {
    const [value, unit] = scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], 2).split(" ");
    return `${+value} ${unit}`;
  };
  const rate = (n) => scaled(n, 1024, ["B/s", "KiB/s", "MiB/s", "GiB/s", "TiB/s"], 1);
  const duration = (s) => s < 1e-3 ? `${(s * 1e6).toFixed(0)} µs`
    : s < 1 ? `${(s * 1e3).toFixed(1)} ms` : `${s.toFixed(2)} s`;
  const moment = (s) => `${s.toFixed(3)} s`;

  function make(kind, text, ...classes) {
    const made = document.createElement(kind);
    if (text !== undefined) made.textContent = text;
    made.classList.add(...classes);
    return made;
  }

  // The calls: each combines its rows of all tags and devices, but the two directions of a swap are
  // separate.
  const calls = new Map();
  for (const row of trace.transitions) {
    const key = `${row.number} ${row.direction}`;
    if (!calls.has(key)) {
      calls.set(key, { ...row, tags: [], bytes: 0, copied: 0, begin: row.begin ?? trace.begin,
        end: row.end ?? trace.seconds, timed: row.begin !== null && row.end !== null });
    }
    const call = calls.get(key);
    if (!call.tags.includes(row.tag)) call.tags.push(row.tag);
    call.bytes += row.bytes;
    call.copied += row.copied;
    call.begin = Math.min(call.begin, row.begin ?? trace.begin);
    call.end = Math.max(call.end, row.end ?? trace.seconds);
  }
  const moves = [...calls.values()].sort((a, b) => a.begin - b.begin);
  const shade = (call) => call.outcome === "failed" ? "failed" : call.direction;
  const title = (call) => (call.outcome === "done" ? call.kind : `${call.kind}, ${call.outcome}`)
    + (call.kind === "swap" ? ` (${call.direction})` : "");

  // --- charts

  function stacked(device) {
    const sums = new Array(device.seconds.length).fill(0);
    const lines = [];
    for (const tag of Object.keys(device.resident)) {
      const line = device.resident[tag];
      if (!hidden.has(tag)) for (let i = 0; i < sums.length; i += 1) sums[i] += line[i];
      lines.unshift(sums.slice());  // the topmost is drawn first, then the others over it
    }
    return [device.seconds, ...lines];
  }

  // Visible calls, each with a function that fills a part of its height: bands behind the memory;
  // edges and a strip at the top (for a swap, one per direction) in front of it.
  function eachMove(u, own, paint) {
    const { ctx, bbox } = u;
    const colours = Object.fromEntries(
      ["out", "into", "swap", "failed"].map((name) => [name, style(`--${name}`)]));
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const call of moves) {
      const from = u.valToPos(call.begin, "x", true);
      const width = Math.max(u.valToPos(call.end, "x", true) - from, 2 * devicePixelRatio);
      if (from > bbox.left + bbox.width || from + width < bbox.left) continue;
      ctx.fillStyle = colours[own(call)];
      paint(call, (left, top, wide, high, alpha) => {
        ctx.globalAlpha = alpha;
        ctx.fillRect(left, top, wide, high);
      }, from, width, bbox);
    }
    ctx.restore();
  }
  // The two ways of a swap have one band, in a colour of its own.
  const band = (call) => call.outcome !== "failed" && call.kind === "swap" ? "swap" : shade(call);
  const drawBands = (u) => eachMove(u, band, (call, fill, from, width, box) => {
    if (band(call) === "swap" && call.direction === "into") return;
    fill(from, box.top, width, box.height, 0.2);
  });
  const drawEdges = (u) => eachMove(u, shade, (call, fill, from, width, box) => {
    const pixel = devicePixelRatio, below = call.kind === "swap" && call.direction === "into";
    fill(from, box.top, pixel, box.height, 0.8);
    fill(from + width - pixel, box.top, pixel, box.height, 0.8);
    fill(from, box.top + (below ? 3 * pixel : 0), width, (below ? 3 : 6) * pixel, 1);
  });

  const powers = Array.from({ length: 50 }, (_, i) => 2 ** i);
  const axes = () => [
    { stroke: () => style("--faint"), grid: { stroke: () => style("--grid"), width: 1 },
      ticks: { stroke: () => style("--grid") }, size: 34, space: 70,
      values: (u, at) => at.map((s) => `${+s.toFixed(6)} s`) },
    { stroke: () => style("--faint"), grid: { stroke: () => style("--grid"), width: 1 },
      ticks: { stroke: () => style("--grid") }, size: 74, incrs: powers, space: 34,
      values: (u, at) => at.map(tick) },
  ];

  function draw(place, device, data, series, height, top) {
    const stepped = uPlot.paths.stepped({ align: 1 });
    const u = new uPlot({
      width: place.clientWidth || 800,
      height,
      series: [{}, ...series.map((one) => ({ paths: stepped, points: { show: false }, ...one }))],
      axes: axes(),
      scales: { x: { time: false }, y: { range: (_, least, most) => [0, top || most * 1.08 || 1] } },
      legend: { show: false },
      cursor: { sync: { key: "time" }, points: { show: false }, y: false,
        drag: { x: true, y: false } },
      drawOrder: ["series", "axes"],
      hooks: {
        drawClear: [drawBands],
        draw: top ? [] : [drawEdges],
        setCursor: [(chart) => { if (chart.over.matches(":hover")) showTip(chart, device); }],
        setScale: [(chart, key) => { if (key === "x") noteZoom(chart); }],
      },
    }, data, place);
    u.over.addEventListener("mouseleave", () => { tip.hidden = true; });
    new ResizeObserver(() => u.setSize({ width: place.clientWidth, height })).observe(place);
    charts.push(u);
    return u;
  }

  const stacks = [];
  for (const device of trace.devices) {
    const section = make("section");
    if (trace.devices.length > 1) section.append(make("h2", `GPU ${device.device}`));
    const main = make("div"), below = make("div");
    section.append(make("h3", "Held by tags"), main);
    document.getElementById("charts").append(section);
    const tags = Object.keys(device.resident);
    const series = tags.map((tag) => ({ label: tag, width: 0, stroke: colour(tag), fill: colour(tag) }));
    const chart = draw(main, device, stacked(device), series.reverse(), 330, 0);
    stacks.push({ device, chart, tags });
    if (device.free.some((value) => value !== null)) {
      section.append(make("h3", `Free on the device, says the driver (of ${bytes(device.total)})`),
        below);
      draw(below, device, [device.seconds, device.free],
        [{ label: "free", stroke: () => style("--free"), width: 1.5 }], 150,
        device.total * 1.04);
    }
  }

  const isWhole = (u) => {
    const [first, last] = [u.data[0][0], u.data[0][u.data[0].length - 1]];
    return u.scales.x.min <= first && u.scales.x.max >= last;
  };
  function noteZoom(u) {
    document.getElementById("reset").disabled = isWhole(u);
  }
  function zoom(min, max) {
    for (const u of charts) u.setScale("x", { min, max });
  }
  const showAll = () => zoom(trace.begin, trace.seconds);

  // --- the tooltip

  function lastBefore(times, at) {
    let low = 0, high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] <= at) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  function line(name, value, swatch) {
    const row = make("div", undefined, "row"), left = make("span", undefined, "name");
    if (swatch) {
      const mark = make("span", undefined, "swatch");
      mark.style.background = swatch;
      left.append(mark);
    }
    left.append(name);
    row.append(left, make("span", value));
    return row;
  }

  function showTip(u, device) {
    const at = u.posToVal(u.cursor.left, "x");
    const index = lastBefore(device.seconds, at);
    if (index < 0) { tip.hidden = true; return; }
    const rows = [line(moment(at), "")];
    let sum = 0;
    for (const tag of Object.keys(device.resident).reverse()) {
      const held = device.resident[tag][index], asked = device.allocated[tag][index];
      if (hidden.has(tag) || held + asked === 0) continue;
      sum += held;
      rows.push(line(tag, held === 0 ? `paused (${bytes(asked)})` : bytes(held), colour(tag)));
    }
    const more = rows.splice(MOST_IN_TIP + 1).length;
    if (more > 0) rows.push(line(`and ${more} more`, ""));
    rows.push(line("in all", bytes(sum)));
    const free = device.free[index];
    if (free !== null) rows.push(line("free, says the driver", bytes(free), style("--free")));
    const near = 4 * (u.scales.x.max - u.scales.x.min) / u.over.clientWidth;
    for (const call of moves.filter((c) => c.begin - near <= at && at <= c.end + near).slice(0, 4)) {
      const what = make("div", undefined, "what");
      what.append(make("div", `${title(call)}: ${call.tags.join(", ")}`, shade(call)));
      const took = call.timed ? ` in ${duration(call.end - call.begin)}` : "";
      if (call.outcome === "done") {
        what.append(make("div", `${bytes(call.bytes)}${took}, ${bytes(call.copied)} copied`));
      }
      if (call.caller) what.append(make("div", call.caller));
      rows.push(what);
    }
    tip.replaceChildren(...rows);
    tip.hidden = false;
    const box = u.over.getBoundingClientRect();
    const x = box.left + u.cursor.left, y = box.top + u.cursor.top;
    const right = x + 16 + tip.offsetWidth < innerWidth;
    tip.style.left = `${Math.max(4, right ? x + 14 : x - 14 - tip.offsetWidth)}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - tip.offsetHeight - 8))}px`;
  }

  // --- words, legend, table

  const when = new Date(trace.started * 1000);
  document.getElementById("about").textContent = `${duration(trace.seconds)} of process `
    + `${trace.process}, from ${when.toLocaleString()}; `
    + `${new Set(moves.map((call) => call.number)).size} transitions. `
    + "Drag to zoom, double-click for the whole time, click a tag to hide it.";
  if (trace.dropped > 0) {
    const notice = document.getElementById("notice");
    notice.hidden = false;
    notice.textContent = `The oldest ${trace.dropped} events were dropped, so this begins at `
      + `${moment(trace.begin)}. Record with more room: memsaver.timeline(events=...).`;
  }

  const legend = document.getElementById("legend");
  for (const tag of trace.tags) {
    const button = make("button"), mark = make("span", undefined, "swatch");
    button.type = "button";
    button.title = tag;
    mark.style.background = colour(tag);
    button.append(mark, tag);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (!hidden.delete(tag)) hidden.add(tag);
      button.setAttribute("aria-pressed", String(!hidden.has(tag)));
      for (const { device, chart, tags } of stacks) {
        const { min, max } = chart.scales.x;
        chart.batch(() => {
          tags.forEach((one, i) => chart.setSeries(tags.length - i, { show: !hidden.has(one) }));
          chart.setData(stacked(device), false);
          chart.setScale("x", { min, max });
        });
      }
    });
    legend.append(button);
  }
  for (const [name, text] of [["out", "pause"], ["into", "resume"], ["swap", "swap"],
    ["failed", "failed"]]) {
    if (!moves.some((call) => shade(call) === name || band(call) === name)) continue;
    const entry = make("span", undefined, "mark"), mark = make("span", undefined, "swatch");
    mark.style.background = `var(--${name})`;
    entry.append(mark, text);
    legend.append(entry);
  }

  const body = document.querySelector("#transitions tbody");
  for (const call of moves.slice(0, MOST_ROWS)) {
    const row = make("tr"), took = call.end - call.begin;
    const known = call.timed && call.outcome === "done";
    row.tabIndex = 0;
    row.append(make("td", moment(call.begin)), make("td", title(call), shade(call)),
      make("td", call.tags.join(", "), "tags"), make("td", bytes(call.bytes), "number"),
      make("td", bytes(call.copied), "number"),
      make("td", call.timed ? duration(took) : "", "number"),
      make("td", known && took > 0 && call.bytes > 0 ? rate(call.bytes / took) : "", "number"),
      make("td", call.caller, "caller"));
    const show = () => {
      const beside = Math.max(took, trace.seconds / 200);
      zoom(Math.max(trace.begin, call.begin - beside), Math.min(trace.seconds, call.end + beside));
      document.getElementById("charts").scrollIntoView({ behavior: "smooth", block: "nearest" });
    };
    row.addEventListener("click", show);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") show(); });
    body.append(row);
  }
  if (moves.length > MOST_ROWS) {
    document.getElementById("more").textContent =
      `and ${moves.length - MOST_ROWS} more; the chart has them all`;
  }
  if (moves.length === 0) document.getElementById("more").textContent = "none";

  document.getElementById("reset").addEventListener("click", showAll);
  for (const u of charts) u.over.addEventListener("dblclick", showAll);
  addEventListener("keydown", (event) => { if (event.key === "Escape") showAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const u of charts) u.redraw();
  });
})();
