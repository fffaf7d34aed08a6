"use strict";
// Works the page's controls; the figures and tables are there without it.
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const all = (query) => [...document.querySelectorAll(query)];
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const SHARES = [0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2]; // of the run, by place of the slider
  const state = {
    x: "step", unit: "token", smoothing: 0.02, size: 1, across: "step", zoomed: false,
    hidden: new Set(), counted: data.unit, recent: data.recent, name: data.name,
    names: all("tr[data-run] th").map((each) => each.textContent),
    tick: (value) => Text.tick(value),
  };
  const curves = [];

  // ---- What is drawn --------------------------------------------------------------------------

  const tables = data.charts.flatMap((spec) => spec.lines.map((line) => [line, spec.points[line.points]]));
  const extent = () => {
    let low = Infinity, high = -Infinity;
    for (const [line, table] of tables) {
      for (const x of state.hidden.has(line.run) ? [] : table[state.x]) {
        low = Math.min(low, x);
        high = Math.max(high, x);
      }
    }
    return low <= high ? [low / state.size, high / state.size] : [0, 1];
  };
  const choose = () => {
    const longest = Math.max(0, ...tables.map(([, table]) => table.seconds.at(-1) ?? 0));
    const [size, name] = Text.timeUnit(longest);
    state.size = state.x === "seconds" ? size : 1;
    const counted = data.unit === "tokens" ? "loss-bearing tokens" : data.unit;
    state.across = { step: "step", seconds: `time, ${name}` }[state.x] ?? counted;
  };
  let placing = false;
  const place = (start, end, zoomed) => {
    const room = zoomed ? 0 : (end - start) * 0.015 || 0.5;
    placing = true;
    state.zoomed = zoomed;
    curves[0]?.plot.x_range.setv({ start: start - room, end: end + room });
    placing = false;
  };
  const loadAll = () => {
    if (!curves.length) return;
    choose();
    place(...extent(), false);
    for (const curve of curves) curve.load();
  };
  const colorAll = () => curves.forEach((curve) => curve.color(color));

  if (data.charts.length) {
    Bokeh.set_log_level("error");
    const roots = Object.fromEntries(Object.entries(data.roots).map(
      ([chart, id]) => [id, document.querySelector(`.plot[data-chart="${chart}"]`)],
    ));
    const item = { docid: "charts", roots, root_ids: Object.keys(roots) };
    const [views] = await Bokeh.embed.embed_items({ charts: data.document }, [item]);
    for (const spec of data.charts) {
      const view = views.get_by_id(data.roots[spec.id]);
      curves.push(new Curve(spec, view.model, view, state));
    }
    const across = curves[0].plot.x_range;
    let asked = false;
    const zoomed = () => {
      if (placing || asked) return;
      asked = true;
      queueMicrotask(() => {
        asked = false;
        state.zoomed = true;
        for (const curve of curves) curve.fit();
      });
    };
    for (const end of [across.properties.start, across.properties.end]) end.change.connect(zoomed);
    if (matchMedia("(pointer: coarse)").matches) { // a finger scrolls the page
      for (const { plot } of curves) plot.toolbar.gestures.pan.active = null;
    }
    colorAll();
    loadAll();
  }

  // ---- The cursor: of all charts at once -------------------------------------------------------

  const pointAll = (x) => curves.forEach((curve) => curve.point(x));
  const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  for (const curve of curves) {
    const { holder, spec } = curve;
    holder.curve = curve;
    let last = null;
    holder.addEventListener("pointermove", (event) => {
      const { left, right } = curve.view.frame.bbox;
      const at = event.clientX - holder.getBoundingClientRect().left;
      pointAll(at < left || at > right ? null : curve.view.frame.x_scale.invert(at));
    });
    holder.addEventListener("pointerleave", () => pointAll(null));
    holder.addEventListener("dblclick", () => loadAll());
    holder.addEventListener("blur", () => { last = null; pointAll(null); });
    holder.addEventListener("keydown", (event) => {
      if (!(event.key in STEPS) || event.target !== holder) return;
      event.preventDefault();
      const shown = curve.lines.filter((_, at) => curve.shown(at));
      const xs = [...new Set(shown.flatMap((line) => line.x))].sort((one, other) => one - other);
      const from = last ?? (STEPS[event.key] > 0 ? -1 : xs.length);
      last = Math.max(0, Math.min(xs.length - 1, from + STEPS[event.key]));
      pointAll(xs[last]);
      const said = document.querySelector(`[data-said="${spec.id}"]`);
      said.textContent = curve.point(xs[last]).join(", ");
    });
  }

  // ---- Controls --------------------------------------------------------------------------------

  for (const input of all(".controls input[type=radio]")) {
    input.addEventListener("change", () => {
      state[input.name] = input.value;
      loadAll();
    });
  }
  const slider = document.getElementById("smoothing");
  const smooth = () => {
    state.smoothing = SHARES[slider.value];
    const steps = 2 * Math.round((data.steps * state.smoothing) / 2) + 1;
    const text = steps > 1 ? `${Text.whole.format(steps)} steps` : "off";
    document.querySelector("output[for=smoothing]").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    for (const curve of curves) curve.load();
  };
  slider?.addEventListener("input", smooth);
  if (slider) smooth();

  for (const button of all("[data-act]")) {
    const curve = curves.find((each) => each.spec.id === button.dataset.of);
    button.addEventListener("click", () => {
      const name = `${data.name}-${curve.spec.id}`;
      if (button.dataset.act === "csv") Text.save(`${name}.csv`, "text/csv", [curve.csv()]);
      if (button.dataset.act === "png") {
        curve.picture(color).toBlob((blob) => Text.save(`${name}.png`, "image/png", [blob]));
      }
      if (button.dataset.act === "log") {
        curve.log = !curve.log;
        button.setAttribute("aria-pressed", String(curve.log));
        curve.load();
      }
    });
  }

  for (const button of all("[data-copy]")) {
    const text = document.getElementById(button.dataset.copy);
    button.addEventListener("click", async () => {
      getSelection().selectAllChildren(text);
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "copied";
      } catch {
        button.textContent = "selected"; // the browser does not let this page write to the clipboard
      }
    });
  }

  // ---- Several runs ----------------------------------------------------------------------------

  const search = document.getElementById("search");
  const rows = all("tr[data-run]");
  search?.addEventListener("input", () => {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    state.hidden = new Set(rows.filter((row) => {
      const text = row.textContent.toLowerCase();
      return !wanted.every((word) => text.includes(word));
    }).map((row) => Number(row.dataset.run)));
    for (const element of all("[data-run]")) element.hidden = state.hidden.has(Number(element.dataset.run));
    for (const { holder, spec } of curves) {
      holder.closest("figure").hidden = spec.lines.every((line) => state.hidden.has(line.run));
    }
    document.getElementById("found").textContent = `${rows.length - state.hidden.size} of ${rows.length} runs`;
    loadAll();
  });
  for (const button of all("th[data-column] button")) {
    const head = button.parentElement, at = Number(head.dataset.column);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of all("th[data-column]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[at].dataset.sort;
      const compare = (one, other) => {
        const [a, b] = [key(one), key(other)];
        if (a === "" || b === "") return (a === "") - (b === ""); // what is not known comes last
        const order = Number.isNaN(Number(a)) ? a.localeCompare(b) : a - b;
        return up ? order : -order;
      };
      rows[0].parentElement.append(...[...rows].sort(compare));
    });
  }

  // ---- Light and dark --------------------------------------------------------------------------

  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    colorAll();
  });
  dark.addEventListener("change", colorAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    for (const curve of curves) curve.fit();
  });
  root.dataset.ready = "";
})();
