"""Turn frames into network inputs, and engine outputs into predictions; compare predictions with each other.

Reading order: `spec` (MODEL.yaml), `preprocess` (from the frame to the network input, and places back), `answer` (what
every answer can be asked), `tasks` (from outputs to answers, one module each), `task` (the whole way of one frame).
Apart from these, `fidelity` compares two answers, `labels` reads what people say of a frame and `shape_labels` what
they draw in other tools, `datasets` has readers of labelled images, `evaluation` scores an engine on them,
`output_checks` checks an engine's outputs, `policy` leaves out what the owner does not want to see, and `drawing` has
what answers draw themselves with.

A new task or decoder: docs/contributing/extend.md.

Public names:
    spec           ModelSpec, InputSpec, PrecisionRules, load_model_spec, rebase
    preprocess     network_input, NetworkInput, Geometry
    boxes          LabelledBoxes, NO_BOXES, iou_matrix
    detections     Detections, match, count_matches, MATCH_IOU
    decoders       BUILTIN_DECODERS
    answer         Answer, Hits, MatchCounts, ServedClass
    tasks.task     ModelTask
    tasks.opening  open_task, label_kind
    task           VisionTask, ServedFrame, PendingInference, Outputs, Show, as_served, POLL_S
    fidelity       fidelity, Fidelity
    labels         LabelKind, LabelError, Truth, parse_class, class_id, class_name
    shape_labels   FrameShapes, FrameOutlines, LabelledOutlines
    datasets       object_images, ClassifiedImages, LabelledObjects
    evaluation     evaluate
    policy         Policy
    output_checks  output_faults, row_faults, largest_batch, check_batch
"""
