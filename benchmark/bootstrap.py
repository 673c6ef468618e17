"""Medians of measurements, and how far to trust them.

The standard error is that of a bootstrap over boots, then over the runs of each boot or
over rounds: runs of one boot share its memory layout and its compiled kernels and are not
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


def paired_ratio_with_error(rounds, side, reference):
    """How many times as fast ``side`` is as ``reference``, and its standard error.

    ``rounds``: for each, side -> boot -> time. The ratio is the median over rounds of
    the reference's median over that of ``side``, so what changes from round to round
    and falls on both cancels. Against itself: 1, no error.
    """
    if side == reference:
        return 1.0, 0.0
    rng = random.Random(0)
    boots = {name: sorted(rounds[0][name]) for name in (side, reference)}

    def ratio(drawn_rounds, drawn_boots):
        def middle(round_, name):
            return statistics.median(round_[name][boot] for boot in drawn_boots[name])

        return statistics.median(
            middle(round_, reference) / middle(round_, side) for round_ in drawn_rounds
        )

    draws = [
        ratio(
            rng.choices(rounds, k=len(rounds)),
            {name: rng.choices(all_, k=len(all_)) for name, all_ in boots.items()},
        )
        for _ in range(DRAWS)
    ]
    return ratio(rounds, boots), statistics.stdev(draws)
