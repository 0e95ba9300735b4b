"""Handlers: events are pulled, run through a user's code, in order by key, and tried again when that fails."""
