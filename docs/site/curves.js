// The theory page: sliders over precomputed robust errors, drawn as SVG. Curves run over the budget m.
const data = document.getElementById("curves-data");
if (data) {
  const all = JSON.parse(data.textContent), root = document.getElementById("curves");
  const input = (name) => root.querySelector(`[name=${name}]`), ink = "http://www.w3.org/2000/svg";
  const names = ["d", "decay", "k", "m"], percent = (value) => `${(100 * value).toFixed(1)} %`;
  const said = (name, value) => (root.querySelector(`[data-for=${name}]`).textContent = value);
  const make = (parent, kind, given, text) => {
    const made = document.createElementNS(ink, kind);
    for (const [key, value] of Object.entries(given)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  };
  const show = () => {
    const d = all.d[input("d").value], decay = all.decay[input("decay").value], one = all.curves[`${d} ${decay}`];
    input("k").max = one.k.length - 1;
    input("m").max = one.m.length - 1;
    const k = Number(input("k").value), m = Number(input("m").value);
    const best = one.m.map((_, i) => Math.min(...one.truncated.map((row) => row[i])));
    const curves = [
      ["truncated", `truncated, k = ${one.k[k].toLocaleString("en")}`, one.truncated[k]],
      ["best", "truncated, best k shown", best],
      ["clipped", "clipped", one.clipped],
      ["bayes", "Bayes, nothing removed", one.m.map(() => 1)],
      ["bound", "lower bound of any classifier", one.bound],
    ];
    said("d", d.toLocaleString("en"));
    said("decay", decay ? `i^-${decay}` : "even");
    said("k", one.k[k].toLocaleString("en"));
    said("m", one.m[m].toLocaleString("en"));
    const svg = root.querySelector("svg");
    svg.replaceChildren();
    const last = Math.log(one.m.at(-1)), x = (i) => 45 + (540 * Math.log(one.m[i])) / last, y = (value) => 15 + 250 * (1 - value);
    for (const level of [0, 0.25, 0.5, 0.75, 1]) {
      make(svg, "line", {x1: 45, x2: 585, y1: y(level), y2: y(level), class: "grid"});
      make(svg, "text", {x: 40, y: y(level) + 4, "text-anchor": "end"}, `${100 * level} %`);
    }
    one.m.forEach((value, i) => make(svg, "text", {x: x(i), y: 285, "text-anchor": "middle"}, value));
    make(svg, "text", {x: 315, y: 309, "text-anchor": "middle"}, "changed inputs m");
    make(svg, "line", {x1: x(m), x2: x(m), y1: y(0), y2: y(1), class: "at"});
    make(svg, "line", {x1: 45, x2: 585, y1: y(one.bayes), y2: y(one.bayes), class: "quiet"});
    for (const [name, , values] of curves) {
      make(svg, "polyline", {points: values.map((value, i) => `${x(i)},${y(value)}`).join(" "), class: name});
    }
    const rows = curves.map(([name, words, values]) => [name, words, percent(values[m])]);
    rows.push(["quiet", "the Bayes classifier without an attack", percent(one.bayes)]);
    root.querySelector("tbody").replaceChildren(...rows.map(([name, words, value]) => {
      const row = document.createElement("tr"), mark = row.insertCell(), line = document.createElementNS(ink, "svg");
      line.setAttribute("width", 30);
      line.setAttribute("height", 10);
      make(line, "line", {x1: 0, x2: 30, y1: 5, y2: 5, class: name});
      mark.append(line, ` ${words}`);
      row.insertCell().textContent = value;
      return row;
    }));
  };
  for (const name of names) input(name).addEventListener("input", show);
  show();
}
