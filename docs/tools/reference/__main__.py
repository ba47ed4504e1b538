"""Write the pages: `python -m docs.tools.reference`, which `make generated` does."""

from docs.tools.reference.pages import pages
from docs.tools.reference.source import ROOT

for path, text in pages().items():
    (ROOT / path).parent.mkdir(exist_ok=True)
    (ROOT / path).write_text(text, encoding="utf-8")
