"""``python -m async_opd``: the command ``async_opd``, by the interpreter that is named."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the working directory, which python -m puts there
    from async_opd.cli import main

    sys.exit(main())
