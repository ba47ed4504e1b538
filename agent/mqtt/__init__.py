"""An MQTT client that reconnects by itself. It knows brokers and packets, and of tared only the limits of its contract.

Reading order:

1. `message`          Message, HeldMessage, Reply; MessageSource: where a session takes messages from; Mailbox, Newest
2. `endpoint`         Endpoint, TlsFiles: a broker, its certificates, TLS errors in words
3. `acknowledgements` OrderedAcks: received messages are acknowledged in their order, once they may be
4. `connection`       SessionOptions, InFlight, Connection: one connection; the only module that imports paho
5. `client`           MqttSession, MqttClient: one connection after another, by MQTT 5 or 3.1.1, with backoff
6. `receive_queue`    ReceiveQueue, Arrival: all messages in one queue, acknowledged as its reader permits
7. `config`           MqttConfig, OutboxConfig, read_mqtt_config: the `mqtt` section of config.yaml
8. `embedded_broker`  EmbeddedBroker: a broker inside the process, for the sample

The board uses it through agent/uplink; the fleet uses MqttClient itself.
"""
