"""Ours beside the peers', same inputs, same run; ratios, not absolute times. Results: RESULTS.md."""
