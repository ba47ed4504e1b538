"""Is a candidate engine good enough to serve? Runs in a job's child process, before the candidate sees live frames.

Reading order: `confusion`, `comparison`, `verdict`, `pictures`; for a new model `model_change`. An accepted candidate
goes on to its probation, agent.control.exchange.

confusion    Disagreement, ConfusedPair
comparison   compare, Comparison, HeldOut, Deadline
pictures     differing_pictures
model_change model_change, ModelChange, ANSWERS
verdict      decide, Verdict, VerdictLimits, Judge, MIN_INFORMATIVE, NO_WORSE, RAISED_GAIN
"""
