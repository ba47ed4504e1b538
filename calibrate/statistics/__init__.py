"""Decide from few values, with bounds on how often the decision is wrong.

evidence        DriftDetector, ConfidenceSequence, gain_bounds: has something changed?
loss_bound      LossBound, frames_needed: is a candidate good enough?
confusion       confused_pairs: which classes a candidate confuses
sampling        Strata, SampledTotals: what all frames score, from labels of a few
fidelity_gain   GainMap: what so many dB are worth in fidelity
"""
