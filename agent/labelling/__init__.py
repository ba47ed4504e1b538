"""Accuracy from a few labels: draw observed frames, let people label them, and bound what the board scores.

Reading order: store, sampling, accuracy; then the ways to label: browser, terminal, exchange.

Public names:
    store     Draw, DrawnFrame, LabelStore: the drawn frames and their labels
    sampling  FrameSampler, which draws among observed frames
    accuracy  measured_accuracy, MeasuredAccuracy: intervals from labels
"""
