"""The device's end of the MQTT contract: the link, the outbox with telemetry and events, Home Assistant.

Reading order, with the names that other packages use:

1. `reporter`          Reporter: events and telemetry, as documents of the contract
2. `outbox`            Outbox: numbers them, keeps them until they have arrived, sends them in order
3. `outbox_store`      OutboxStore: its rows on the disk, or in memory while that refuses; SAMPLE, EVENT, ALARM
4. `link`              MqttLink: status, birth, results of commands, histograms, inboxes; the session with the broker
5. `home_assistant`    Discovery: announces the board to Home Assistant

What acknowledges a telemetry row:

- The broker's PUBACK: Connection (agent/mqtt/connection.py) -> Outbox.delivered -> OutboxStore. It deletes the row if
  `mqtt.outbox.confirm` is `broker`, or `auto` and there has been no collector. Otherwise the row is only marked sent.
- The collector's Ack, once the row is durably stored (fleet/collector/collector.py): topic `ack` -> MqttLink.acks ->
  CommandInbox (agent/daemon/inbox.py) -> Outbox.acknowledge -> OutboxStore, which deletes the rows up to its number
  that the broker has acknowledged, too.
"""
