"""Pure numerics of calibration: NumPy in, NumPy out.

No I/O, threads, logging, clocks, networks or cameras in here; engines and agent build on it, never the other way.

Read in this order: histogram, threshold, scale, noise, statistics.evidence. The other modules stand alone.

    errors       TaredError, the base of every expected error; CalibrationError
    histogram    AbsHistogram, abs_histogram, merge, to_bytes, from_bytes, HistogramSum
    count_codec, native    how histograms are packed, and the compiled passes that count
    threshold    histogram_amax, parse_method, entropy_window: from a histogram to the clipping range
    divergence   kl_divergence, the objective of the entropy methods
    scale        activation_scale, weight_scales, quantise: from the range to INT8
    noise        tensor_noise, network_noise, predicted_gain_db: the noise that a set of scales makes; sqnr_db
    repair       equalisation, best_clips, output_shift: what keeps a layer in INT8; merge_extremes, kept_amax
    plan         PrecisionPlan, Repairs: which layers stay float, and how the others are repaired
    partition    Problem, fastest, frontier, rungs: the plans of least time within noise budgets
    cost_fit, sensitivity    fit_costs, measure_blocks, share_out: from measurements to costs and noise
    statistics   evidence, loss_bound, confusion, sampling, fidelity_gain: what few values allow to say
    kernels.cu   the CUDA kernels; engines/cuda/kernels.py launches them
"""
