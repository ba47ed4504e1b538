"""`make attack`: what strangers, damage and clumsiness may put before a board, in bounded, seeded quantities.

Reading order:

- `case`: what a case is, and how it is judged
- `kinds`: all kinds of input
- the generators, which tests share: `yaml_texts`, `onnx_files`, `pictures`, `archives`, `documents`, `spoilt` and
  `state_files`, `requests`
- `campaign`: worker processes, their limits, the table
- `worker`, `__main__`
"""
