"""A device as a process that obeys commands and can be killed: `python command_device.py PORT FOLDER`.

A command adds a line to FOLDER/done, which is on the disk before its end. Commands wait for a tick, as in the
daemon.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from brokers import on_the_air
from device import TOPICS, Device
from kept import kept_in

from agent.commands.dispatcher import CommandDispatcher, CommandProgress
from agent.commands.log import CommandLog
from agent.commands.recognition import CommandRecognition
from agent.common.errors import AgentError
from agent.contract.messages import Birth
from agent.mqtt.endpoint import Endpoint

_TICK_S = 0.1


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

    journal = CommandLog(kept_in(folder, fail))
    endpoint = Endpoint("127.0.0.1", port)
    with on_the_air(endpoint, TOPICS, Birth(agent_version="0"), recognise=CommandRecognition(None)) as link:
        desk = CommandDispatcher({**Device().handlers(), "cancel": done}, link.send, command_log=journal)
        desk.restore([])
        while True:
            time.sleep(_TICK_S)
            while not link.delivered_results.empty():
                journal.mark_delivered([link.delivered_results.get()])
            while not link.recognised.empty():
                message = link.recognised.get()
                desk.receive(message.payload, time.time(), message.retain)
                message.confirm()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
