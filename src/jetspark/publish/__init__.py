"""Publishers as state machines: what is outstanding, what an answer means, what a lost session leaves in doubt."""
