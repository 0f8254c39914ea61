"""TensorBoard: event files in ``run_dir/tensorboard``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_opd.files.safe_open import make_folder
from async_opd.observability.sinks import Summary


class TensorBoard:
    """One event file a process; a resumed run adds another one, in the same folder."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        make_folder(run_dir / "tensorboard")  # raises if it is a link
        self._file: Any = EventFileWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with all values."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary as Values

        values = [Values.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        event = Event(wall_time=time.time(), step=step, summary=Values(value=values))
        self._file.add_event(event)

    def end(self, summary: Summary) -> None:
        """Writes what is left."""
        self._file.close()
