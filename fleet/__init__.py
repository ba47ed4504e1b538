"""The control room: today an operator's commands, in time the whole fleet; it speaks only the MQTT contract."""
