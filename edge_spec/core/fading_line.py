"""A line fitted to what is measured as it goes on: old points count less than new ones."""

from __future__ import annotations

from math import sqrt


class FadingLine:
    """Least squares of y = intercept + slope * x over weighted points, kept as five sums."""

    def __init__(self, remembered: float) -> None:
        """remembered: weight of all earlier points, with every one that is observed."""
        self._remembered = remembered
        self._count = self._x = self._xx = self._y = self._xy = 0.0

    @property
    def spread(self) -> float:
        """The weighted sum of x^2: how much the points tell of the slope."""
        return self._xx

    def add(self, x: float, y: float, weight: float) -> None:
        """Adds a point of which something was known beforehand; no other counts less for it."""
        self._count += weight
        self._x += weight * x
        self._xx += weight * x * x
        self._y += weight * y
        self._xy += weight * x * y

    def observe(self, x: float, y: float) -> None:
        """Adds a point of weight 1, and lets all before it fade."""
        self._count *= self._remembered
        self._x *= self._remembered
        self._xx *= self._remembered
        self._y *= self._remembered
        self._xy *= self._remembered
        self.add(x, y, 1.0)

    def deviation(self, x: float, root: float, weight: float, at: float = 1.0) -> float:
        """Returns the standard deviation of at * intercept + x * slope, as `fit` finds them, where
        that of an observation is 1."""
        count, sum_x = self._count + weight, self._x + weight * root
        xx = self._xx + weight * root * root
        spread = count * xx - sum_x * sum_x
        variance = (at * at * xx - 2 * at * x * sum_x + x * x * count) / spread
        return sqrt(max(0.0, variance))

    def fit(self, root: float, weight: float, least_slope: float = 0.0) -> tuple[float, float]:
        """Returns intercept and slope, the latter not below `least_slope`.

        root: x of a point of y = 0 that never fades, of this weight. It settles both where all
        points have one x.
        """
        count, x = self._count + weight, self._x + weight * root
        xx = self._xx + weight * root * root
        slope = max(least_slope, (count * self._xy - x * self._y) / (count * xx - x * x))
        return (self._y - slope * x) / count, slope
