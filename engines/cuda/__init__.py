"""CUDA: the kernels of calibrate/kernels.cu launched on a GPU. Nothing here knows an inference runtime.

Read in this order: kernels, gpu, executor.

    kernels      DeviceHistograms, search_entropy; the Protocol Executor that runs them; KernelGeometry
    gpu          Gpu, HostMemory, DeviceMemory: the one place that imports PyCUDA
    executor     CudaExecutor: the kernels on a Gpu, with pooled memory
    preprocess   DevicePreprocess: a frame to a network input
    cuda_graph   CudaGraph, faster_graph: queued work captured, where that is faster
"""
