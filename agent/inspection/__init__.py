"""Inspect models and artefacts for `tared inspect`, and guess the spec of a model.

Reading order: `graph_facts` (what the graph shows), `spec_guess` (what follows from it), `inspect` (the command).

Public names:
    inspect  inspect_model, write_spec, print_model_inspection, inspect_artefact, print_artefact_inspection
"""
