"""Decide which layers may be INT8, by measurement: in each job, and for `tared plan`, which certifies the decision.

Reading order: ladder (the plans that are tried, in their order), then its steps: what_if (repairs, and what a plan
loses on a few frames), costs (what each group of layers costs) and group_noise (the noise that each adds). evidence
holds what was found, and is what a plan says of itself. raising is how the daemon asks for higher precision, and
kept_costs finds the costs that jobs keep.

search runs the ladder on frames from files, and certifies its plans: frames draws them at random, certificate is the
trial of a candidate. quick_check is a glance at a plan and its engine on a few frames, and stands by itself.

Public:
    costs               GroupCosts, PlanBuilder
    evidence            COMMAND, JOB, READABLE, SCHEMA
    frames              RandomFrames
    kept_costs          KeptCosts
    ladder              Ladder, LadderOptions, REFUSED, Scene
    quick_check         CHECKED_FRAMES, DIFFERS, QuickCheck, quick_check
    raising             EXHAUSTED, PrecisionRaise
    search              PlanOptions, PlanSearch
"""
