"""Accuracy from a few labels: draw observed frames, let people label them, and bound what the board scores.

Reading order: store, sampling, accuracy, proposal; then labels by people: browser, exchange.

Public names:
    store     Draw, DrawnFrame, LabelStore: the drawn frames and their labels
    sampling  FrameSampler, which draws among observed frames
    accuracy  measured_accuracy, MeasuredAccuracy: intervals from labels
    proposal  propose, PolicyProposal: a policy that the labels of a regime speak for
    browser   LabelPage, open_listener
    exchange  export_frames, import_labels: COCO's JSON, or class folders
"""
