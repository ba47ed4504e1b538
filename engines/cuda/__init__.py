"""CUDA: the kernels of calibrate/kernels.cu launched on a GPU. Nothing here knows an inference runtime.

Read in this order: kernels, gpu.

    kernels      DeviceHistograms, search_entropy, DevicePreprocess; CudaExecutor that runs them; KernelGeometry
    gpu          Gpu, HostMemory, DeviceMemory: the one place that imports PyCUDA
    cuda_graph   CudaGraph, faster_graph: queued work captured, where that is faster
"""
