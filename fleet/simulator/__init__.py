"""Boards without cameras: a fleet of any size that speaks the real MQTT contract, on one machine."""
