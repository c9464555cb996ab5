"""Which worker TensorFlow's errors name as lost; their texts are TensorFlow 2.16's and later."""

from types import SimpleNamespace

import pytest

pytest.importorskip("absl", reason="TensorFlow is not installed (the tf extra)")
from tf2_bert.endings import lost_worker


class UnavailableError(Exception):
    """Has the name of TensorFlow's error."""


WORKER = """Graph execution error:
Detected at node CollectiveReduceV2 defined at (most recent call last):
Collective ops is aborted by: Error reported from /job:worker/task:1: The following tasks are unhealthy (stopped
sending heartbeats):
/job:worker/replica:0/task:1
The tasks have crashed."""
CHIEF = """Graph execution error:
Collective ops is aborted by: Failed to send RPC to coordination service.
Additional GRPC error information from remote target /job:worker/replica:0/task:0 while calling Heartbeat:"""


def test_the_lost_worker_is_named() -> None:
    for error, task, expected in (
        (UnavailableError(WORKER), 0, "rank 1 on b died, hangs or is cut off"),
        (UnavailableError(CHIEF), 1, "rank 0 on a died, hangs or is cut off"),
        (RuntimeError(CHIEF), 1, "rank 0 on a died, hangs or is cut off"),
        (UnavailableError("/job:worker/replica:0/task:0/device:GPU:0 is busy"), 0, None),
        (UnavailableError("/job:worker/task:7"), 0, None),
        (ValueError("/job:worker/replica:0/task:1"), 0, None),
        (KeyboardInterrupt(), 0, None),
    ):
        assert lost_worker(error, SimpleNamespace(task=task, count=2, hosts=["a", "b"])) == expected
