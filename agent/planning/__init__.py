"""Decide which layers may be INT8, by measurement: in each job, and in `tared plan`, which certifies the decision.

Reading order: search (the way through), then its steps: what_if (repairs, and what a plan loses on a few frames), costs
(what each group of layers costs), frames (random frames of a source), certificate (the trial of a candidate). result
makes the plan and its evidence of a search; report and chart show them; command is the command line's entry.
ladder has the plans that a job tries, also where precision is raised, which the daemon asks for by raising. Ladder and
search measure the noise of layer groups by group_noise. kept_costs finds the costs that a job's search goes by.
quick_check is a glance at a plan and its engine on a few frames, and stands by itself.

Public:
    chart               draw_chart
    command             read_evidence, run_plan
    costs               PlanBuilder
    kept_costs          KeptCosts
    ladder              Ladder, LadderOptions, REFUSED, Scene
    quick_check         CHECKED_FRAMES, DIFFERS, QuickCheck, quick_check
    raising             EXHAUSTED, PrecisionRaise
    report              explain, find_groups, print_plan
    search              PlanOptions
"""
