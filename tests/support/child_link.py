"""The board `fleet/board` on the air in a process of its own, to be killed or stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from places import TEST_PATH
from warm_start import WarmProcess

from agent.mqtt.endpoint import Endpoint

_CHILD = """
import sys, threading
sys.path[:0] = sys.argv[2].split(":")
from brokers import on_the_air
from agent.contract.messages import Birth
from agent.mqtt.client import Endpoint
from agent.contract.topics import Topics
endpoint = Endpoint("127.0.0.1", int(sys.argv[1]), protocol=sys.argv[3], will_delay_s=int(sys.argv[4]))
with on_the_air(endpoint, Topics("fleet", "board"), Birth(agent_version="child")):
    threading.Event().wait()
"""


@contextlib.contextmanager
def child_on_the_air(endpoint: Endpoint) -> Iterator[WarmProcess]:
    """It dies with the context, if not before."""
    arguments = str(endpoint.port), TEST_PATH, endpoint.protocol, str(endpoint.will_delay_s)
    child = WarmProcess(arguments, source=_CHILD)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
