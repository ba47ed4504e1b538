"""Decoding a video into BGR frames: OpenCV beside PyAV, by wall and CPU time, and what decoding threads hold back.

    python -m benchmarks.decoding VIDEO [--rounds 7] [--markdown | --json]

The contenders take turns, each in a process of its own; the first round warms up. Both have FFmpeg inside, of releases
of their own. A frame that is held back is one period older when it comes: of a camera it is latency, of a file none.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from statistics import median

from benchmarks.peers import HERE, PYAV, Peer, PeerError, Reply, Worker
from benchmarks.report import Section, add_output_option, publish, times

COLUMNS = ("contender", "wall, ms per frame", "wall / ours", "CPU, ms per frame", "CPU / ours", "frames held back")


@dataclass
class Contender:
    """threads: of its decoder; 0: as many as it likes. replies: of the rounds that were timed."""

    name: str
    peer: Peer
    script: str
    threads: int
    replies: list[Reply] = field(default_factory=list)
    held_back: str = ""

    @property
    def wall_s(self) -> float:
        return median(reply.wall_s for reply in self.replies)

    @property
    def cpu_s(self) -> float:
        return median(reply.cpu_s for reply in self.replies)


def contenders() -> list[Contender]:
    """Ours first."""
    return [
        Contender("OpenCV, one thread: tared's default for cameras", HERE, "decode_opencv", 1),
        Contender("OpenCV, two threads", HERE, "decode_opencv", 2),
        Contender("OpenCV, as many as it likes: files", HERE, "decode_opencv", 0),
        Contender("PyAV, one thread", PYAV, "decode_pyav", 1),
        Contender("PyAV, two threads", PYAV, "decode_pyav", 2),
        Contender("PyAV, four threads", PYAV, "decode_pyav", 4),
    ]


def compare(path: str, rounds: int) -> Section:
    """Everybody decodes the same file, in turn."""
    table = Section(f"Decoding {path.rpartition('/')[2]}", COLUMNS)
    workers = {script: Worker(peer, script) for peer, script in ((HERE, "decode_opencv"), (PYAV, "decode_pyav"))}
    entered = contenders()
    frames = set()
    for number in range(rounds + 1):
        for contender in entered:
            reply = workers[contender.script].call("decode", path, contender.threads)
            frames.add(reply.value[0])
            if number:
                contender.replies.append(reply)
    if len(frames) != 1:
        raise PeerError(f"they do not find the same number of frames: {sorted(frames)}")
    (count,) = frames
    for contender in entered:
        if contender.peer is PYAV:
            contender.held_back = str(workers["decode_pyav"].call("held_back", path, contender.threads).value)
        table.rows.append(_row(contender, entered[0], count))
    versions = {name: worker.call("version").value for name, worker in workers.items()}
    table.note = f"{count} frames; OpenCV {versions['decode_opencv']}, PyAV {versions['decode_pyav']}"
    for worker in workers.values():
        worker.close()
    return table


def _row(contender: Contender, ours: Contender, frames: int) -> tuple[str, ...]:
    return (
        contender.name,
        f"{1e3 * contender.wall_s / frames:.2f}",
        times(contender.wall_s / ours.wall_s),
        f"{1e3 * contender.cpu_s / frames:.2f}",
        times(contender.cpu_s / ours.cpu_s),
        contender.held_back,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Decoding a video: OpenCV beside PyAV.")
    parser.add_argument("video")
    parser.add_argument("--rounds", type=int, default=7)
    add_output_option(parser)
    options = parser.parse_args()
    publish([compare(options.video, options.rounds)], options)


if __name__ == "__main__":
    main()
