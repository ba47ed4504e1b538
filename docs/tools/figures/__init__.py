"""Pictures of the manual, each drawn from a real run: `python -m docs.tools.figures [NAME ...]`.

Reading order: `street_run` runs the sample, `replay` lets its engines answer the recording again. `sample`,
`threshold`, `alarm` and `frontier` draw from these; `screens` takes pictures of pages. `picture` is the common look.
"""
