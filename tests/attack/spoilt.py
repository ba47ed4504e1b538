"""Files of the state directory as damage and strangers leave them: JSON with anything in the place of some of it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from((-1, 2**64, 10**400)) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def spoilt(draw: st.DrawFn, document: Any) -> Any:
    """The document with anything in one place: the whole, a part of a part, or a key."""
    if not document or not isinstance(document, (dict, list)) or draw(st.integers(0, 9)) == 0:
        return draw(ANYTHING)
    if isinstance(document, list):
        index = draw(st.integers(0, len(document) - 1))
        return [*document[:index], draw(spoilt(document[index])), *document[index + 1 :]]
    key = draw(st.sampled_from(sorted(document)))
    value = draw(spoilt(document[key]))
    others = {name: document[name] for name in document if name != key}
    return {**others, draw(st.text()) if draw(st.integers(0, 9)) == 0 else key: value}


def as_bytes(document: Any) -> bytes:
    """As this project writes it."""
    return json.dumps(document).encode()


# One file, written anew for each example, on a disk that may be slow.
ONE_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
