"""The section ``report``: what ``async_opd report`` needs to know besides the run directory."""

from __future__ import annotations

from pydantic import Field

from async_opd.config.sections.section import Section


class ReportConfig(Section):
    """Settings of ``async_opd report``; a run does not read them. See docs/report.md."""

    gpu_hour_price: float | None = Field(default=None, ge=0)
    """Price of one GPU for one hour, in any currency. The report then says what a million trained
    tokens cost. By default it says the GPU hours only."""
