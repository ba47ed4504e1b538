"""TensorRT 10, TensorRT 11 and TensorRT-RTX behind one seam.

Read in this order: backend, builder, session.

    backend     TensorRtBackend: the way in
    release     open_release, TensorRtRelease: which TensorRT this machine has
    api         the Protocols of what we use of the bindings
    builder, log    from an ONNX graph to an engine
    session     Session: one engine, one context, one stream; TensorRtEngine: a Session that preprocesses frames
    reference   TensorRtObserver, open_reference, and the two ways to see tensors inside an engine
    layers      Layer: what the builder made of a graph
"""
