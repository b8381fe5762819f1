"""Robust errors on the Gaussian mixture over d, decay, k and budget: the curves that docs/theory.md lets one turn.

python benchmarks/curves.py --threads 1 --out results/theory-curves-cpu.json
"""

from __future__ import annotations

import math
import sys

import numpy as np

from ell0.results import CLIPPED, Results
from ell0.theory import Mixture, robust_errors
from ell0.theory.bounds import finite_lower_bound
from measure import Run, add_counts, main, options

DECAYS = (0.0, 0.25, 0.5, 0.75, 1.0)
STEPS = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100)


def benchmark(run: Run, *, most: int = 10_000, rows: int = 1000) -> Results:
    """Truncated with Bayes weights at each k of a grid, clipped at the best clip, and the lower bound.

    The clip of each budget is chosen on other rows than those it is measured on.
    most: the largest number of inputs, of 100, 784 and 10,000.  rows: of Monte Carlo.
    """
    results, rng = run.results("theory-curves"), np.random.default_rng(run.seed)
    for d in (d for d in (100, 784, 10_000) if d <= most):
        budgets = [m for m in STEPS if m <= math.isqrt(d)]
        ks = sorted({*np.geomspace(1, (d - 1) // 2, 10).round().astype(int).tolist()})
        for decay in DECAYS:
            mixture = Mixture.power_law(d, decay)
            scale, setting = np.abs(mixture.mu), {"d": d, "decay": decay, "unit": "error"}
            clips = np.geomspace(scale.min() / 10, scale.max() * 3, 16).tolist()
            pilot = robust_errors(mixture, budgets, clips=clips, rows=rows, rng=rng).clipped
            best = {m: min(clips, key=lambda clip: pilot[clip, m]) for m in budgets}
            found = robust_errors(mixture, budgets, ks=ks, clips=sorted({*best.values()}), rows=rows, rng=rng)
            bounds = finite_lower_bound(mixture, budgets)
            results.add(mixture.bayes_error, what="bayes_error", **setting)
            for m, bound in zip(budgets, bounds, strict=True):
                results.add(float(bound), what="lower_bound", **setting, budget=m)
                results.add(found.clipped[best[m], m], what="robust_error", classifier=CLIPPED, **setting, budget=m)
                for k in (k for k in ks if k >= m):  # with k < m every row is lost
                    results.add(
                        found.truncated[k, m], what="robust_error", classifier="truncated", **setting, k=k, budget=m
                    )
            run.say(f"d = {d:,}, decay {decay:g}")
    return results


if __name__ == "__main__":
    parser = options(__file__, __doc__)
    add_counts(parser, most="largest number of inputs (default: 10,000)", rows="rows of Monte Carlo (default: 1,000)")
    sys.exit(main(benchmark, parser))
