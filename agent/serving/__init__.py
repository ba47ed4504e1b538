"""Serve frames: capture threads, the inference thread, and a candidate engine on trial.

Reading order: pipeline (all threads and how they are connected), inference (from a slot to the sinks), trial (a
candidate on live frames, and its probation).

Public names:
    pipeline:  Pipeline, Feed, total_frames
    inference: FrameLoop, RoundRobinScheduler, Sink
    trial:     AnswerRecord, Probation, Trial, TrialEvents
"""
