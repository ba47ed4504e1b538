"""Look at models before they serve: `tared inspect` guesses the spec of one, `tared check` tries a spec on frames.

Reading order of inspect: `graph_facts` (what the graph shows), `graph_run` (what a run of it shows), `spec_guess`
(what follows from both), `inspect` (the command). Of check: `alternatives` (the likeliest mistakes of a spec),
`sureness` (how sure the model is, and when one spec counts as surer than another), `channel_values` (channels that are
read as class scores and are none), `check` (the command: rounds of alternatives, a verdict, a table), `picture` (its
PNG).

Public names:
    inspect       inspect_model, spec_lines, write_spec, inspect_artefact, print_artefact_inspection
    alternatives  Alternative, unchanged, alternatives
    sureness      Sureness, measure, compare
    check         run_check, print_check
    picture       draw_check, check_output
"""
