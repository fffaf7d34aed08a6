"use strict";
// Draws the curves of the page's data; everything else is there without it.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const state = { x: "step", unit: "token", log: new Set() };
  const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3]];
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const lineColor = (line) => color(`--c${line.color % 6}`);

  const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const figure = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
    return size >= 1e5 ? short.format(value) : exact.format(value);
  };
  const tickText = (value) => {
    if (value == null) return "";
    return Math.abs(value) >= 1e4 ? short.format(value) : figure(value);
  };
  const TIME_UNITS = [[172800, 86400, "d"], [7200, 3600, "h"], [120, 60, "min"], [0, 1, "s"]];
  const timeUnit = (longest) => TIME_UNITS.find(([least]) => longest >= least);
  const across = (value, longest) => {
    if (value == null) return "–";
    if (state.x === "step") return `step ${whole.format(value)}`;
    if (state.x === data.unit) return `${short.format(value)} ${data.unit}`;
    const [, size, name] = timeUnit(longest);
    return `${exact.format(value / size)} ${name}`;
  };

  const columnOf = (line) => line.y[state.unit] ?? Object.values(line.y)[0];

  // uPlot wants one x for all lines; where a line has no point it is undefined, not null (a gap).
  const aligned = (spec) => {
    const log = state.log.has(spec.id);
    const tables = spec.lines.map((line) => {
      const points = spec.points[line.points];
      const values = points[columnOf(line)];
      return [points[state.x], log ? values.map((v) => (v > 0 ? v : null)) : values];
    });
    return uPlot.join(tables);
  };

  const yRange = (spec) => (u, low, high) => {
    if (low == null) return [0, 1];
    if (state.log.has(spec.id)) return uPlot.rangeLog(low, high, 10, false);
    for (const mark of spec.marks) {
      low = Math.min(low, mark.low);
      high = Math.max(high, mark.high);
    }
    if (spec.zero) low = Math.min(0, low);
    if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    const room = (high - low) * 0.06;
    return [spec.zero && low === 0 ? 0 : low - room, high + room];
  };

  const drawMarks = (spec) => (u) => {
    const { left, top, width, height } = u.bbox;
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(left, top, width, height);
    u.ctx.clip();
    for (const mark of spec.marks) {
      const [low, high, middle] = [mark.low, mark.high, mark.value].map((v) => u.valToPos(v, "y", true));
      u.ctx.fillStyle = color("--band");
      u.ctx.fillRect(left, high, width, low - high);
      u.ctx.strokeStyle = color("--quiet");
      u.ctx.lineWidth = devicePixelRatio;
      u.ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      u.ctx.beginPath();
      u.ctx.moveTo(left, middle);
      u.ctx.lineTo(left + width, middle);
      u.ctx.stroke();
    }
    u.ctx.restore();
  };

  const nameMarks = (spec) => (u) => {
    const { left, top, width } = u.bbox;
    u.ctx.save();
    u.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    u.ctx.textAlign = "right";
    u.ctx.fillStyle = color("--quiet");
    u.ctx.strokeStyle = color("--card");
    u.ctx.lineWidth = 4 * devicePixelRatio;
    u.ctx.lineJoin = "round";
    for (const mark of spec.marks) {
      const at = u.valToPos(mark.value, "y", true);
      const above = at - top > 20 * devicePixelRatio;
      u.ctx.textBaseline = above ? "bottom" : "top";
      const place = [mark.label, left + width - 4, at + (above ? -3 : 3) * devicePixelRatio];
      u.ctx.strokeText(...place);
      u.ctx.fillText(...place);
    }
    u.ctx.restore();
  };

  const series = (spec, values, longest) => spec.lines.map((line, place) => {
    const known = values[place + 1].filter((value) => value != null).length;
    const base = {
      label: line.label,
      stroke: lineColor(line),
      value: (u, value, row, index) => figure(index == null ? values[row].findLast((v) => v != null) : value),
      spanGaps: false,
    };
    if (line.role === "dots") {
      const mark = { show: true, size: 8, width: 2, fill: color("--card") };
      return { ...base, width: known > 1 ? 1 : 0, dash: [3, 4], points: mark };
    }
    if (line.role === "faint") {
      return { ...base, stroke: lineColor(line) + "80", width: 1, points: { show: known === 1 } };
    }
    return { ...base, width: 2, dash: DASHES[line.dash % 4], points: { show: known <= 2, size: 7 } };
  });

  const options = (spec, holder, values) => {
    const xs = values[0];
    const longest = xs.length ? xs[xs.length - 1] : 0;
    const axis = { stroke: color("--quiet"), font: "12px system-ui, sans-serif", grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false } };
    const [, size, name] = timeUnit(longest);
    const xText = (value) => (state.x === "seconds" ? `${exact.format(value / size)} ${name}` : short.format(value));
    return {
      width: holder.clientWidth,
      height: Math.round(Math.min(spec.wide ? 330 : 250, Math.max(200, holder.clientWidth * 0.6))),
      padding: [10, 18, 0, 0],
      scales: {
        x: { time: false, range: (u, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) },
        y: { distr: state.log.has(spec.id) ? 3 : 1, range: yRange(spec) },
      },
      axes: [
        { ...axis, size: 30, space: 64, filter: (u, ticks) => ticks.map((tick) => (state.x !== "step" || Number.isInteger(tick) ? tick : null)), values: (u, ticks) => ticks.map((tick) => (tick == null ? "" : xText(tick))), grid: { show: false } },
        { ...axis, size: 56, values: (u, ticks) => ticks.map(tickText) },
      ],
      series: [{ label: "at", value: (u, value, row, index) => across(index == null ? longest : value, longest) }, ...series(spec, values, longest)],
      cursor: { sync: { key: "x", scales: ["x", null] }, points: { size: 7 } },
      hooks: { drawAxes: [drawMarks(spec)], draw: [nameMarks(spec)] },
    };
  };

  const charts = new Map();
  const draw = (spec) => {
    const holder = document.querySelector(`.plot[data-chart="${spec.id}"]`);
    if (!holder) return;
    charts.get(spec.id)?.destroy();
    const values = aligned(spec);
    const chart = new uPlot(options(spec, holder, values), values, holder);
    charts.set(spec.id, chart);
    holder.uplot = chart;
    for (const [place, row] of [...holder.querySelectorAll(".u-series")].entries()) {
      const name = row.querySelector("th");
      if (place === 0) continue;
      name.tabIndex = 0;
      name.setAttribute("role", "switch");
      name.setAttribute("aria-checked", "true");
      name.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        name.click();
      });
      name.addEventListener("click", () => {
        name.setAttribute("aria-checked", String(!row.classList.contains("u-off")));
      });
    }
  };
  const drawAll = () => data.charts.forEach(draw);

  // The cursor by keyboard: what it stands on is said aloud.
  const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  const move = (spec, event) => {
    if (!(event.key in STEPS) || event.target !== event.currentTarget) return;
    event.preventDefault();
    const chart = charts.get(spec.id);
    const last = chart.data[0].length - 1;
    const from = chart.cursor.idx ?? (STEPS[event.key] > 0 ? -1 : last + 1);
    const index = Math.max(0, Math.min(last, from + STEPS[event.key]));
    chart.setCursor({ left: chart.valToPos(chart.data[0][index], "x"), top: 0 });
    const said = spec.lines
      .map((line, place) => [line.label, chart.data[place + 1][index]])
      .filter(([, value]) => value != null)
      .map(([label, value]) => `${label} ${figure(value)}`);
    const at = across(chart.data[0][index], chart.data[0][last]);
    document.querySelector(`[data-said="${spec.id}"]`).textContent = [at, ...said].join(", ");
  };

  for (const spec of data.charts) {
    const holder = document.querySelector(`.plot[data-chart="${spec.id}"]`);
    holder?.addEventListener("keydown", (event) => move(spec, event));
  }
  for (const input of document.querySelectorAll(".controls input")) {
    input.addEventListener("change", () => {
      state[input.name] = input.value;
      drawAll();
    });
  }
  for (const button of document.querySelectorAll("[data-log]")) {
    button.addEventListener("click", () => {
      const id = button.dataset.log;
      const on = !state.log.has(id);
      if (on) state.log.add(id); else state.log.delete(id);
      button.setAttribute("aria-pressed", String(on));
      draw(data.charts.find((spec) => spec.id === id));
    });
  }

  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    drawAll();
  });
  dark.addEventListener("change", drawAll);

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    drawAll();
  });
  drawAll();
})();
