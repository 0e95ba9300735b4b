"""The NATS protocol as pure state machines: no socket, no clock, no thread, no randomness."""
