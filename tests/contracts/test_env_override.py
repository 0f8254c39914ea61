"""``vllm.env_override``, which ``import vllm`` runs: it stays out of the trainer's process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.contracts import contract

pytestmark = pytest.mark.slow  # imports vllm

PATCHED = """
import os, sys
from torch._inductor import lowering, pattern_matcher

def patched():
    return [
        type(lowering.FALLBACK_ALLOW_LIST).__module__ == "vllm.env_override",
        pattern_matcher.fallback_node_due_to_unsupported_type.__module__ == "vllm.env_override",
        os.environ.get("TORCHINDUCTOR_COMPILE_THREADS") == "1",
    ]
"""
SENDER = """
from rollouter.transports.nccl import NcclSender
try:
    NcclSender.listen(object.__new__(NcclSender))
except (OSError, ValueError, RuntimeError, AssertionError):
    pass  # no NCCL library is here
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.utils.nccl import unpinned_nccl_env
assert patched() == [False, False, False], patched()
"""
VLLM = """
del sys.modules["vllm.env_override"]
import vllm.env_override
assert patched() == [True, True, True], patched()
"""


def test_the_sender_of_weights_leaves_inductor_as_it_is_and_vllm_would_not() -> None:
    environment = ["env", "-u", "TORCHINDUCTOR_COMPILE_THREADS", sys.executable, "-c"]
    with contract("vllm.env_override", "is all of vllm that changes Inductor"):
        subprocess.run([*environment, PATCHED + SENDER + VLLM], check=True, timeout=120)
