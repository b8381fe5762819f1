// The table of all results: a head sorts by its column, numbers by value; the box keeps the lines that have all its words.
const table = document.getElementById("field");
if (table) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const filter = document.getElementById("field-filter"), count = document.getElementById("field-count");
  const value = (row, i) => {
    const text = row.cells[i].textContent.trim(), found = text.replace(/,(?=\d{3})/g, "").match(/-?\d+(\.\d+)?/);
    return text === "" ? null : heads[i].dataset.number && found ? Number(found[0]) : text.toLowerCase();
  };
  heads.forEach((head, i) => {
    if (/^(clean|attacked|proven|n)$/.test(head.textContent)) head.dataset.number = "1";
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
      const keyed = [...body.rows].map((row) => [value(row, i), row]);
      keyed.sort(([a], [b]) => (a === null ? (b === null ? 0 : 1) : b === null ? -1 : (down ? -1 : 1) * compare(a, b)));
      body.append(...keyed.map(([, row]) => row));
    });
  });
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of body.rows) {
      const said = row.textContent.toLowerCase() + (row.cells[7].textContent ? " proven" : "");
      row.hidden = !words.every((word) => said.includes(word));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${body.rows.length} lines`;
  };
  filter.addEventListener("input", show);
  show();
}
