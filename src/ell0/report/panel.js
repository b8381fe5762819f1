// The panel: a board of pixels to change, what each classifier answers, and replays of recorded attacks.

{
  const STEP = 400; // milliseconds between two pixels of a replay
  const root = document.querySelector(".panel");
  const data = JSON.parse(root.querySelector("script").textContent);
  const [channels, height, width] = data.shape;
  const [low, high, any] = data.values;
  const pixels = height * width, size = channels * pixels;
  const whole = floats(data.images), count = whole.length / size;
  const units = data.unit === "pixel" || channels === 1 ? "pixel" : "input";
  const networks = data.classifiers.map((one) => one.network && network(one.network));
  const live = networks.some(Boolean);
  const part = (name) => root.querySelector(`[data-part="${name}"]`);
  const [board, status, answers, link, picture] = ["board", "status", "answers", "link", "picture"].map(part);

  let image = 0, clean = whole, x = whole, focused = 0, timer = 0;

  const number = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(3))) : String(value));
  const several = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  const named = (label) => data.classes[label] ?? String(label);

  function make(tag, parent, attributes = {}, words = "") {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = words;
    parent.append(element);
    return element;
  }

  // How many units differ from the clean image, as the attacker's budget counts them.
  function distance(a, b) {
    const changed = new Set();
    for (let i = 0; i < size; i++) if (a[i] !== b[i]) changed.add(data.unit === "pixel" ? i % pixels : i);
    return changed.size;
  }

  // As torch: the first of the largest, and NaN is larger than all.
  const answerOf = (logits) =>
    logits.reduce((best, value, i) => {
      const beats = value > logits[best] || (Number.isNaN(value) && !Number.isNaN(logits[best]));
      return beats ? i : best;
    }, 0);
  const marginOf = (logits, label) => logits[label] - Math.max(...logits.filter((_, i) => i !== label));

  // The board: one cell for each pixel, of which one can be reached by the tabulator, the others by arrows.
  board.style.setProperty("--columns", width);
  const cells = [];
  for (let row = 0; row < height; row++) {
    const line = make("div", board, { role: "row" });
    for (let column = 0; column < width; column++) cells.push(make("div", line, { role: "gridcell", tabindex: -1 }));
  }

  function focus(pixel) {
    cells[focused].tabIndex = -1;
    focused = pixel;
    cells[focused].tabIndex = 0;
  }

  const shade = (value) => Math.round((255 * (Math.min(Math.max(value, low), high) - low)) / (high - low));

  function valueWords(value) {
    if (value < low || value > high) return `value ${number(value)}`;
    return value === low ? "black" : value === high ? "white" : `${Math.round((100 * shade(value)) / 255)} % white`;
  }

  function drawPixel(pixel) {
    const places = Array.from({ length: channels }, (_, c) => c * pixels + pixel);
    const colours = places.map((i) => shade(x[i]));
    const changed = places.some((i) => x[i] !== clean[i]), beyond = places.some((i) => x[i] < low || x[i] > high);
    const cell = cells[pixel];
    cell.style.backgroundColor = `rgb(${channels === 3 ? colours : [colours[0], colours[0], colours[0]]})`;
    cell.className = `${changed ? "changed-cell" : ""} ${beyond ? "beyond" : ""}`;
    const where = `row ${Math.floor(pixel / width) + 1}, column ${(pixel % width) + 1}`;
    const words = [...places.map((i) => valueWords(x[i])), ...(changed ? ["changed"] : [])];
    cell.setAttribute("aria-label", `${where}: ${words.join(", ")}`);
  }

  // What each classifier says; the margin as a bar, whose half is the margin of the clean image.
  const cards = data.classifiers.map((one, index) => {
    const card = make("li", answers, { class: "answer" });
    make("b", card, {}, one.name);
    const says = make("span", card, { class: "says" });
    const bar = make("span", make("span", card, { class: "margin", "aria-hidden": "true" }), { class: "bar" });
    const [margin, proof] = [make("span", card, { class: "count" }), make("span", card, { class: "proof" })];
    const button = make("button", card, { type: "button" });
    button.addEventListener("click", () => {
      board.scrollIntoView({ block: "nearest" });
      replay(one.attacks[image]);
    });
    return { says, bar, margin, proof, button, compute: networks[index] };
  });

  // The answer of a classifier at x, null where it is not known: without a network only the recorded images are.
  function answer(one, card) {
    const label = data.labels[image];
    if (card.compute) {
      const logits = card.compute(x), full = Math.abs(marginOf(card.compute(clean), label));
      return { label: answerOf(logits), margin: marginOf(logits, label), full, logits };
    }
    const attacked = clean.slice();
    for (const [i, value] of one.attacks[image]) attacked[i] = value;
    if (distance(x, clean) === 0) return { label: one.said[image] };
    return distance(x, attacked) === 0 ? { label: one.says[image] } : null;
  }

  function proofWords(one, changed) {
    const radius = one.radius ? one.radius[image] : null;
    if (radius === null) return `${changed} changed, no proof`;
    if (radius < 0) return "wrong when clean, so there is nothing to prove";
    if (radius === 0) return `${changed} changed, none proven`;
    const words = changed > radius ? "beyond the proof" : "this answer cannot change";
    return `${changed} changed, ${radius} proven: ${words}`;
  }

  function draw() {
    const label = data.labels[image], changed = distance(x, clean), wrong = [], unknown = [];
    cells.forEach((_, pixel) => drawPixel(pixel));
    data.classifiers.forEach((one, index) => {
      const card = cards[index], found = answer(one, card), right = found && found.label === label;
      if (!found) unknown.push(one.name);
      else if (!right) wrong.push(one.name);
      card.says.textContent = found ? `says ${named(found.label)} ${right ? "✓" : "✗"}` : "not computed here";
      card.says.className = `says ${found ? (right ? "held" : "fooled") : "none"}`;
      card.says.dataset.logits = found && found.logits ? Array.from(found.logits, String).join(" ") : "";
      const known = found && found.margin !== undefined;
      card.bar.parentElement.hidden = card.margin.hidden = !known;
      if (known) {
        const length = Math.min(50, (50 * Math.abs(found.margin)) / (found.full || 1)) || 0;
        card.bar.style.width = `${length}%`;
        card.bar.style.left = `${found.margin < 0 ? 50 - length : 50}%`;
        card.bar.className = `bar ${found.margin < 0 ? "negative" : "positive"}`;
        card.margin.textContent = `margin ${number(found.margin)}`;
      }
      card.proof.textContent = proofWords(one, changed);
      const attack = one.attacks[image], broken = one.says[image] !== label;
      const words = `Replay its attack: ${several(new Set(attack.map(([i]) => i % pixels)).size, "pixel")}`;
      const effect = broken ? "breaks it" : "it stands";
      const none = one.said[image] === label ? "No attack on it was recorded" : "Wrong without an attack";
      card.button.textContent = attack.length ? `${words}, ${effect}` : none;
      card.button.setAttribute("aria-label", `${card.button.textContent} (${one.name})`);
      card.button.disabled = attack.length === 0;
    });
    picture.textContent = `Image ${image + 1} of ${count}: ${named(label)}`;
    const verdict = wrong.length ? `Wrong: ${wrong.join("; ")}.` : unknown.length ? "" : "Every answer is right.";
    const left = unknown.length ? `Not computed here: ${unknown.join("; ")}.` : "";
    status.textContent = [`${several(changed, units)} changed.`, verdict, left].filter(Boolean).join(" ");
    const changes = Array.from(x.keys()).filter((i) => x[i] !== clean[i]).map((i) => `,${i}:${x[i]}`);
    link.href = `#attack=${image}${changes.join("")}`;
  }

  function show(which, changes = []) {
    clearTimeout(timer);
    image = which;
    clean = whole.slice(image * size, (image + 1) * size);
    x = clean.slice();
    for (const [i, value] of changes) x[i] = value;
    draw();
  }

  // Black, white, any value, and back to the clean value; what changes nothing is left out.
  function cycle(pixel) {
    clearTimeout(timer);
    if (!live) return;
    const places = Array.from({ length: channels }, (_, c) => c * pixels + pixel);
    const steps = [null, low, high, any].filter((value) => value === null || places.some((i) => clean[i] !== value));
    const now = steps.findIndex((value) => places.every((i) => x[i] === (value ?? clean[i])));
    const next = now < 0 ? null : steps[(now + 1) % steps.length];
    for (const i of places) x[i] = next ?? clean[i];
    draw();
  }

  function replay(changes) {
    show(image);
    const order = [...new Set(changes.map(([i]) => i % pixels))];
    const step = () => {
      const pixel = order.shift();
      for (const [i, value] of changes) if (i % pixels === pixel) x[i] = value;
      draw();
      if (order.length) timer = setTimeout(step, STEP);
    };
    step();
  }

  // The state that the address carries, as `link` writes it.
  function restore() {
    const found = /^#attack=(\d+)((?:,\d+:[^,:]+)*)$/.exec(location.hash);
    if (!found || Number(found[1]) >= count) return false;
    const changes = found[2].split(",").slice(1).map((one) => one.split(":").map(Number));
    if (changes.some(([i, value]) => i >= size || Number.isNaN(value))) return false;
    show(Number(found[1]), changes);
    return true;
  }

  board.addEventListener("click", (event) => {
    const pixel = cells.indexOf(event.target);
    if (pixel < 0) return;
    focus(pixel);
    cells[pixel].focus();
    cycle(pixel);
  });
  board.addEventListener("keydown", (event) => {
    const row = Math.floor(focused / width), column = focused % width;
    const ways = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, width - 1],
    };
    if (event.key === "Enter" || event.key === " ") cycle(focused);
    else if (event.key in ways && !event.ctrlKey && !event.altKey && !event.metaKey) {
      const [down, along] = ways[event.key];
      focus(Math.min(Math.max(down, 0), height - 1) * width + Math.min(Math.max(along, 0), width - 1));
      cells[focused].focus();
    } else return;
    event.preventDefault();
  });
  part("reset").addEventListener("click", () => show(image));
  part("next").addEventListener("click", () => show((image + 1) % count));
  addEventListener("hashchange", restore);

  const section = root.closest("section");
  section.hidden = false;
  part(live ? "live" : "recorded").hidden = false;
  focus(Math.floor(pixels / 2 + width / 2));
  if (restore()) section.scrollIntoView();
  else show(0);
}
