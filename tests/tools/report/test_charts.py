"""The numbers in charts."""

from __future__ import annotations

import json

from async_opd.tools.report.charts import Line, lines


def test_values_in_thousands_have_no_exponent_on_their_axis() -> None:
    """d3 writes an exponent where a value has more digits than the format has."""
    chart = lines("rate", "Rate", "", [Line("rate", [(1, 100.0), (2, 12_500.0)])], y="samples/s")
    assert chart is not None
    assert '"format": ",.5~g"' in json.dumps(chart.spec)
