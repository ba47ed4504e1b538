"""The seam between tared and the inference runtimes. Knows calibrate, never agent."""
