"""The curves of the theory page: results/theory-curves-cpu.json as JSON for docs/site/curves.js, with its sliders."""

from __future__ import annotations

import json
from typing import Any

from tables import clean_results

from ell0.results import CLIPPED, Results


def curves(results: Results) -> dict[str, Any]:
    """Robust errors over the budgets, by number of inputs and decay; 1 where k is less than the budget."""
    ds, decays = (sorted({row[key] for row in results.rows}) for key in ("d", "decay"))
    found = {}
    for d, decay in ((d, decay) for d in ds for decay in decays):
        values: dict[tuple[str, Any, Any], float] = {
            (row.get("classifier", row.what), row.get("k"), row.get("budget")): round(row.value, 4)
            for row in results.select(d=d, decay=decay)
        }
        ms, ks = (sorted({int(key[i]) for key in values if key[i] is not None}) for i in (2, 1))
        found[f"{d} {decay:g}"] = {
            "m": ms,
            "k": ks,
            "bayes": values["bayes_error", None, None],
            "truncated": [[values.get(("truncated", k, m), 1) for m in ms] for k in ks],
            "clipped": [values[CLIPPED, None, m] for m in ms],
            "bound": [values["lower_bound", None, m] for m in ms],
        }
    return {"d": ds, "decay": decays, "curves": found}


def figure(results: Results | None = None) -> str:
    """Sliders, an empty drawing and the numbers, which curves.js fills. Default: of the committed results."""
    results = results or clean_results("theory-curves-cpu")
    data = curves(results)
    ds, decays = len(data["d"]) - 1, len(data["decay"]) - 1
    # Where a slider starts, and its last place; curves.js sets that of k and m, which depends on d.
    starts = {"d": (min(1, ds), ds), "decay": (2, decays), "k": (5, 99), "m": (3, 99)}
    words = {"d": "inputs d", "decay": "decay of the signal", "k": "k removed on each side", "m": "changed inputs m"}
    sliders = "".join(
        f'<label>{words[name]} <input type="range" name="{name}" min="0" max="{most}" value="{start}">'
        f'<output data-for="{name}"></output></label>\n'
        for name, (start, most) in starts.items()
    )
    drawing = '<svg viewBox="0 0 600 315" role="img" aria-label="Robust error over the number of changed inputs"></svg>'
    table = "<table><thead><tr><th>classifier</th><th>robust error</th></tr></thead><tbody></tbody></table>"
    source = f"<p>Measured on {results.device} by <code>{results.command}</code>, commit {results.commit}.</p>"
    text = json.dumps(data, separators=(",", ":"))
    script = f'<script type="application/json" id="curves-data">{text}</script>'
    return f'<div id="curves">\n{sliders}{drawing}\n{table}\n{source}\n</div>\n{script}\n'
