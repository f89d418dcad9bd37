"""A line fitted to what is measured as it goes on: old points count less than new ones."""

from __future__ import annotations


class FadingLine:
    """Least squares of y = intercept + slope * x over weighted points, kept as five sums."""

    def __init__(self, remembered: float) -> None:
        """remembered: weight of all earlier points, with every one that is observed."""
        self._remembered = remembered
        self._count = self._x = self._xx = self._y = self._xy = 0.0

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

    def fit(self, root: float, weight: float) -> tuple[float, float]:
        """Return intercept and slope, which is not negative.

        root: x of a point of y = 0 that never fades, of this weight. It settles both where all
        points have one x.
        """
        count, x = self._count + weight, self._x + weight * root
        xx = self._xx + weight * root * root
        slope = max(0.0, (count * self._xy - x * self._y) / (count * xx - x * x))
        return (self._y - slope * x) / count, slope
