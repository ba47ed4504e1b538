"""Observe some frames with a reference engine beside the frame path: drift, fidelity, accuracy, view, regimes.

Reading order: observer (the thread), observation_budget (how often), camera_monitor (what becomes of a frame), drift,
estimates, class_losses, causes, view, regimes, accuracy, audit (is the reference right?), evidence_file.

How a served frame passes through the mechanisms that say how often, all of them in capture time but for 2:

1. `CameraRota` (observation_budget): is it this camera's turn? Cameras take turns, and silent ones are passed over.
2. `ObservationBudget` (observation_budget): is an observation paid for? Inference time earns a share for observing; an
   alert runs ahead on credit.
3. `RandomInterval` (common.timing), inside the budget: has the random gap around `observe.period_s` passed, or around
   `observe.alert_period_s`? The first frame for which 1 to 3 hold is observed by the reference engine.
4. `Blocks` (drift): which block of `drift.block_s` does the observed frame belong to? Drift is judged once a block.
5. `FrameSelector` (collection.selection): does the observed frame also enter the collection for the next calibration?
   It keeps a schedule of `calibration.frames` within `calibration.within_s`, and prefers what is new.
6. `hold_out` (collection.collection): is the chosen frame held out to judge a candidate? One in four is, in stretches.

4 does not depend on 5 and 6: every observed frame counts for drift and fidelity, chosen or not.

Public names:
    accuracy:       LabelsError, LiveAccuracy, Truth, accuracy_bound
    audit:          AuditEvidence, FrameAuditor, Mismatch, ReferenceAudit
    camera_monitor: CameraMonitor, CameraState, CameraStates, least_faithful
    causes:         Explanation
    class_losses:   LostClass
    drift:          DriftState
    estimates:      Estimate
    evidence_file:  EvidenceFile, remove_other_files
    observer:       ObserverThread, PREPARING
    regimes:        RegimeStore, Regimes, regime_artefacts
    view:           BLIND, FROZEN, ViewState
"""
