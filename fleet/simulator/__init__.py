"""Boards without cameras: a fleet of any size that speaks the real MQTT contract, on one machine.

A simulated board runs the agent's own link, outbox, settings and command dispatcher; only its camera and its engines
are modelled. All boards share one thread.

Reading order: options, simulation, board, daemon; then the models (scene, engines, handlers), then event_loop and
client, which drive thousands of connections. context holds the parts of a board that outlive its daemons.

Public names:
    context     board_name
    options     BadEngines, Faults, SimulationOptions
    scene       Drift
    simulation  Simulation, SimulationOutcome
"""
