"""vLLM leaves alone what both ends of the weight sync's NCCL communicator have to have in common.

Every process gets the driver's ``NCCL_`` variables (``async_opd.cluster.network``). An engine
that changed one of ``AGREED`` by itself would hang or fail in the first broadcast, as with
``NCCL_CUMEM_ENABLE``, which earlier versions of vLLM set. Nothing is imported from vLLM here.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

from async_opd.checks.nodes import AGREED

VLLM = Path(str((find_spec("vllm") or ast).origin)).parent
WRITES = re.compile(r"""environ(?:\[|\.setdefault\(|\.update\(\{)\s*["'](NCCL_\w+|VLLM_NCCL\w+)""")


def function(path: str, name: str) -> str:
    """The source of a function of vLLM, without comments."""
    tree = ast.parse((VLLM / path).read_text())
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    return ast.unparse(found)


def test_vllm_writes_no_setting_of_nccl_that_both_ends_share() -> None:
    written = {
        (path.relative_to(VLLM).as_posix(), name)
        for path in VLLM.rglob("*.py")
        if b"NCCL_" in (text := path.read_bytes())
        for name in WRITES.findall(text.decode())
    }
    assert written, "vLLM's own writes are found by this pattern"
    assert {(path, name) for path, name in written if name in AGREED} == set()


def test_what_vllm_pins_for_its_own_communicators_is_lifted_from_ours() -> None:
    """vllm.utils.nccl.pin_nccl_env and unpinned_nccl_env (VLLM_BATCH_INVARIANT)."""
    pins = function("model_executor/determinism/batch_invariant.py", "override_envs_for_invariance")
    assert "pin_nccl_env(" in pins
    assert "with unpinned_nccl_env()" in function(
        "distributed/weight_transfer/nccl_common.py", "uid_init_process_group"
    )
