// Draw the answers: exact bars in grey, noisy ones with their intervals, and a band where noise alone lies. The numbers come
// with the page, and stand in its table too. Drawn 440 wide, so that on a screen of 390 pixels text is still 12 pixels high.
"use strict";

(() => {
  const [left, right, top, row, bar, label, foot, width] = [28, 28, 8, 68, 16, 20, 26, 440];
  const numbers = (text) => text.split(",").map(Number);

  function add(parent, element, attributes, text) {
    const made = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", element));
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // An axis over all values and zero, with about four round steps. It ends at a round number, and begins where it must.
  function axisAround(values) {
    const [low, high] = [Math.floor(Math.min(0, ...values)), Math.max(1, ...values)];
    const rough = (high - low) / 4;
    const magnitude = 10 ** Math.max(0, Math.floor(Math.log10(rough)));
    const step = [1, 2, 5, 10].map((factor) => factor * magnitude).find((each) => each >= rough);
    const end = Math.ceil(high / step) * step;
    const ticks = [];
    for (let tick = Math.ceil(low / step) * step; tick <= end; tick += step) ticks.push(tick);
    return { ticks, x: (value) => left + ((value - low) / (end - low)) * (width - left - right) };
  }

  function drawChart(chart) {
    const [labels, exact, answer] = [chart.dataset.labels.split("|"), numbers(chart.dataset.exact), numbers(chart.dataset.answer)];
    const halfWidth = Number(chart.dataset.halfWidth);
    const { ticks, x } = axisAround([...exact, ...[0, ...answer].flatMap((value) => [value - halfWidth, value + halfWidth])]);
    const bottom = top + row * labels.length;
    chart.setAttribute("viewBox", `0 0 ${width} ${bottom + foot}`);
    add(chart, "rect", { x: x(-halfWidth), y: top, width: x(halfWidth) - x(-halfWidth), height: bottom - top, class: "band" });
    for (const tick of ticks) {
      add(chart, "line", { x1: x(tick), x2: x(tick), y1: top, y2: bottom, class: tick === 0 ? "zero" : "grid" });
      const text = tick.toLocaleString("en").replace("-", "−");
      add(chart, "text", { x: x(tick), y: bottom + 18, "text-anchor": "middle" }, text);
    }
    // A fresh bar grows out of the line at zero.
    const draw = (y, value, kind) => add(chart, "rect", {
      x: Math.min(x(value), x(0)), y, width: Math.abs(x(value) - x(0)), height: bar, class: kind, "transform-origin": `${x(0)} 0`,
    });
    labels.forEach((name, place) => {
      const y = top + place * row + label;
      add(chart, "text", { x: left, y: y - 5, class: "name" }, name);
      draw(y, exact[place], "exact");
      draw(y + bar + 2, answer[place], "noisy");
      const [from, to, middle] = [x(answer[place] - halfWidth), x(answer[place] + halfWidth), y + bar + 2 + bar / 2];
      add(chart, "path", { d: `M${from} ${middle}H${to}M${from} ${middle - 6}v12M${to} ${middle - 6}v12`, class: "interval" });
    });
  }

  // An answer without words, for a row of them.
  function drawSmall(chart) {
    const [answer, halfWidth] = [numbers(chart.dataset.answer), Number(chart.dataset.halfWidth)];
    const low = Math.min(-halfWidth, ...answer.map((value) => value - halfWidth));
    const high = Math.max(halfWidth, ...answer.map((value) => Math.abs(value) + halfWidth));
    const x = (value) => ((value - low) * 100) / (high - low);
    add(chart, "rect", { x: x(-halfWidth), width: x(halfWidth) - x(-halfWidth), height: 52, class: "band" });
    answer.forEach((value, place) => {
      const size = { x: Math.min(x(0), x(value)), width: Math.abs(x(value) - x(0)) };
      add(chart, "rect", { ...size, y: 4 + 12 * place, height: 8, class: "noisy" });
    });
    add(chart, "line", { x1: x(0), x2: x(0), y2: 52, class: "zero" });
  }

  document.querySelectorAll(".chart").forEach(drawChart);
  document.querySelectorAll(".small-chart").forEach(drawSmall);
})();
