"""Write the reference pages in docs/reference from the code: `python -m docs.tools.reference`.

Each page has a module. `pages` has them all. `markdown` writes tables and anchors, `documents` describes pydantic
models. `source` reads the code as syntax trees, and `texts` finds the texts that an expression may have.
"""
