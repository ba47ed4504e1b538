"""A device as a process that obeys commands and can be killed: `python command_device.py PORT FOLDER`.

What a command does is one line more in FOLDER/done, on the disk before it is over.
"""

from __future__ import annotations

import os
import queue
import sys
import time
from pathlib import Path
from typing import Any

from brokers import on_the_air
from device import TOPICS, Device

from agent.commands.dispatcher import CommandDispatcher, CommandProgress
from agent.commands.log import CommandLog
from agent.common.errors import AgentError
from agent.contract.messages import Birth
from agent.mqtt.endpoint import Endpoint


def main(port: int, folder: Path) -> None:
    """Until it is killed."""

    def done(_args: Any, report: CommandProgress) -> None:
        with (folder / "done").open("a") as file:
            file.write(f"{report.latest.id}\n")
            file.flush()
            os.fsync(file.fileno())
        report.succeed()

    def fail(error: AgentError) -> None:
        raise error

    journal = CommandLog(folder / "commands.sqlite", fail)
    with on_the_air(Endpoint("127.0.0.1", port), TOPICS, Birth(agent_version="0")) as link:
        desk = CommandDispatcher({**Device().handlers(), "cancel": done}, link.send, command_log=journal)
        desk.restore([])
        while True:
            while not link.delivered_results.empty():
                journal.mark_delivered([link.delivered_results.get()])
            try:
                message = link.inbox.get(timeout=0.02)
            except queue.Empty:
                continue
            desk.receive(message.payload, time.time(), message.retain)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
