"""Check a model spec on frames for `tared check`: is the model surer of its answers if the spec says something else?

Reading order: `alternatives` (the likeliest mistakes of a spec), `sureness` (how sure the model is, and when one spec
counts as surer than another), `check` (the command: rounds of alternatives, a verdict, a table), `picture` (the PNG).

Public names:
    alternatives  Alternative, unchanged, alternatives
    sureness      Sureness, measure, compare
    check         run_check, print_check
    picture       draw_check, check_output
"""
