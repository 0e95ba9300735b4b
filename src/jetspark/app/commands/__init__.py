"""Commands: what an application is asked to do, decided on the events inside a boundary, and stored under guards."""
