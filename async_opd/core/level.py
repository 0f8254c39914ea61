"""How grave a message of the run is."""

from __future__ import annotations

from typing import Literal

Level = Literal["info", "warning", "error"]
