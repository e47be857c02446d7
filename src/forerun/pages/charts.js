// A crosshair for the charts: it shows the values at the pointer in all charts with the same axis.
(() => {
  "use strict";
  const UNITS = 100000;
  const number = (value) => {
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
    return Number(value.toPrecision(4)).toLocaleString("en-US", {maximumSignificantDigits: 4});
  };
  const scaled = (value, base, units, digits) => {
    let at = 0;
    while (Math.abs(value) >= base && at < units.length - 1) { value /= base; at += 1; }
    return value.toPrecision(Math.abs(value) >= 100 ? 3 : digits) + units[at];
  };
  const time = (value) => {
    const s = Math.round(value), d = Math.floor(s / 86400), h = Math.floor(s / 3600) % 24, m = Math.floor(s / 60) % 60;
    return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
  };
  const formats = {
    number, time,
    step: (value) => Math.round(value).toLocaleString("en-US"),
    percent: (value) => (100 * value).toFixed(1) + " %",
    rate: (value) => scaled(value, 1000, ["", "k", "M", "G"], 3),
    bytes: (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"], 3),
    seconds: (value) => value < 1 ? (1000 * value).toPrecision(3) + " ms" : value.toPrecision(3) + " s",
  };
  const axis = (text) => {
    const [low, high, log, kind] = text.split(" ");
    const [a, b] = log === "1" ? [Math.log10(+low), Math.log10(+high)] : [+low, +high];
    return {kind, text: (share) => {
      const value = a + share * (b - a);
      return formats[kind](log === "1" ? 10 ** value : value);
    }};
  };
  const charts = [...document.querySelectorAll("figure.lines")].map((figure) => ({
    x: axis(figure.dataset.x), y: axis(figure.dataset.y), range: figure.dataset.x,
    area: figure.querySelector(".area"), cross: figure.querySelector(".cross"),
    value: figure.querySelector(".latest"), before: figure.querySelector(".latest").textContent,
    curves: [...figure.querySelectorAll("path[data-name]")].map((path) => {
      const numbers = path.getAttribute("d").match(/\d+/g).map(Number);
      return {name: path.dataset.name, xs: numbers.filter((_, at) => at % 2 === 0), ys: numbers.filter((_, at) => at % 2)};
    }),
  }));
  const nearest = (xs, wanted) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < wanted) low = middle; else high = middle; }
    return wanted - xs[low] < xs[high] - wanted ? low : high;
  };
  const show = (chart, share) => {
    const near = chart.curves.map((curve) => nearest(curve.xs, share * UNITS));
    const x = chart.curves[0].xs[near[0]] / UNITS;
    const values = chart.curves.map((curve, at) =>
      `${chart.curves.length > 1 ? curve.name + " " : ""}${chart.y.text(1 - curve.ys[near[at]] / UNITS)}`);
    chart.cross.style.left = `${100 * x}%`;
    chart.cross.hidden = false;
    chart.value.textContent = `${chart.x.kind === "time" ? "" : "step "}${chart.x.text(x)}: ${values.join(" · ")}`;
  };
  const hide = (chart) => { chart.cross.hidden = true; chart.value.textContent = chart.before; };
  for (const chart of charts) {
    const same = charts.filter((other) => other.range === chart.range);
    chart.area.addEventListener("pointermove", (event) => {
      const box = chart.area.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      for (const other of same) show(other, share);
    });
    chart.area.addEventListener("pointerleave", () => same.forEach(hide));
  }
})();
