"""Publishers as state machines: outstanding messages, the meaning of answers, and messages in doubt after a lost
session."""
