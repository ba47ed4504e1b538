"""The daemon on a board, and the commands that work without it.

Each package opens with its purpose, its reading order and its public names. docs/contributing/architecture.md has all
of them on one page. Reading order, along a frame and then along a change of engine: camera, serving, vision, results;
monitoring, collection, control, jobs, planning, models, validation; then what reports and obeys: contract, mqtt,
uplink, commands, daemon; and cli, inspection, doctor, system, common. `config` is the schema of config.yaml;
`detections` has a name that decoders of others import.
"""
