"""What is written again from its start, where another transaction was in the way."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from agent.errors import AgentError
from fleet.store.transaction import CONTENDED, Store, Transaction

_ATTEMPTS = 4
_PAUSE_S = 0.2  # at most, so that two that met do not meet again

Found = TypeVar("Found")


def written(store: Store, write: Callable[[Transaction], Found]) -> Found:
    """What `write` returns, called in a transaction of its own, which has been committed then.

    Two that write at once may each wait for the other: the database ends one of them (`fleet.contended`), which is
    begun again here, a few times. Raises AgentError as the store does.
    """
    attempt = 1
    while True:
        try:
            with store.begun("write") as transaction:
                return write(transaction)
        except AgentError as error:
            if error.code != CONTENDED or attempt == _ATTEMPTS:
                raise
        attempt += 1
        time.sleep(random.uniform(0.0, _PAUSE_S))
