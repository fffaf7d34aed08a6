"use strict";
// Numbers as text, ticks of an axis, and files to save.
const Text = (() => {
  const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const TIME_UNITS = [[172800, 86400, "d"], [7200, 3600, "h"], [120, 60, "min"], [0, 1, "s"]];

  const figure = (value) => {
    if (value == null || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
    return size >= 1e5 ? short.format(value) : exact.format(value);
  };
  const tick = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return Number(value.toPrecision(3)).toExponential();
    return size >= 1e4 ? short.format(value) : exact.format(value);
  };

  // Some `count` round numbers from `low` to `high`.
  const ticks = (low, high, count, integers = false) => {
    const rough = (high - low) / Math.max(1, count);
    if (!(rough > 0)) return [];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((each) => each * power >= rough * 0.999) * power;
    const every = integers ? Math.max(1, Math.round(step)) : step;
    const found = [];
    for (let place = Math.ceil(low / every - 1e-9); place * every <= high + 1e-9 * every; place++) {
      found.push(Number((place * every).toPrecision(12)));
    }
    return found;
  };
  // Logarithms of round numbers between two logarithms: of 1, 2 and 5 times powers of ten, or of
  // evenly spaced numbers where there are few of those.
  const logTicks = (low, high, count) => {
    const found = [];
    for (let power = Math.floor(low); power <= high; power++) {
      for (const digit of high - low > 3 ? [1] : [1, 2, 5]) {
        const place = power + Math.log10(digit);
        if (place >= low && place <= high) found.push(place);
      }
    }
    if (found.length > 2) return found;
    return ticks(10 ** low, 10 ** high, count).filter((value) => value > 0).map(Math.log10);
  };

  const save = (name, type, parts) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(parts, { type }));
    link.download = name.replace(/[^\w.-]+/g, "-");
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  };
  // A cell of a CSV; a text that a spreadsheet would take for a formula stays text.
  const cell = (value) => {
    if (value == null || Number.isNaN(value)) return "";
    const text = String(value);
    if (typeof value === "number") return text;
    return `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  };

  const timeUnit = (longest) => TIME_UNITS.find(([least]) => longest >= least).slice(1);
  return { figure, tick, ticks, logTicks, save, cell, timeUnit, short, exact, whole };
})();
