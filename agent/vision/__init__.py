"""Turn frames into network inputs, and engine outputs into predictions; compare predictions with each other.

Reading order: `spec` (MODEL.yaml), `preprocess` (from the frame to the network input, and boxes back), `detections`,
`decoders`, `decode` (from outputs to predictions), `task` (the whole way of one frame). Apart from these, `fidelity`
compares two predictions, `labelled_images` and `coco` read data sets, `evaluation` compares predictions with their
labels, `output_checks` checks an engine's outputs, `policy` leaves out what the owner does not want to see, and
`drawing` draws predictions into frames.

A new decoder is added in `decoders`: its function, its entry in `BUILTIN_DECODERS`, and its name in `spec.DECODERS`.

Public names:
    spec           ModelSpec, InputSpec, PrecisionRules, load_model_spec, rebase
    preprocess     network_input, NetworkInput, Geometry
    detections     Detections, LabelledBoxes, NO_BOXES, iou_matrix, match
    decoders       BUILTIN_DECODERS
    decode         Prediction, Classification, RawOutputs, prediction_as_dict, class_probabilities
    task           VisionTask, ServedFrame, PendingInference, Outputs, POLL_S
    fidelity       fidelity, Fidelity, MatchCounts, count_matches, is_empty, MATCH_IOU, sqnr_db,
                   answers, ServedClass
    labelled_images  labelled_images, LabelledObjects
    evaluation     evaluate, AveragePrecision
    drawing        draw_prediction
    policy         Policy, apply_policy, count_left_out, Show, as_served
    output_checks  output_faults, row_faults, largest_batch, check_batch
"""
