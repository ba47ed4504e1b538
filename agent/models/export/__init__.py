"""Files that other tools take from tared, and files that they bring: `tared export`, `tared calibrate --from-cache`.

Reading order: `command` (the formats, and the folder), `source` (the graph and the ranges of an artefact), then by
consumer: `graphs` (onnx, trtexec, openvino, tvm), `tables` (tensorrt-cache, onnxruntime, ppq) and `deployments`
(deepstream, triton). `foreign_scales` reads the tables and graphs of other tools.

Public names: `run_export` and `FORMATS` of `command`; `read_ranges`, `matched_ranges`, `foreign_calibration` and
`differences` of `foreign_scales`.
"""
