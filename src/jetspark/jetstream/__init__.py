"""The JetStream protocol over frames: configurations, requests and replies, state machines. No I/O."""
