"""Fits the constants of areal_core/simulate/published.py to the runs marked as calibrated there.

Four constants, four numbers: hours of two runs, synchronous and asynchronous. Prints the constants, to be copied into
`CONSTANTS`, and the table of all published numbers that follows from them. Takes about two minutes.

    python bench/calibrate_simulator.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from math import log

import numpy as np
import numpy.typing as npt

from areal_core.simulate.published import CONSTANTS, RUNS, Constants, compare_hours, hours

Floats = npt.NDArray[np.float64]


def main() -> None:
    """Fit, and print."""
    fitted = _constants(gauss_newton(_residuals, np.log(astuple(CONSTANTS))))
    print(fitted)
    for row in compare_hours(fitted):
        print(f"{row.what:34}{row.published:8.1f}{row.simulated:8.1f}{100 * row.error:+6.1f} %  {row.kind}")


def gauss_newton(residuals: Callable[[Floats], Floats], start: Floats, rounds: int = 5) -> Floats:
    """Least squares by Gauss-Newton with finite differences wide enough for a noisy function."""
    point, value = start, residuals(start)
    for _ in range(rounds):
        jacobian = np.stack([(residuals(point + 0.05 * axis) - value) / 0.05 for axis in np.eye(point.size)], axis=1)
        step = np.clip(np.linalg.lstsq(jacobian, -value, rcond=None)[0], -0.5, 0.5)
        candidate = residuals(point + step)
        if not candidate @ candidate < value @ value:
            break
        point, value = point + step, candidate
        print("relative errors:", np.round(value, 4), flush=True)
    return point


def _constants(logarithms: Floats) -> Constants:
    step_overhead_s, mean_tokens, sequence_s, code_steps = np.exp(logarithms).tolist()
    return Constants(step_overhead_s, mean_tokens, sequence_s, code_steps)


def _residuals(logarithms: Floats) -> Floats:
    constants = _constants(logarithms)
    found = []
    for run in RUNS.values():
        if run.calibrated:
            found.append(log(hours(run, constants, synchronous=True) / run.synchronous_h))
            found.append(log(hours(run, constants, synchronous=False) / run.asynchronous_h))
    return np.asarray(found)


if __name__ == "__main__":
    main()
