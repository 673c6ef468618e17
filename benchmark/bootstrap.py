"""Medians of measurements, and how far to trust them.

The standard error is that of a bootstrap over boots, then over the runs of each boot:
runs of one boot share its memory layout and its compiled kernels and are not
independent.
"""

import random
import statistics

DRAWS = 2000


def by_boot(measurements):
    """(side, boot, value), ... -> side -> for each boot its values."""
    samples = {}
    for side, boot, value in measurements:
        samples.setdefault(side, {}).setdefault(boot, []).append(value)
    return {side: list(boots.values()) for side, boots in samples.items()}


def median(boots):
    return statistics.median(value for boot in boots for value in boot)


def _resample(rng, boots):
    picked = rng.choices(boots, k=len(boots))
    return [rng.choices(boot, k=len(boot)) for boot in picked]


def median_with_error(boots):
    rng = random.Random(0)
    draws = [median(_resample(rng, boots)) for _ in range(DRAWS)]
    return median(boots), statistics.stdev(draws)


def ratio_with_error(samples, side, reference):
    """Median of ``reference`` over that of ``side``, and its standard error.

    Of times, that is how many times as fast ``side`` is. Against itself: 1, no error.
    """
    if side == reference:
        return 1.0, 0.0
    rng = random.Random(0)
    a, b = samples[reference], samples[side]
    draws = [
        median(_resample(rng, a)) / median(_resample(rng, b)) for _ in range(DRAWS)
    ]
    return median(a) / median(b), statistics.stdev(draws)
