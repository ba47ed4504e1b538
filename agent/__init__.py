"""The daemon: camera, loop, drift, recalibration, telemetry and the command line."""
