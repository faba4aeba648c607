"""benchmarks/svg_plot.py: that lines lie where their numbers say."""

from xml.etree import ElementTree

import pytest

from benchmarks.svg_plot import HEIGHT, WIDTH, Chart, svg, ticks

SVG = "{http://www.w3.org/2000/svg}"


def lines(charts, columns=2):
    """The places of every line, read from the text."""
    root = ElementTree.fromstring(svg(charts, columns))
    return [[tuple(map(float, place.split(","))) for place in line.get("points").split()] for line in root.iter(f"{SVG}polyline")]


@pytest.mark.parametrize("low, high", [(0, 1), (0, 123456), (-0.004, 0.0031), (2.1, 5.6), (7, 7), (0, 0), (-3, -3)])
def test_ticks_reach_around(low, high):
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8
    steps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert steps == pytest.approx([steps[0]] * len(steps)) and steps[0] > 0


def test_equal_factors_are_equally_far_apart():
    (places,) = lines([Chart("a", "x", "y", {"y": [(4096.0 * 2**k, 10.0 * k) for k in range(5)]}, log_x=True, from_zero=True)])
    across, down = ([b[axis] - a[axis] for a, b in zip(places, places[1:], strict=False)] for axis in (0, 1))
    assert across == pytest.approx([across[0]] * 4, abs=0.11) and across[0] > 50
    assert down == pytest.approx([down[0]] * 4, abs=0.11) and down[0] < -20


def test_lines_stay_inside_their_charts():
    waves = {name: [(float(step), sign * step % 7 - 3.0) for step in range(40)] for name, sign in (("a", 1), ("b", -1))}
    found = lines([Chart(f"{index} < & >", "step", "loss", waves) for index in range(3)])
    assert len(found) == 6
    for index, places in enumerate(found):
        left, top = index // 2 % 2 * WIDTH, index // 4 * HEIGHT
        assert len(places) == 40
        assert all(left < x < left + WIDTH and top < y < top + HEIGHT for x, y in places)


def test_names_marks_and_missing_points():
    text = svg(
        [Chart("none", "x", "y", {"y": []}, log_x=True, marks=True), Chart("one", "x", "y", {"y": [(2.0, 5.0)]}, marks=True)]
    )
    root = ElementTree.fromstring(text)
    assert len(list(root.iter(f"{SVG}circle"))) == 1
    written = [element.text for element in root.iter(f"{SVG}text")]
    assert {"none", "one", "x", "y"} <= set(written)
    two = svg([Chart("two", "x", "y", {"first": [(0.0, 1.0)], "second": [(0.0, 2.0)]})])
    assert {"first", "second"} <= {element.text for element in ElementTree.fromstring(two).iter(f"{SVG}text")}
