// Draws the charts of the page with uPlot. The data of a chart are the JSON inside of its .plot.
// Charts with the same horizontal axis share the cursor and the zoom.
"use strict";
(() => {
  const PRINTED_WIDTH = 640;
  const MOST_DOTS = 30; // of a line; more are not drawn as dots
  const LABEL_FONT = "12px ui-monospace, monospace";
  const LABEL_WIDTH = 7.3; // of a letter in that font
  const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5].flatMap((power) => [power, 2 * power, 5 * power]); // between steps
  const root = document.documentElement;
  const resetButton = document.querySelector(".reset");
  const zooms = new Map(); // name of an axis -> [lower, upper], while it is zoomed
  const hidden = new Set(); // chart and name of each line that was clicked away
  let charts = [];

  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // 2e-5 rather than 0.00002.
  function formatted(value) {
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e6)) {
      const [mantissa, exponent] = value.toExponential(3).split("e");
      return `${Number(mantissa)}e${Number(exponent)}`;
    }
    return String(Number(value.toPrecision(4)));
  }

  // As many decimals as tell the values of an axis apart: 1.00041 where all are near 1.
  function precise(value, axis) {
    if (value === 0 || Math.abs(value) < 1e-3) return formatted(value);
    const decimals = 3 - Math.floor(Math.log10(axis.max - axis.min));
    return String(Number(value.toFixed(Math.min(9, Math.max(0, decimals)))));
  }

  // As many decimals as tell ticks apart. uPlot leaves some ticks of a logarithmic axis out.
  function tickLabels(ticks, increment, log) {
    const largest = Math.max(...ticks.map(Math.abs));
    if (log || largest < 1e-3 || largest >= 1e6)
      return ticks.map((tick) => (tick === null ? "" : formatted(tick)));
    const decimals = (String(increment).split(".")[1] ?? "").length;
    return ticks.map((tick) => (tick === 0 ? "0" : tick.toFixed(decimals)));
  }

  // Draws those that are in view, and says that they are dashed where there are any.
  function drawThresholds(u, { box, spec }) {
    const { min, max } = u.scales.y;
    const bounds = spec.thresholds.filter((bound) => bound > min && bound < max);
    const said = box.parentElement.querySelector(".dashed");
    if (said) said.hidden = bounds.length === 0;
    const { left, width } = u.bbox;
    const context = u.ctx;
    context.save();
    context.strokeStyle = context.fillStyle = color("--warn");
    context.lineWidth = 1.5 * devicePixelRatio;
    context.font = `${11 * devicePixelRatio}px ui-monospace, monospace`;
    context.textAlign = "right";
    context.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const bound of bounds) {
      const height = u.valToPos(bound, "y", true);
      context.beginPath();
      context.moveTo(left, height);
      context.lineTo(left + width, height);
      context.stroke();
      context.fillText(formatted(Number(bound.toPrecision(2))), left + width - 4, height - 4 * devicePixelRatio);
    }
    context.restore();
  }

  // The legend holds the name of each line and its value under the cursor, else the last in view.
  function makeLegend(box, spec) {
    const place = document.createElement("span");
    box.replaceChildren(place);
    const entries = [];
    let raw = [];
    spec.series.forEach((line, i) => {
      if (line.faint) {
        raw.push(i + 1);
        return;
      }
      const button = document.createElement("button");
      const value = document.createElement("b");
      button.type = "button";
      button.className = `s${line.color}`;
      button.setAttribute("aria-pressed", "true");
      button.append(line.name + " ", value);
      box.append(button);
      entries.push({ button, value, lines: [i + 1, ...raw] });
      raw = [];
    });
    return { place, entries };
  }

  function showValues(u, chart) {
    const { spec, legend } = chart;
    const idle = u.cursor.idx === null || u.cursor.idx === undefined;
    const last = u.series[0].idxs?.[1] ?? u.data[0].length - 1; // of those in view
    const at = u.data[0][idle ? last : u.cursor.idx];
    legend.place.textContent = `${spec.x} ${at}`;
    for (const { value, lines } of legend.entries) {
      const words = lines.map((line) => {
        const known = (i) => u.data[line][i] !== undefined;
        const index = idle ? u.data[line].findLastIndex((_, i) => i <= last && known(i)) : u.cursor.idxs[line];
        const y = index === null || index < 0 ? undefined : u.data[line][index];
        if (y === undefined) return "";
        const where = u.data[0][index] === at ? "" : ` at ${u.data[0][index]}`;
        return (y === null ? "not finite" : precise(y, u.scales.y)) + where;
      });
      value.textContent = words.length > 1 ? `${words[0]} (${words[1]})` : words[0];
    }
  }

  function wholeRange(axis) {
    const same = charts.filter((chart) => chart.spec.x === axis);
    const ends = same.map(({ data }) => [data[0][0], data[0][data[0].length - 1]]);
    const lower = Math.min(...ends.map((end) => end[0]));
    const upper = Math.max(...ends.map((end) => end[1]));
    return lower === upper ? [lower - 1, upper + 1] : [lower, upper];
  }

  function zoomTo(axis, range) {
    if (range) zooms.set(axis, range);
    else zooms.delete(axis);
    const [min, max] = range ?? wholeRange(axis);
    for (const { spec, u } of charts) if (u && spec.x === axis) u.setScale("x", { min, max });
    resetButton.hidden = zooms.size === 0;
  }

  function lineOptions(line, values) {
    const count = values.filter((y) => y !== undefined && y !== null).length;
    return {
      label: line.name,
      stroke: color(`--s${line.color}`),
      width: line.faint ? 1 : 2,
      alpha: line.faint ? 0.4 : 1,
      points: { show: !line.faint && count <= MOST_DOTS, size: 6, fill: color(`--s${line.color}`) },
    };
  }

  function options(chart, width, height) {
    const { spec, data } = chart;
    const axis = {
      stroke: color("--soft"),
      font: LABEL_FONT,
      grid: { stroke: color("--rule"), width: 1 },
      ticks: { show: false },
      gap: 6,
    };
    return {
      width,
      height,
      padding: [10, 20, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: (u, lower, upper) => [lower, upper] },
        y: { distr: spec.log ? 3 : 1 },
      },
      axes: [
        { ...axis, size: 26, space: 90, incrs: WHOLE, values: (u, ticks) => ticks.map(String), grid: { show: false } },
        {
          ...axis,
          values: (u, ticks, place, space, increment) => tickLabels(ticks, increment, spec.log),
          size: (u, labels) => 14 + LABEL_WIDTH * Math.max(2, ...(labels ?? []).map((label) => label.length)),
        },
      ],
      series: [{}, ...spec.series.map((line, i) => lineOptions(line, data[i + 1]))],
      cursor: {
        y: false,
        drag: { x: true, y: false, dist: 6, setScale: false },
        points: { size: 8 },
        sync: {
          key: spec.x,
          scales: ["x", null],
          filters: { pub: (type) => type === "mousemove" || type === "mouseleave", sub: () => true },
        },
        bind: {
          dblclick: () => () => {
            zoomTo(spec.x, null);
            return null;
          },
        },
      },
      hooks: {
        setSelect: [
          (u) => {
            const { left, width } = u.select;
            if (width > 0) zoomTo(spec.x, [u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
            u.setSelect({ left: 0, width: 0 }, false);
          },
        ],
        setCursor: [(u) => showValues(u, chart)],
        draw: [
          (u) => {
            drawThresholds(u, chart);
            showValues(u, chart);
          },
        ],
      },
    };
  }

  function build(chart, printing) {
    chart.u?.destroy();
    chart.u = null;
    const width = printing ? PRINTED_WIDTH : chart.box.clientWidth;
    const u = new uPlot(options(chart, width, chart.box.clientHeight), chart.data, chart.box);
    const [min, max] = zooms.get(chart.spec.x) ?? wholeRange(chart.spec.x);
    u.setScale("x", { min, max });
    chart.u = u;
    for (const { button, lines } of chart.legend.entries) {
      const show = button.getAttribute("aria-pressed") === "true";
      for (const line of lines) u.setSeries(line, { show });
    }
  }

  function buildAll(printing = false) {
    for (const chart of charts) build(chart, printing);
  }

  function makeChart(box) {
    const spec = JSON.parse(box.querySelector("script").textContent);
    const legend = makeLegend(box.parentElement.querySelector(".legend"), spec);
    const chart = { box, spec, legend, data: uPlot.join(spec.tables), u: null };
    for (const { button, lines } of legend.entries) {
      const name = `${box.ariaLabel}: ${button.firstChild.data}`;
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      button.addEventListener("click", () => {
        const show = hidden.delete(name);
        if (!show) hidden.add(name);
        button.setAttribute("aria-pressed", String(show));
        for (const line of lines) chart.u.setSeries(line, { show });
      });
    }
    resized.observe(box);
    return chart;
  }

  // Draws the charts, again when parts of a live page were replaced; zoom and hidden lines stay.
  function drawPage() {
    const old = charts;
    const boxes = [...document.querySelectorAll(".plot[role=img]")];
    charts = boxes.map((box) => old.find((chart) => chart.box === box) ?? makeChart(box));
    for (const gone of old.filter((chart) => !charts.includes(chart))) {
      resized.unobserve(gone.box);
      gone.u.destroy();
    }
    buildAll();
  }

  const resized = new ResizeObserver((entries) => {
    if (root.classList.contains("print")) return;
    for (const { target } of entries) {
      const { u } = charts.find((chart) => chart.box === target);
      if (u.width !== target.clientWidth) u.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });
  root.classList.add("js");
  drawPage();
  document.addEventListener("renewed", drawPage);
  resetButton.addEventListener("click", () => {
    for (const axis of [...zooms.keys()]) zoomTo(axis, null);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => buildAll());
  addEventListener("beforeprint", () => {
    root.classList.add("print");
    buildAll(true);
  });
  addEventListener("afterprint", () => {
    root.classList.remove("print");
    buildAll();
  });
})();
