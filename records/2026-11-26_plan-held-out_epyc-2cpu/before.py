"""Errors of the planner before: its fit (tools/fit_plan.py of 0aa93c15) without each submitter and each round."""

import numpy as np

import fit_plan

rows = fit_plan.read()
for kind, position in (("submitter", 1), ("round", 0)):
    found = np.zeros(len(rows))
    groups = [row.name.split()[position] for row in rows]
    for group in sorted(set(groups)):
        inside = np.array([name == group for name in groups])
        others = [row for row, left in zip(rows, inside, strict=True) if not left]
        left_out = [row for row, left in zip(rows, inside, strict=True) if left]
        found[inside] = fit_plan.errors(left_out, fit_plan.fit(others), samples_known=False)
    sizes = np.abs(np.expm1(found))
    shares = {
        "mean": sizes.mean(),
        "median": np.median(sizes),
        "within_15": (sizes <= 0.15).mean(),
        "worst": sizes.max(),
    }
    rounded = {name: round(float(value), 4) for name, value in shares.items()}
    print(f"without the row's {kind}: {rounded}", flush=True)
