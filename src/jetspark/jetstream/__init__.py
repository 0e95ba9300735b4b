"""What JetStream means, over frames: configurations, requests and replies, state machines. No I/O."""
