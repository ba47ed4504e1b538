"""Decide which layers may be INT8, by measurement, and certify the decision: `tared plan`, and raising precision later.

Reading order: search (the way through), then its steps: what_if (repairs, and what a plan loses on a few frames), costs
(what each group of layers costs), frames (random frames of a source), certificate (the trial of a candidate). result
makes the plan and its evidence of a search; report and chart show them; command is the command line's entry.
precision_raise stands by itself: it leaves more layers of a served plan float. So does quick_check, a glance at a plan
on a few frames.

Public:
    chart               draw_chart
    command             read_evidence, run_plan
    precision_raise     EXHAUSTED, ObservedScene, PrecisionRaise, PrecisionRaiser
    quick_check         CHECKED_FRAMES, QuickCheck, quick_check
    report              explain, find_groups, print_plan
    search              PlanOptions
"""
