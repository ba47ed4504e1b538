"""Judge the manual's prose by what can be counted: `python -m docs.tools.prose [FILE ...]`; exit code 1 beyond a limit.

The limits are what well-liked manuals of the field keep to (Frigate, Mender, Model-Optimizer, jetson-inference: median
9 to 15 words a sentence, 90th percentile 16 to 34). Code, tables, links' addresses and generated pages do not count.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from docs.tools.site import GLOSSARY, ROOT, terms

MEDIAN, NINETIETH, LONGEST = 16, 28, 40  # words a sentence
LINE = 120  # characters, outside tables and code
_HABITS = {
    "begins with What, Who or Whose and asks nothing": re.compile(r"^(What|Who|Whose|Whoever|Whatever)\b(?!.*\?$)"),
    "'tell': report, log, list, show or say": re.compile(r"\b(tell|tells|told|telling)\b", re.IGNORECASE),
    "'provably': name the confidence": re.compile(r"\bprovabl[ey]\b", re.IGNORECASE),
}
# The house's own words. A page that uses one that the glossary lacks leaves its reader alone.
TERMS = (
    "alarm", "amax", "artefact", "audit", "calibration", "candidate", "certificate", "clipping", "collector",
    "commit", "decoder", "degraded", "drift", "e-value", "engine", "entropy", "epoch", "fidelity", "fleet",
    "frontier", "held-out frames", "job", "observer", "outbox", "plan", "policy", "predicted gain", "probation",
    "Q/DQ", "reference", "regime", "rollback", "rollout", "scale", "spec", "store", "swap", "tap", "telemetry",
    "threshold", "verdict", "wave",
)  # fmt: skip
_UNBROKEN = r"`[^`]+`|\]\([^)]*\)"  # code and addresses of links, which stay in one line
_FENCE = re.compile(r"^(\s*)(```|~~~)")
_GENERATED = "<!-- generated"


@dataclass(frozen=True)
class Page:
    """Counts of one page. complaints: (line number, what is wrong) of single sentences and lines."""

    path: Path
    words: tuple[int, ...]
    complaints: tuple[tuple[int, str], ...]

    @property
    def median(self) -> float:
        """Words of the middle sentence; 0 of a page without one."""
        return statistics.median(self.words) if self.words else 0.0

    @property
    def ninetieth(self) -> float:
        """Words that nine sentences in ten do not exceed."""
        return sorted(self.words)[int(0.9 * (len(self.words) - 1))] if self.words else 0.0

    def faults(self) -> Iterator[str]:
        """Yield what is beyond a limit, one line each."""
        for number, complaint in self.complaints:
            yield f"{self.path}:{number}: {complaint}"
        if len(self.words) >= 10:  # with fewer sentences neither figure says much
            if self.median > MEDIAN:
                yield f"{self.path}: the median sentence has {self.median:g} words; at most {MEDIAN}"
            if self.ninetieth > NINETIETH:
                yield f"{self.path}: one sentence in ten has more than {self.ninetieth} words; at most {NINETIETH}"


def pages() -> list[Path]:
    """Return the pages that people write: README, the manual and its neighbours, and config.yaml."""
    beside = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/RESULTS.md", "config.yaml")
    outside = [ROOT / name for name in beside]
    return [path for path in (*outside, *sorted((ROOT / "docs").rglob("*.md"))) if path.exists() and _is_written(path)]


def _is_written(path: Path) -> bool:
    return not path.read_text(encoding="utf-8").startswith(_GENERATED)


def read(path: Path, text: str) -> Page:
    """Return the counts of a page of Markdown, or of the comments of a YAML file."""
    text = comments(text) if path.suffix == ".yaml" else text
    words, complaints = [], []
    for number, line in prose_lines(text):
        if len(re.sub(_UNBROKEN, "", line)) > LINE:
            complaints.append((number, f"a line of {len(line)} characters; at most {LINE}"))
    for number, sentence in sentences(text):
        count = len(sentence.split())
        words.append(count)
        if count > LONGEST:
            complaints.append((number, f"a sentence of {count} words; at most {LONGEST}: {sentence[:60]}..."))
        complaints += [
            (number, f"{fault}: {sentence[:60]}") for fault, habit in _HABITS.items() if habit.search(sentence)
        ]
    return Page(path, tuple(words), tuple(sorted(complaints)))


def comments(yaml: str) -> str:
    """Return the comments of a YAML file as paragraphs, on the lines where they are.

    >>> comments("# One thing.\\nkey: 1\\n  # Another.")
    'One thing.\\n\\nAnother.'
    """
    lines = (line.strip() for line in yaml.splitlines())
    return "\n".join(line.removeprefix("#").removeprefix(" ") if line.startswith("#") else "" for line in lines)


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines that are neither code nor tables, nor the metadata at the top."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if mark and (not fence or mark[2] == fence):
            fence = "" if fence else mark[2]
        elif not fence and not line.startswith(("    ", "\t", "|", "<", "!", "*[")):
            yield number, line


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield each sentence of running text with the number of its paragraph's first line.

    Items of lists are paragraphs. Headings are none.

    >>> list(sentences("# Title\\n\\nOne sentence. Another,\\nof `two words` here.\\n- An item"))
    [(3, 'One sentence.'), (3, 'Another, of CODE here.'), (5, 'An item')]
    """
    paragraph, first = list[str](), 0

    def flush() -> Iterator[tuple[int, str]]:
        plain = _plain(" ".join(paragraph))
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[\"'(*_]*[A-Z0-9`])", plain):
            if len(sentence.split()) > 1:
                yield first, sentence.strip()
        paragraph.clear()

    last = 0
    for number, line in prose_lines(text):
        item = re.match(r"\s*([-*+]|\d+\.)\s+", line)
        if not line.strip() or line.startswith("#") or item or number > last + 1:
            yield from flush()
        last = number
        if line.strip() and not line.startswith("#"):
            first = first if paragraph else number
            paragraph.append(line[item.end() :] if item else line.strip())
    yield from flush()


def _plain(markdown: str) -> str:
    """Return the words as a reader sees them: a link is its text, code is one word."""
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    plain = re.sub(r"``.+?``|`[^`]+`", "CODE", plain)
    return re.sub(r"\*\*|__", "", plain)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Judge the prose of the manual's pages.")
    parser.add_argument("files", nargs="*", type=Path, help="pages; all that people write")
    parser.add_argument("--table", action="store_true", help="print each page's counts as well")
    options = parser.parse_args(arguments)
    read_pages = [read(path, path.read_text(encoding="utf-8")) for path in options.files or pages()]
    if options.table:
        for page in read_pages:
            print(f"{len(page.words):5} sentences  median {page.median:4g}  90 % {page.ninetieth:3}  {page.path}")
    faults = [fault for page in read_pages for fault in page.faults()]
    faults += [f"{ROOT / 'docs' / GLOSSARY}: '{term}' is not defined" for term in TERMS if term not in terms()]
    print("\n".join(faults) if faults else f"{len(read_pages)} pages read well")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
