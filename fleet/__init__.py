"""Run a fleet from a control room: collect what boards report, select boards, and change many of them safely.

It talks to boards through the MQTT contract alone: of `agent` it uses `common`, `contract` and `mqtt`. Two packages use
more: `simulator`, whose boards run the agent's own code, and `cli`, which adds its commands to the board's.

Reading order: store, devices, collector (what boards report); operator (one command); rollout and merge (many
boards); views (for people); simulator (boards without cameras); cli (`tared` and `tared fleet`).

Public names:
    operator   send, new_command, command_from_args, encode_command, command_message, requested_chunks
    untrusted  printable, Warnings
"""
