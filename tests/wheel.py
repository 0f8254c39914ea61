"""The wheel, built and installed alone: other libraries are those of the running interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def install_wheel(folder: Path) -> Path:
    """Builds the wheel and installs it into a new environment below ``folder``; returns its bin.

    A ``.pth`` file lends it the libraries of the running interpreter behind its own; that one's
    editable install of async_opd has a ``.pth`` file, which is not read from there.
    """
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (wheel,) = (folder / "dist").glob("*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run(
        [*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True, timeout=300
    )
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(where, check=True, capture_output=True, text=True, timeout=60)
    (Path(site.stdout.strip()) / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


def environment(bin_folder: Path) -> dict[str, str]:
    """The variables of a new user's shell: the checkout is on no path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
