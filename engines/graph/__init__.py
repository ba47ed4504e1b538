"""ONNX graphs: reading a model, and making the FP32 master graph of it.

Read in this order: load, passes, topology.

    load            load_model, image_input, trial_image, canonical_hash: every unusable file is refused here
    constant_inputs pin_inputs, proposed_constants: further inputs beside the image become constants
    passes          prepare: the master graph, step by step and checked
    existing_qdq    own_int8, check_own_quantisation: Q/DQ that the model itself brings
    topology        Topology, tensor_types, the families of operators
    signs           never_negative: the tensors that may be uint8
    weights         to_matrix, from_matrix: weights in one form
    taps            expose, expose_extremes, element_counts: tensors inside a graph made visible
"""
