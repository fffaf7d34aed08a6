"use strict";
// One chart: it gives BokehJS what to draw, and shows the values at the cursor below it.
class Curve {
  constructor(spec, plot, view, state) {
    Object.assign(this, { spec, plot, view, state });
    this.holder = document.querySelector(`.plot[data-chart="${spec.id}"]`);
    this.legend = document.querySelector(`.legend[data-legend="${spec.id}"]`);
    this.cursor = this.holder.appendChild(document.createElement("div"));
    this.cursor.className = "cursor";
    this.off = new Set(); // indices of lines that the reader has switched off
    this.log = false;
    this.lines = [];
    this.model("x").formatter.doFormat = (ticks) => ticks.map(state.tick);
    this.model("y").formatter.doFormat = (ticks) => ticks.map((y) => Text.tick(this.value(y)));
    this.makeLegend();
  }

  model(name) { return this.plot.document.get_model_by_name(`${this.spec.id}/${name}`); }
  renderers(place) {
    const name = `${this.spec.id}/${place}`;
    return this.plot.renderers.filter((renderer) => renderer.tags.includes(name));
  }
  shown(place) {
    const line = this.spec.lines[place];
    return !this.off.has(place) && !this.state.hidden.has(line.run);
  }
  // A value as it is drawn, and back.
  drawn(value) { return !this.log || value == null ? value : value > 0 ? Math.log10(value) : null; }
  value(drawn) { return this.log ? 10 ** drawn : drawn; }

  // The mean of the window around each value, NaN left out; the window is cut at the ends.
  static smooth(values, share) {
    const half = Math.round((values.length * share) / 2);
    const sums = [0], counts = [0];
    for (const [place, value] of values.entries()) {
      const known = value != null && !Number.isNaN(value);
      sums.push(sums[place] + (known ? value : 0));
      counts.push(counts[place] + (known ? 1 : 0));
    }
    return values.map((_, place) => {
      const low = Math.max(place - half, 0), high = Math.min(place + half + 1, values.length);
      const count = counts[high] - counts[low];
      return count ? (sums[high] - sums[low]) / count : null;
    });
  }

  // The left and right edge of a bar around each x.
  static edges(x) {
    const half = (one, other) => (one == null || other == null ? 0.5 : Math.abs(one - other) / 2);
    return Float64Array.from(x.flatMap((value, at) => [
      value - half(x[at - 1] ?? x[at + 1], value), value + half(x[at + 1] ?? x[at - 1], value),
    ]));
  }

  // Computes the points of all lines for what the reader has chosen, and hands them to BokehJS.
  load() {
    const { spec, state } = this;
    let base = null;
    this.lines = spec.lines.map((line, place) => {
      const table = spec.points[line.points];
      const unit = state.unit in line.y ? state.unit : Object.keys(line.y)[0];
      let y = table[line.y[unit]];
      if (line.role === "smooth") y = Curve.smooth(y, state.smoothing);
      const x = table[state.x].map((value) => value / state.size);
      const known = { ...line, rest: line.recent[unit], steps: table.step, x, y, to: y.map((value) => this.drawn(value)) };
      if (line.role === "area") {
        base ??= y.map(() => 0);
        known.from = base;
        if (this.shown(place)) base = base.map((low, at) => low + (y[at] ?? 0));
        known.to = base;
      }
      return known;
    });
    for (const [place, line] of this.lines.entries()) {
      const floats = (values) => Float64Array.from(values, (value) => value ?? NaN);
      const x = floats(line.x), to = floats(line.to);
      if (line.role === "area") {
        const twice = (values) => floats(values.flatMap((value) => [value, value]));
        this.model(place).data = { x: Curve.edges(line.x), y1: twice(line.from), y2: twice(line.to) };
      } else this.model(place).data = { x, y: to };
      if (line.role !== "area" && line.role !== "dots") {
        const few = to.filter((value) => !Number.isNaN(value)).length <= (line.role === "faint" ? 60 : 2);
        this.model(`${place}/lone`).data = few ? { x, y: to } : { x: [], y: [] };
      }
      for (const renderer of this.renderers(place)) renderer.visible = this.shown(place);
    }
    this.model("x").axis_label = state.across;
    this.model("y").axis_label = spec.axis[state.unit] ?? spec.axis.token;
    this.fit();
    this.point(null);
  }

  color(color) {
    const { plot, spec } = this;
    for (const axis of [this.model("x"), this.model("y")]) {
      axis.setv({ axis_label_text_color: color("--quiet"), major_label_text_color: color("--quiet") });
    }
    this.model("rule").grid_line_color = color("--rule");
    for (const [place, line] of spec.lines.entries()) {
      const ink = { value: color(`--c${line.color % 6}`) };
      for (const { glyph } of this.renderers(place)) {
        if (line.role === "area") glyph.fill_color = ink;
        else if (glyph.type === "Line") glyph.line_color = ink;
        else glyph.setv({ line_color: ink, fill_color: line.role === "dots" ? { value: color("--card") } : ink });
        if (glyph.type !== "Line" && line.role === "faint") glyph.fill_alpha = { value: 0.4 };
      }
    }
    for (const place of spec.marks.keys()) {
      this.model(`mark/${place}/band`).fill_color = color("--accent");
      this.model(`mark/${place}/band`).fill_alpha = 0.1;
      this.model(`mark/${place}/line`).line_color = color("--quiet");
      this.model(`mark/${place}/label`).setv({
        text_color: color("--quiet"), background_fill_color: color("--card"), background_fill_alpha: 0.75,
      });
    }
  }

  // Lets the y axis span what is seen, and places ticks and planned values.
  fit() {
    const { start, end } = this.plot.x_range;
    const [low, high] = this.span(start, end);
    this.plot.y_range.setv({ start: low, end: high });
    const wide = this.holder.clientWidth - 80;
    this.model("x").ticker.ticks = Text.ticks(start, end, Math.max(2, wide / 75), this.state.x === "step");
    const count = this.plot.height / 55;
    this.model("y").ticker.ticks = this.log ? Text.logTicks(low, high, count) : Text.ticks(low, high, count);
    for (const [place, mark] of this.spec.marks.entries()) {
      const [bottom, middle, top] = [mark.low, mark.value, mark.high].map((value) => this.drawn(value));
      this.model(`mark/${place}/band`).setv({ bottom, top });
      this.model(`mark/${place}/line`).location = middle;
      const under = middle > high - (high - low) * 0.12;
      this.model(`mark/${place}/label`).setv({
        x: end, y: middle, text_baseline: under ? "top" : "bottom", y_offset: under ? -3 : 3,
      });
    }
  }

  span(start, end) {
    let low = Infinity, high = -Infinity;
    for (const [place, line] of this.lines.entries()) {
      if (!this.shown(place)) continue;
      for (const [at, value] of line.to.entries()) {
        if (value == null || line.x[at] < start || line.x[at] > end) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (this.spec.top != null && !this.state.zoomed) high = Math.min(high, this.spec.top);
    if (!(low <= high)) [low, high] = [0, 1];
    for (const mark of this.log ? [] : this.spec.marks) {
      low = Math.min(low, mark.low);
      high = Math.max(high, mark.high);
    }
    const zero = this.spec.zero && !this.log;
    if (zero) low = Math.min(0, low);
    const room = high > low ? (high - low) * 0.07 : Math.abs(high) * 0.1 || 1;
    return [zero && low === 0 ? 0 : low - room, high + room];
  }

  // The index of a line's point at x: the nearest, of held-out figures the last one up to there.
  static at(line, x) {
    let low = 0, high = line.x.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (line.x[middle] <= x) low = middle; else high = middle - 1;
    }
    if (line.role === "dots") return line.x[low] <= x ? low : -1;
    const next = Math.min(low + 1, line.x.length - 1);
    return Math.abs(line.x[next] - x) < Math.abs(line.x[low] - x) ? next : low;
  }
  static last(line) { return line.y.findLastIndex((value) => value != null && !Number.isNaN(value)); }

  // Shows the values at x; with null the last of each line, or the mean of its last steps. Returns
  // them as text.
  point(x) {
    const said = [];
    const places = this.lines.map((line) => (x == null ? Curve.last(line) : Curve.at(line, x)));
    const frame = this.view.frame;
    this.cursor.hidden = x == null || x < this.plot.x_range.start || x > this.plot.x_range.end;
    if (!this.cursor.hidden) {
      const { left, top, height } = frame.bbox;
      Object.assign(this.cursor.style, {
        left: `${left + frame.x_scale.compute(x) - frame.bbox.left}px`, top: `${top}px`, height: `${height}px`,
      });
    }
    for (const [place, line] of this.lines.entries()) {
      const item = this.items.get(place), at = places[place];
      const resting = x == null && line.rest != null;
      const value = resting ? line.rest : at >= 0 ? line.y[at] : null;
      if (!item) continue;
      const step = resting ? `mean of the last ${this.state.recent[line.run]} steps` : at < 0 ? "" : `step ${Text.whole.format(line.steps[at])}`;
      item.querySelector("b").textContent = Text.figure(value);
      item.querySelector(".at").textContent = value == null ? "" : step;
      if (value != null && this.shown(place)) {
        said.push(`${line.label} ${Text.figure(value)} at ${step}`);
      }
    }
    return said;
  }

  makeLegend() {
    this.items = new Map();
    for (const [place, line] of this.spec.lines.entries()) {
      if (!line.label) continue;
      const item = document.createElement("button");
      item.type = "button";
      item.className = "key";
      item.setAttribute("role", "switch");
      item.setAttribute("aria-checked", "true");
      item.innerHTML = '<svg width="22" height="10" aria-hidden="true"></svg><span class="name"></span> <b></b> <span class="at"></span>';
      item.querySelector(".name").textContent = line.label;
      item.querySelector("svg").append(...Curve.swatch(line));
      item.addEventListener("click", () => {
        const on = this.off.has(place);
        if (on) this.off.delete(place); else this.off.add(place);
        item.setAttribute("aria-checked", String(on));
        this.load();
      });
      item.dataset.run = line.run;
      this.legend.append(item);
      this.items.set(place, item);
    }
  }

  static dashes(line) {
    return line.role === "dots" ? [3, 4] : [[], [9, 4], [2, 3], [9, 3, 2, 3]][line.dash % 4];
  }

  // A sample of a line: its colour, dashes and points.
  static swatch(line) {
    const part = (name, attributes) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      return element;
    };
    const ink = `ink k${line.color % 6}`;
    if (line.role === "area") return [part("rect", { class: `${ink} full`, x: 5, width: 12, height: 10, rx: 2 })];
    const width = line.role === "faint" || line.role === "dots" ? 1 : 2.5;
    const stroke = part("line", { class: ink, x2: 22, y1: 5, y2: 5, "stroke-width": width, "stroke-dasharray": Curve.dashes(line).join(" ") });
    if (line.role === "faint") stroke.setAttribute("opacity", 0.5);
    if (line.role !== "dots") return [stroke];
    return [stroke, part("circle", { class: `${ink} hollow`, cx: 11, cy: 5, r: 3.5, "stroke-width": 2 })];
  }

  csv() {
    const { x } = this.state, unit = this.state.counted;
    const rows = this.lines.flatMap((line, place) => {
      if (!this.shown(place)) return [];
      const table = this.spec.points[line.points];
      const label = line.label || `${this.state.names[line.run]} each step`;
      return line.y.map((value, at) => [label, table.step[at], table[unit][at], table.seconds[at], value]);
    });
    const head = ["line", "step", unit, "seconds", this.spec.axis[this.state.unit] ?? this.spec.axis.token];
    return [head, ...rows].map((row) => row.map(Text.cell).join(",")).join("\n") + "\n";
  }

  // The chart with its title and legend as a canvas.
  picture(color) {
    const chart = this.view.export("png", true).canvas, canvas = document.createElement("canvas");
    const scale = chart.width / this.view.bbox.width, pad = 14 * scale, row = 20 * scale;
    const shown = [...this.items].filter(([place]) => this.shown(place));
    canvas.width = chart.width + 2 * pad;
    canvas.height = chart.height + 3 * pad + row * (1 + shown.length);
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = color("--card");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.drawImage(chart, pad, pad + row);
    const font = (weight) => { ctx.font = `${weight} ${13 * scale}px system-ui, sans-serif`; };
    font(600);
    ctx.fillStyle = color("--text");
    ctx.fillText(`${this.state.name}: ${this.spec.title}`, pad, pad + row / 2);
    font(400);
    shown.forEach(([place, item], number) => {
      const line = this.spec.lines[place], y = chart.height + 2 * pad + row * (1 + number);
      ctx.strokeStyle = color(`--c${line.color % 6}`);
      ctx.lineWidth = (line.role === "area" ? 8 : line.role === "faint" ? 1 : 2.5) * scale;
      ctx.setLineDash(Curve.dashes(line).map((length) => length * scale));
      ctx.beginPath();
      ctx.moveTo(pad, y - 4 * scale);
      ctx.lineTo(pad + 22 * scale, y - 4 * scale);
      ctx.stroke();
      ctx.fillStyle = color("--text");
      ctx.fillText(item.textContent, pad + 30 * scale, y);
    });
    return canvas;
  }
}
