"""Events of an application as typed rows: the format ``jetstream_events`` and the functions around it."""
